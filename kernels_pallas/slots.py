"""Where slots lie in a page: one after another in a matrix of rows and lanes.

A page of an array `[page, kv_head, row, lane]` is such a matrix for each head. A slot is as wide as its
entries, or wider so that slots share a row evenly or take whole rows; what is left of a slot, or of the
rows, holds nothing. Of an array `[page, kv_head, slot]` a page is one row.

    lanes    entries    row r holds
    80       80         slot r
    128      128        slot r
    128      80         slot r, and 48 lanes of nothing
    128      64         slots 2 r and 2 r + 1
    128      1          slots 128 r to 128 r + 127
    128      256        half of slot r / 2
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def slot_lanes(num_entries: int, num_lanes: int) -> int:
    """Return the lanes from one slot to the next: the least that divide a row evenly or fill whole ones."""
    if num_entries > num_lanes:
        return -(-num_entries // num_lanes) * num_lanes
    return next(lanes for lanes in range(num_entries, num_lanes + 1) if num_lanes % lanes == 0)


def page_rows(num_slots: int, num_entries: int, num_lanes: int) -> int:
    """Return the rows that a page needs."""
    return -(-num_slots * slot_lanes(num_entries, num_lanes) // num_lanes)


def as_matrices(pool: Num[Array, "page kv_head *row lane"]) -> Num[Array, "page kv_head row lane"]:
    """Return a pool whose pages are matrices, of one that may have a single row a page."""
    return pool.reshape(*pool.shape[:2], -1, pool.shape[-1])


def window_of(num_entries: int, num_lanes: int) -> tuple[int, int]:
    """Return the rows and lanes that a slot takes."""
    lanes = slot_lanes(num_entries, num_lanes)
    return max(1, lanes // num_lanes), min(lanes, num_lanes)


def place_of(
    slots: Int[Array, "*slots"], num_entries: int, num_lanes: int
) -> tuple[Int[Array, "*slots"], Int[Array, "*slots"]]:
    """Return the row and the lane at which slots of a page begin."""
    first = slots * slot_lanes(num_entries, num_lanes)
    return jax.lax.div(first, jnp.int32(num_lanes)), jax.lax.rem(first, jnp.int32(num_lanes))


def padded(rows: Num[Array, "*outer entry"], num_lanes: int) -> Num[Array, "*outer lane"]:
    """Return entries as wide as their slot, with zeros where it holds nothing."""
    num_entries = rows.shape[-1]
    widths = [(0, 0)] * (rows.ndim - 1) + [(0, slot_lanes(num_entries, num_lanes) - num_entries)]
    return jnp.pad(rows, widths)


def slots_of(
    matrices: Num[Array, "*outer row lane"], shape: tuple[int, ...]
) -> Num[Array, "*outer_slot_entry"]:
    """Return what the slots of pages hold, `[..., slot, *entry]`, without what is left of slots and rows.

    Args:
        matrices: pages, or runs of slots that begin where a slot does.
        shape: slots, and the entries of one; without entries a slot holds a number.
    """
    *outer, _, num_lanes = matrices.shape
    num_slots, *entry = shape
    num_entries = math.prod(entry)
    lanes = slot_lanes(num_entries, num_lanes)
    flat = matrices.reshape(*outer, -1)[..., : num_slots * lanes]
    return flat.reshape(*outer, num_slots, lanes)[..., :num_entries].reshape(*outer, num_slots, *entry)
