"""The logits of a tile: products of queries and entries, which are multiplied in whole rows of lanes.

Slots that share a row are told apart by queries that have zeros at all places but one, and so are runs of
channels whose scales differ. Knows one pool of keys and some of its heads; no mask.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kernels_pallas.tpu.parts import Part, Runs
from kernels_pallas.tpu.pieces import Query
from kernels_pallas.tpu.sizes import DIGITS

# What a unit of a v6e sums over, and rows at most that leave it waiting for what it is loaded with.
_UNIT_DEPTH, _PAIRED_ROWS = 256, 64


def logits_of(
    part: Part,
    query: Query,
    entries: Shaped[Array, "head place lane"],
    scales: list[Any],
    shifts: list[Any],
) -> Float[Array, "head row token"]:
    """Return the logits of a pool's tile, the slots of each column beside those of the one before it.

    Args:
        part: the pool.
        query: of a piece.
        entries: rows of lanes; int8 where those of the query are.
        scales: of the tokens, `[head, 1, token]` or as many equal lanes; one for each run of channels, or one
            for all, or None.
        shifts: of the tokens and runs, the same: what an entry of nothing stands for.
    """
    if part.scaling == "channels":
        assert part.runs is not None
        return _logits_of_runs(part, part.runs, query.rows, entries, scales, shifts)
    shared = paired_products("hrd,hsd->hrs", query.rows, entries, axis=2)
    logits = jnp.concatenate(jnp.split(shared, part.columns.share, axis=1), axis=-1)
    if query.unit is not None:
        digits = jnp.split(logits, DIGITS, axis=1)
        whole = sum(digit.astype(jnp.float32) * 256**place for place, digit in enumerate(digits))
        logits = whole * query.unit
    return logits if scales[0] is None else logits * scales[0]


def _logits_of_runs(
    part: Part, runs: Runs, query: Array, entries: Array, scales: list[Array], shifts: list[Array]
) -> Array:
    """Return the logits of entries whose runs of channels have scales and shifts, half by half."""
    share, num_rows, width = part.columns.share, query.shape[1], entries.shape[1]
    count, lanes = runs.count // part.halves, part.lanes // part.halves
    places = [(place, run) for place in range(share) for run in range(count)]
    begins = [place * part.place_lanes + run * runs.span for place, run in places]
    logits: list[Any] = [0.0] * share
    for half in range(part.halves):
        own = slice(half * lanes, (half + 1) * lanes)
        queries = _alone(query[:, :, own], begins, runs.span)
        shared = products("hrd,hsd->hrs", jnp.concatenate(queries, axis=1), entries[:, :, own])
        sums = [jnp.sum(alone.astype(jnp.float32), axis=-1, keepdims=True) for alone in queries[:count]]
        for i, (place, run) in enumerate(places):
            scale, shift = (
                array[half * count + run][:, :, place * width : (place + 1) * width]
                for array in (scales, shifts)
            )
            logits[place] += shared[:, i * num_rows : (i + 1) * num_rows] * scale + sums[run] * shift
    return jnp.concatenate(logits, axis=-1)


def _alone(query: Array, begins: list[int], span: int) -> list[Array]:
    """Return queries of which lanes [begin, begin + span) are kept, for each begin."""
    lane = jax.lax.broadcasted_iota(jnp.int32, query.shape, 2)
    # As wide as the masks are.
    wide = query.astype(jnp.float32)
    kept = [jnp.where((lane >= begin) & (lane < begin + span), wide, 0.0) for begin in begins]
    return [alone.astype(query.dtype) for alone in kept]


def paired_products(equation: str, left: Array, right: Array, axis: int) -> Array:
    """Multiply as `products`; of few rows two heads at once, where each would fill half of a unit.

    A v6e's units are 256 deep, and to load them is what takes time: rows of one head have zeros where the
    other's are.

    Args:
        equation: of `products`, whose sums are over the last axis of left.
        left: `[head, row, _]`.
        right: three axes, of which the first is of heads.
        axis: of right that is summed over.
    """
    num_heads, num_rows, depth = left.shape
    if num_heads % 2 or depth != _UNIT_DEPTH // 2 or num_rows > _PAIRED_ROWS:
        return products(equation, left, right)
    left, right = (array.reshape(num_heads // 2, 2, *array.shape[1:]) for array in (left, right))
    nothing = jnp.zeros_like(left[:, 0])
    rows = [left[:, 0], nothing], [nothing, left[:, 1]]
    joined = jnp.concatenate([jnp.concatenate(pair, axis=2) for pair in rows], axis=1)
    out = products(equation, joined, jnp.concatenate([right[:, 0], right[:, 1]], axis=axis))
    return out.reshape(num_heads, num_rows, -1)


def products(equation: str, left: Array, right: Array) -> Array:
    """Multiply in float32, or integers in int32; operands that are float32 are not rounded to bfloat16."""
    dtype = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)
