"""Keys whose channels have scales and zero points in runs of slots: encoded runs, and those of the queries.

Entries of a run become numbers on their way to the product. A query's own run is not read from them: its
logits are products with the keys as they were given, put where their slots are in a tile. Knows one pool and
some of its heads; not what is seen.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.tpu.logits import products
from kernels_pallas.tpu.nibbles import MIDDLE
from kernels_pallas.tpu.parts import LANES, Part


def decoded(
    part: Part, halves: list[Array], scale: Array, zero: Array, *, is_paired: bool, dtype: Any
) -> list[Array]:
    """Return the numbers that entries stand for.

    Args:
        part: the pool.
        halves: entries of each half of a head, `[head, page, row, 128]`, less `MIDDLE`.
        scale: bfloat16 `[head, page, row, 128]`; see `Runs.columns`.
        zero: the same.
        is_paired: whether even rows of a column come before odd ones.
        dtype: of the numbers.
    """
    assert part.runs is not None
    # Rows whose slots are of one run at each place.
    size, stride = math.gcd(part.runs.span, part.columns.num_rows), 2 if is_paired else 1
    scale, zero = (array.astype(jnp.float32) for array in (scale, zero))
    scales, shifts = (_turner(array) for array in (scale, zero + MIDDLE * scale))
    numbers = []
    for half, entries in enumerate(halves):
        groups = []
        for first in range(0, part.rows, size // stride):
            group = entries[:, :, first : first + size // stride].astype(dtype)
            begin, row = first - first % part.columns.num_rows, first % part.columns.num_rows
            row = begin + row * stride % part.columns.num_rows
            factor, shift = (
                jnp.broadcast_to(_of_rows(part, half, row, turned), group.shape).astype(dtype)
                for turned in (scales, shifts)
            )
            groups.append(group * factor + shift)
        numbers.append(jnp.concatenate(groups, axis=2))
    return numbers


def _turner(array: Array) -> Callable[[int], Array]:
    """Return a function that gives an array with its lanes moved on, computed once."""

    @functools.cache
    def turned(shift: int) -> Array:
        return array if shift == 0 else pltpu.roll(array, shift, array.ndim - 1)

    return turned


def _of_rows(part: Part, half: int, first: int, turned: Callable[[int], Array]) -> Array:
    """Return what each lane of the rows from `first` on is scaled by, `[head, page, 1, 128]`."""
    assert part.runs is not None
    columns, of_runs = part.columns, part.runs.columns
    part_row, row = divmod(first, columns.num_rows)
    joined: Any = 0.0
    for place in range(columns.share):
        column, run_row = divmod((place * columns.num_rows + row) // part.runs.span, of_runs.num_rows)
        for move in _moves(part, half):
            if move.row == part_row:
                target = place * part.place_lanes + move.target
                shift = (target - column * of_runs.width - move.source) % LANES
                at = move.scale_row * of_runs.num_rows + run_row
                taken = turned(shift)[:, :, at : at + 1]
                lane = jax.lax.broadcasted_iota(jnp.int32, taken.shape, 3)
                joined = jnp.where((lane >= target) & (lane < target + move.length), taken, joined)
    return joined


class _Move(NamedTuple):
    """Scales that lie side by side, as do the entries that they are for.

    Attributes:
        row: of the slot, of those that it takes.
        scale_row: of the run, the same.
        source: the first lane, in the first column of runs.
        target: the first lane of the entries, at the first place of a row.
        length: of them.
    """

    row: int
    scale_row: int
    source: int
    target: int
    length: int


def _moves(part: Part, half: int) -> list[_Move]:
    """Return how scales of a half of a head come to its entries."""
    width, moves, entry = part.head_dim // part.halves, [], 0
    while entry < width:
        scale_row, source = divmod(half * width + entry, LANES)
        row, target = divmod(entry, LANES)
        length = min(width - entry, LANES - source, LANES - target)
        moves.append(_Move(row, scale_row, source, target, length))
        entry += length
    return moves


def own_logits(
    query: Float[Array, "head row lane"],
    keys: Float[Array, "head key lane"],
    begin: Any,
    end: Any,
    position: Array,
) -> Float[Array, "head row token"]:
    """Return the logits of keys from position `begin` on at the tokens of their positions, else 0.

    Args:
        query: of one piece.
        keys: as they were given; those from `end` on are not there, and may be NaN.
        begin: position of the first key.
        end: of what there is.
        position: int32 `[1, token]`.
    """
    logits = products("hrd,hsd->hrs", query, keys)
    own = begin + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    logits = jnp.where(own < end, logits, 0.0).reshape(-1, keys.shape[1])
    own = begin + jax.lax.broadcasted_iota(jnp.int32, (keys.shape[1], position.shape[1]), 0)
    placed = products("rs,st->rt", logits, (own == position).astype(jnp.float32))
    return placed.reshape(*query.shape[:2], -1)
