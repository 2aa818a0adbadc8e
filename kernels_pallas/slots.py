"""Where slots lie in a page: in columns of a matrix of rows and lanes.

A page of an array `[page, kv_head, row, lane]` is such a matrix for each head. Its slots stand below one
another, and go on in the next column where several fit side by side. A slot is as wide as its entries, or
wider so that columns fill a row evenly or take whole rows; where it takes several, the second is as many rows
below the first as the page has slots. What is left of a slot, or of the rows, holds nothing. Numbers, of an
array `[page, kv_head, slot]`, follow one another along the lanes.

    lanes    entries     row r of a page of 32 slots holds
    80       80          slot r
    128      128         slot r
    128      80          slot r, and 48 lanes of nothing
    128      64          slots r and 16 + r
    128      256         half of slot r; row 32 + r the other half
    128      a number    slots 128 r to 128 r + 127

So a kernel takes whole rows: it moves no lane, and shuffles no rows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


class Columns(NamedTuple):
    """How the slots of a page lie.

    Attributes:
        share: columns side by side.
        num_parts: rows of a slot, of which each is in a column of its own, one below another.
        num_rows: of a column.
        width: lanes of a column.
    """

    share: int
    num_parts: int
    num_rows: int
    width: int


def columns_of(num_slots: int, num_entries: int, num_lanes: int) -> Columns:
    """Return how slots of so many entries lie in rows of so many lanes."""
    lanes = slot_lanes(num_entries, num_lanes)
    share = max(1, num_lanes // lanes)
    return Columns(share, max(1, lanes // num_lanes), -(-num_slots // share), min(lanes, num_lanes))


def slot_lanes(num_entries: int, num_lanes: int) -> int:
    """Return the lanes that a slot takes: the least that divide a row evenly or fill whole ones."""
    if num_entries > num_lanes:
        return -(-num_entries // num_lanes) * num_lanes
    return next(lanes for lanes in range(num_entries, num_lanes + 1) if num_lanes % lanes == 0)


def page_rows(num_slots: int, num_entries: int, num_lanes: int) -> int:
    """Return the rows that a page needs."""
    columns = columns_of(num_slots, num_entries, num_lanes)
    return columns.num_parts * columns.num_rows


def as_matrices(pool: Num[Array, "page kv_head *row lane"]) -> Num[Array, "page kv_head row lane"]:
    """Return a pool whose pages are matrices, of one that may have a single row a page."""
    return pool.reshape(*pool.shape[:2], -1, pool.shape[-1])


class Windows(NamedTuple):
    """Parts of pages that are to be written.

    Attributes:
        rows: what they are to hold.
        row: where each begins in its page.
        lane: the same.
    """

    rows: Num[Array, "*outer kv_head window row lane"]
    row: Int[Array, "*outer window"]
    lane: Int[Array, "*outer window"]


def windows_of(
    rows: Num[Array, "seq time kv_head *entry"],
    slots: Int[Array, "seq time"],
    *,
    page_size: int,
    num_lanes: int,
) -> Windows:
    """Cut what slots are to hold into windows of the rows of their pages.

    Args:
        rows: numbers, or the entries of a slot each, or of a run of slots each, `[..., slot, entry]`.
        slots: of each row in its page, or the first of its run, which begins at a multiple of its length.
        page_size: slots of a page.
        num_lanes: of a row.
    """
    *outer, entry = (*rows.shape[:3], rows.shape[3:])
    if not entry:
        row, lane = jax.lax.div(slots, jnp.int32(num_lanes)), jax.lax.rem(slots, jnp.int32(num_lanes))
        return Windows(rows[..., None, None, None], row[..., None], lane[..., None])
    run, width = (1, *entry)[-2:]
    columns = columns_of(page_size, width, num_lanes)
    # A run may go on in the next column.
    size = math.gcd(run, columns.num_rows)
    padding = columns.width * columns.num_parts - width
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padding)])
    rows = rows.reshape(*outer, run // size, size, columns.num_parts, columns.width).swapaxes(-2, -3)
    begins = slots[..., None] + jnp.arange(0, run, size, dtype=jnp.int32)[None, None]
    parts = jnp.arange(columns.num_parts, dtype=jnp.int32) * columns.num_rows
    row = jax.lax.rem(begins, jnp.int32(columns.num_rows))[..., None] + parts[None, None, None]
    lane = (jax.lax.div(begins, jnp.int32(columns.num_rows)) * columns.width)[..., None]
    windows = row.reshape(*slots.shape, -1)
    return Windows(
        rows.reshape(*outer, windows.shape[-1], size, columns.width),
        windows,
        jnp.broadcast_to(lane, row.shape).reshape(windows.shape),
    )


def slots_of(
    matrices: Num[Array, "*outer row lane"], shape: tuple[int, ...]
) -> Num[Array, "*outer_slot_entry"]:
    """Return what the slots of pages hold, `[..., slot, *entry]`, without what is left of slots and rows.

    Args:
        matrices: whole pages.
        shape: slots, and the entries of one; without entries a slot holds a number.
    """
    *outer, _, num_lanes = matrices.shape
    num_slots, *entry = shape
    if not entry:
        return matrices.reshape(*outer, -1)[..., :num_slots]
    num_entries = math.prod(entry)
    share, num_parts, num_rows, width = columns_of(num_slots, num_entries, num_lanes)
    parts = matrices[..., : num_parts * num_rows, :].reshape(*outer, num_parts, num_rows, share, width)
    slots = jnp.moveaxis(parts, (-2, -3, -4), (-4, -3, -2))
    slots = slots.reshape(*outer, share * num_rows, num_parts * width)[..., :num_slots, :num_entries]
    return slots.reshape(*outer, num_slots, *entry)
