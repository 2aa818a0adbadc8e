"""The tiles in VMEM, inside a kernel: what they hold as what is multiplied, in the order of logits.

Logits go along the lanes: those of a chunk's slots in the first column of their pages, then those in the
next. Knows what is stored; no query, no piece and no copy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas.slots import Columns
from kernels_pallas.tpu.nibbles import nibbles
from kernels_pallas.tpu.parts import LANES, Stored
from kernels_pallas.tpu.runs import Spread, scales_of_runs
from kernels_pallas.tpu.sizes import Sizes
from kernels_pallas.tpu.slot_runs import decoded

_FP8: dict[str, Any] = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles, of which a buffer holds one.

    Attributes:
        sizes: of the call.
        stored: refs of each pool; see `Queue`.
        pools: of which the scales of heads are in VMEM.
        spread: of runs of channels; None where there are none.
    """

    sizes: Sizes
    stored: tuple[Stored, ...]
    pools: tuple[Stored, ...]
    spread: Spread | None

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.sizes.chunk_pages * self.sizes.shape.page_size

    def slots(self) -> Array:
        """Return the slots of a piece in a tile in the order of logits, int32 `[1, token]`."""
        shape, column = self.sizes.shape, self.sizes.shape.column
        place = jax.lax.broadcasted_iota(jnp.int32, (1, self.chunk_tokens // shape.share), 1)
        if shape.is_paired:
            within = jax.lax.rem(place, column)
            place += shape.row_of(within) - within
        if shape.share > 1:
            place += jax.lax.div(place, column) * (shape.page_size - column)
        begins = range(0, self.sizes.block, self.chunk_tokens)
        places = [place + begin + i * column for begin in begins for i in range(shape.share)]
        return jnp.concatenate(places, axis=1)

    def numbers(
        self,
        index: int,
        buffer: Any,
        heads: Any,
        chunk: int,
        dtype: Any,
        reach: Callable[[int], None] | None = None,
    ) -> Array:
        """Return entries of a chunk as what is multiplied, `[head, row, lane]`.

        Args:
            index: of the pool.
            buffer: of the tile.
            heads: of which.
            chunk: of the tile's, of all pieces.
            dtype: of the result.
            reach: told after each page how many of the tile have been loaded.
        """
        shape, part, stored = self.sizes.shape, self.sizes.shape.parts[index], self.stored[index]
        entries = self._of_pages(stored.data, buffer, heads, chunk, reach)
        if part.entry == "int4":
            halves = nibbles(entries, part, is_paired=shape.is_paired)
            if part.scaling == "slots":
                of_runs = (self._of_pages(ref, buffer, heads, chunk) for ref in stored[1:])
                halves = decoded(part, halves, *of_runs, is_paired=shape.is_paired, dtype=dtype)
        else:
            halves = [pltpu.bitcast(entries, _FP8[part.entry]) if part.entry in _FP8 else entries]
        halves = [half.astype(dtype) for half in halves]
        num_rows, column = part.columns.num_rows, shape.column

        def rows_of(half, first):
            """Return what lies in rows [first, first + column) of every page."""
            return half[:, :, first : first + column].reshape(half.shape[0], -1, LANES)

        return jnp.concatenate(
            [
                jnp.concatenate([rows_of(half, first + i) for i in range(0, num_rows, column)], axis=1)
                for half in halves
                for first in range(0, part.rows, num_rows)
            ],
            axis=2,
        )

    def _of_pages(
        self, ref: Any, buffer: Any, heads: Any, chunk: int, reach: Callable[[int], None] | None = None
    ) -> Array:
        """Return what is stored of a chunk's pages, `[head, page, row, 128]`."""
        loaded = []
        for page in range(chunk * self.sizes.chunk_pages, (chunk + 1) * self.sizes.chunk_pages):
            loaded.append(ref[buffer, page, heads])
            if reach is not None:
                reach(page + 1)
        return jnp.stack(loaded, axis=1)

    def scales(self, index: int, buffer: Any, chunk: int) -> tuple[list[Any], list[Any]]:
        """Return scales and shifts of a chunk of a pool, of all heads, `[kv_head, 1, token]`.

        One of each for each run of channels; elsewhere one scale, or None, and no shift.
        """
        shape, stored = self.sizes.shape, self.stored[index]
        rows_of_lanes = range(self.chunk_tokens // LANES)
        match shape.parts[index].scaling:
            case "channels":
                assert self.spread is not None
                scale, zero = (self._of_pages(ref, buffer, slice(None), chunk) for ref in stored[1:])
                return scales_of_runs(scale, zero, self.spread, shape)
            case "head":
                return [jnp.concatenate([self.pools[index].scale[...] for _ in rows_of_lanes], axis=-1)], []
            case "token":
                lanes = [self._scale_lanes(stored.scale, buffer, chunk, row) for row in rows_of_lanes]
                return [jnp.concatenate(lanes, axis=-1)[:, None]], []
            case _:
                return [None], []

    def _scale_lanes(self, scale_ref: Any, buffer: Any, chunk: int, row_of_lanes: int) -> Array:
        """Return the scales of the slots of 128 logits of a chunk, `[kv_head, 128]`."""
        shape, column = self.sizes.shape, self.sizes.shape.column
        lane = jax.lax.broadcasted_iota(jnp.int32, (shape.num_kv_heads, LANES), 1)
        num_rows, joined = max(1, shape.page_size // LANES), jnp.zeros((), jnp.float32)
        for begin in range(0, LANES, column):
            place, rest = divmod(row_of_lanes * LANES + begin, self.chunk_tokens // shape.share)
            page = chunk * self.sizes.chunk_pages + rest // column
            row, first = divmod(place * column + rest % column, LANES)
            rows = pl.ds(row, shape.num_kv_heads, stride=num_rows) if num_rows > 1 else slice(None)
            taken = scale_ref[buffer, page, rows]
            if begin != first:
                taken = pltpu.roll(taken, (begin - first) % LANES, 1)
            joined = taken if begin == 0 else jnp.where(lane < begin, joined, taken)
        return joined

    def clear_from(self, buffer: Any, member: int, end: Any) -> None:
        """Zero a piece's slots from `end` on that would spoil a weighted sum or a slot of their row."""
        shape = self.sizes.shape
        for index, (part, stored) in enumerate(zip(shape.parts, self.stored, strict=True)):
            # Integers are never NaN, and scales of dead slots are dropped; those of runs share rows.
            arrays, columns, span = [], part.columns, 1
            if part.runs is not None:
                arrays, columns = [stored.scale, stored.zero], part.runs.columns
                span = part.runs.span if part.scaling == "slots" else 1
            elif part.dtype != jnp.int8 and (index == shape.value or columns.share > 1):
                arrays = [stored.data]
            for array in arrays:
                clear = functools.partial(self._clear, array, columns, span, buffer, member, end)
                pl.when(end < self.sizes.block)(clear)

    def _clear(self, data: Any, columns: Columns, span: int, buffer: Any, member: int, end: Any) -> None:
        """Zero what a tile holds from slot `end` on, of runs what is not whole: 0 * NaN is NaN."""
        num_rows, shape = columns.num_rows, self.sizes.shape
        slot = jax.lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 1)
        slot = (slot + jax.lax.div(lane, columns.width) * num_rows) * span
        # Of a dtype whose masks are as wide as the places.
        wide = jnp.int32 if data.dtype == jnp.uint8 else jnp.float32

        def clear_page(place, carry):
            page = member * self.sizes.block_pages + place
            is_kept = slot + span <= end - place * shape.page_size
            for head in range(shape.num_kv_heads):
                for row in range(0, columns.num_parts * num_rows, num_rows):
                    entries = data[buffer, page, head, pl.ds(row, num_rows)]
                    kept = jnp.where(is_kept, entries.astype(wide), jnp.zeros((), wide))
                    data[buffer, page, head, pl.ds(row, num_rows)] = kept.astype(entries.dtype)
            return carry

        jax.lax.fori_loop(jax.lax.div(end, shape.page_size), self.sizes.block_pages, clear_page, 0)
