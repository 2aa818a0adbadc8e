"""Scales and zero points of runs of channels, brought from the rows of pages to the lanes of logits.

They are bfloat16, so a product with a matrix of zeros and ones moves them as they are. A chunk of 128 logits
has its slots in rows of a few pages: each lane takes what lies where it needs it in all of them, and keeps
that of its own row. Knows where they lie; not what is attended to.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas.tpu.nibbles import MIDDLE
from kernels_pallas.tpu.parts import LANES, Runs
from kernels_pallas.tpu.sizes import Shape


class Spread(NamedTuple):
    """Where chunks of logits find the scales of their slots, in one of a few patterns; or refs of it.

    Attributes:
        lanes: bfloat16 `[pattern, 128, run * 128]`, 1 from each lane of a row to the lanes of logits that
            need it if the row is theirs.
        rows: float32 `[pattern, row, run * 128]`, 1 where a row of a chunk's pages is a lane's.
    """

    lanes: Any
    rows: Any


def spread_of(shape: Shape) -> Spread | None:
    """Return where chunks find the scales of their slots; None where there are no runs."""
    runs = shape.runs
    if runs is None:
        return None
    chunks = [(place, begin) for place in range(shape.share) for begin in range(0, shape.column, LANES)]
    pairs = [_pattern(shape, runs, *chunk) for chunk in chunks]
    lanes, rows = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    return Spread(jnp.asarray(lanes, jnp.bfloat16), jnp.asarray(rows, jnp.float32))


def _pattern(shape: Shape, runs: Runs, place: int, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two of chunks that begin at a slot of a column."""
    page, within = np.divmod(begin + np.arange(LANES), shape.column)
    slot = place * shape.column + shape.row_of(within)
    column, row = np.divmod(slot, runs.columns.num_rows)
    of_run = np.arange(runs.count)[:, None]
    found = (column * runs.columns.width + of_run).reshape(-1)
    own = np.tile(page * runs.rows + row, runs.count)
    num_rows = _chunk_pages(shape) * runs.rows
    return np.arange(LANES)[:, None] == found, np.arange(num_rows)[:, None] == own


def _chunk_pages(shape: Shape) -> int:
    return max(1, LANES // shape.column)


def scales_of_runs(
    scale: Array, zero: Array, spread: Spread, shape: Shape
) -> tuple[list[Array], list[Array]]:
    """Return the scales of each run of entries less `MIDDLE`, and its shifts, `[kv_head, 1, token]`.

    Args:
        scale: bfloat16 `[kv_head, page, row, 128]`.
        zero: the same.
        spread: from `spread_of`.
        shape: of the call.
    """
    runs, num_arrays = shape.runs, 2 * shape.num_kv_heads
    assert runs is not None
    num_tokens = scale.shape[1] * shape.page_size
    rows = [array.astype(jnp.float32).reshape(-1, LANES) for array in (scale, zero)]
    rows = jnp.concatenate(rows, axis=0).astype(jnp.bfloat16)
    patterns = [
        _chunks_of(rows, spread.lanes[pattern], spread.rows[pattern], num_arrays)
        for pattern in range(spread.lanes.shape[0])
    ]
    chunks = []
    for lane in range(0, num_tokens, LANES):
        place, rest = divmod(lane, num_tokens // shape.share)
        page, begin = divmod(rest, shape.column)
        pattern = (place * shape.column + begin) // min(LANES, shape.column)
        chunks.append(patterns[pattern][page // _chunk_pages(shape)])
    joined = [
        jnp.concatenate([chunk[:, run : run + LANES] for chunk in chunks], axis=-1)[:, None]
        for run in range(0, runs.count * LANES, LANES)
    ]
    scales = [both[: shape.num_kv_heads] for both in joined]
    shifts = [both[shape.num_kv_heads :] + MIDDLE * scale for both, scale in zip(joined, scales, strict=True)]
    return scales, shifts


def _chunks_of(rows: Array, lanes: Array, own: Array, num_arrays: int) -> list[Array]:
    """Return what the slots of each chunk find in all arrays, `[array, run * 128]`, by one pattern."""
    num_rows = own.shape[0]
    wide = jnp.dot(rows, lanes, preferred_element_type=jnp.float32)
    wide = wide.reshape(num_arrays, -1, num_rows, lanes.shape[1])
    kept = jnp.where(own > 0, wide, 0.0).astype(jnp.bfloat16)
    # Of a lane's rows in an array one is not zero, so their sum is what it holds. Products mix arrays: a slot
    # that is not finite in one head is so in all.
    dims = num_arrays, num_arrays * num_rows
    array, row = (jax.lax.broadcasted_iota(jnp.int32, dims, axis) for axis in (0, 1))
    ones = (jax.lax.div(row, jnp.int32(num_rows)) == array).astype(jnp.bfloat16)
    chunks = [kept[:, chunk].reshape(-1, kept.shape[-1]) for chunk in range(kept.shape[1])]
    return [jnp.dot(ones, chunk, preferred_element_type=jnp.float32) for chunk in chunks]
