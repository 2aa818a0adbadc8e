"""Scales and zero points of runs of channels, brought from the rows of pages to the lanes of logits.

They are bfloat16, so a product with a matrix of zeros and ones moves them as they are. A chunk of 128 logits
has its slots in rows of a few pages: each lane takes what lies where it needs it in all of them, and keeps
that of its own row. Knows where they lie; not what is attended to.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels_pallas.tpu.parts import LANES, Runs, Stored
from kernels_pallas.tpu.sizes import Shape

# What 4-bit entries are multiplied less: of either sign, they and their weights, which are rounded, do not
# leave most of their sum to be taken back by the zero point.
MIDDLE = 8.0


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
    runs = shape.values.runs
    if runs is None:
        return None
    chunks = [(place, begin) for place in range(shape.share) for begin in range(0, shape.column, LANES)]
    pairs = [_pattern(shape, runs, *chunk) for chunk in chunks]
    lanes, rows = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    return Spread(jnp.asarray(lanes, jnp.bfloat16), jnp.asarray(rows, jnp.float32))


def _pattern(shape: Shape, runs: Runs, place: int, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two of chunks that begin at a slot of a column."""
    page, within = np.divmod(begin + np.arange(LANES), shape.column)
    column, row = np.divmod(place * shape.column + within, runs.columns.num_rows)
    of_run = np.arange(runs.count)[:, None]
    found = (column * runs.columns.width + of_run).reshape(-1)
    own = np.tile(page * runs.rows + row, runs.count)
    num_rows = _chunk_pages(shape) * runs.rows
    return np.arange(LANES)[:, None] == found, np.arange(num_rows)[:, None] == own


def _chunk_pages(shape: Shape) -> int:
    return max(1, LANES // shape.column)


def scales_of_runs(
    tiles: Stored, buffer: Any, spread: Spread, shape: Shape, block: int
) -> tuple[list[Array], list[Array]]:
    """Return the scales of each run of entries less `MIDDLE`, and its shifts, `[kv_head, 1, token]`."""
    runs, chunks = shape.values.runs, []
    assert runs is not None
    for lane in range(0, block, LANES):
        place, rest = divmod(lane, block // shape.share)
        page, begin = divmod(rest, shape.column)
        pattern = (place * shape.column + begin) // min(LANES, shape.column)
        pages = slice(page, page + _chunk_pages(shape))
        rows = [
            ref[buffer, :, pages].astype(jnp.float32).reshape(-1, LANES) for ref in (tiles.scale, tiles.zero)
        ]
        rows = jnp.concatenate(rows, axis=0).astype(jnp.bfloat16)
        wide = jnp.dot(rows, spread.lanes[pattern], preferred_element_type=jnp.float32)
        wide = wide.reshape(2 * shape.num_kv_heads, -1, wide.shape[-1])
        chunks.append(jnp.sum(jnp.where(spread.rows[pattern] > 0, wide, 0.0), axis=1))
    joined = [
        jnp.concatenate([chunk[:, run : run + LANES] for chunk in chunks], axis=-1)[:, None]
        for run in range(0, runs.count * LANES, LANES)
    ]
    scales = [both[: shape.num_kv_heads] for both in joined]
    shifts = [both[shape.num_kv_heads :] + MIDDLE * scale for both, scale in zip(joined, scales, strict=True)]
    return scales, shifts
