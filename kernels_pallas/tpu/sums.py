"""The sum of a tile's values by the weights of their slots, which are multiplied in whole rows of lanes.

Weights of slots that share a row, and of runs of channels, are multiplied one below the other; of each
product those lanes are kept that are its own. Knows the pool of values and some of its heads; no mask.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.tpu.logits import products
from kernels_pallas.tpu.parts import Part

# Of each run of channels, or of all: `[head, row, token]`, the slots of a column beside those before it.
_Weights = list[Array]


def weighted_sum(
    part: Part, chunks: Iterable[tuple[_Weights, Float[Array, "head place lane"]]], shifts: list[Array]
) -> Float[Array, "head row lane"]:
    """Return the sum of the values of all chunks, each column's in its lanes.

    Args:
        part: the pool.
        chunks: the weights of a chunk and its values.
        shifts: what is to be added for each run, `[head, row, 1]`, where runs have shifts.
    """
    sums = [_sums_of_chunk(part, *chunk) for chunk in chunks]
    totals = [functools.reduce(jnp.add, of_half) for of_half in zip(*sums, strict=True)]
    count = len(shifts) // part.halves
    return jnp.concatenate(
        [
            _in_lanes(part, total, shifts[half * count : (half + 1) * count])
            for half, total in enumerate(totals)
        ],
        axis=-1,
    )


def _sums_of_chunk(part: Part, weights: _Weights, values: Array) -> list[Array]:
    """Return the sums of each half for all columns and runs, `[head, column, run, row, lane]`."""
    share, count = part.columns.share, len(weights) // part.halves
    width, lanes = values.shape[1], values.shape[2] // part.halves
    sums = []
    for half in range(part.halves):
        own = weights[half * count : (half + 1) * count]
        stacked = [run[:, :, i * width : (i + 1) * width] for i in range(share) for run in own]
        left = jnp.concatenate(stacked, axis=1).astype(values.dtype)
        total = products("hrs,hsd->hrd", left, values[:, :, half * lanes : (half + 1) * lanes])
        sums.append(total.reshape(total.shape[0], share, count, -1, lanes))
    return sums


def _in_lanes(part: Part, sums: Array, shifts: list[Array]) -> Array:
    """Return of each column and run the lanes that are its own; a shift once: columns are added."""
    columns, span = part.columns, 0 if part.runs is None else part.runs.span
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, *sums.shape[3:]), 2)
    joined = jnp.zeros((), jnp.float32)
    for column in range(columns.share):
        for run in range(sums.shape[2]):
            own = sums[:, column, run]
            own = own + shifts[run] if shifts and column == 0 else own
            begin = column * columns.width + run * span
            joined = own if column == run == 0 else jnp.where(lane < begin, joined, own)
    return joined
