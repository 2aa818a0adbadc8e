"""The queue of tiles: the copies that bring them from the pools in HBM, for all pieces in their order.

While one tile is attended to, the next `num_buffers - 1` are on their way, the first tiles of the next pieces
among them, so that short sequences do not wait for one another. Of a tile only the pages that a query sees
are fetched, in one copy of all heads for each pool. Of the page table the part that names them is in SMEM,
and the next on its way. Pages are counted in their stripe. Knows no query and no number that is stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu.parts import Stored
from kernels_pallas.tpu.pieces import Pieces
from kernels_pallas.tpu.sizes import Sizes

# The cursor: the piece and tile that are fetched next and their buffer, the buffer that is next in use, and
# the part of the table that is in use and its slot.
CURSOR = 6
_PIECE, _TILE, _FILL, _DRAIN, _PART, _SLOT = range(CURSOR)


@dataclasses.dataclass
class Starts:
    """The copies of a tile, which begin page by page while another is attended to.

    The compiler keeps loads of tiles and copies into them in the order of the program: neither may come in a
    heap. Copies take scalar slots alone, some four cycles each, and cost nothing beside a vector's work, of
    which there is most while weights become known and values are loaded.

    Attributes:
        steps: begins those of a page with each step, and ends with what is to be done about pages that are
            none.
        num_pages: whose copies have begun.
    """

    steps: Iterator[Any]
    num_pages: int = 0

    def reach(self, num_pages: int) -> None:
        """Begin copies until those of so many pages have."""
        while self.num_pages < num_pages:
            next(self.steps)
            self.num_pages += 1

    def end(self) -> tuple[Any, Callable[[], None]]:
        """Begin the rest; return whether the tile has pages that are none, and what leaves them out."""
        *_, last = self.steps
        return last


@dataclasses.dataclass(frozen=True)
class Queue:
    """The queue, inside a kernel.

    Attributes:
        sizes: of the call.
        pieces: in SMEM.
        offset: int32 `[1]` in SMEM.
        table: int32 `[part, seq * max_pages]` in HBM.
        pools: in HBM.
        tiles: entries `[buffer, kv_head, page, row, 128]` and scales `[buffer, page, kv_head * row, 128]` of
            each pool, in VMEM; scales and zero points of runs as entries.
        rows: int32 `[slot * seq * max_pages]` in SMEM, as the next four: parts of the table.
        cursor: int32 `[6]`.
        copies: int32 `[buffer]`, pages on their way.
        holes: int32 `[buffer]`, pages that are none.
        places: int32 `[buffer, page]`, places in the tile of those that are none.
        semaphores: `[buffer]`.
        row_semaphores: `[slot]`.
    """

    sizes: Sizes
    pieces: Pieces
    offset: Any
    table: Any
    pools: tuple[Stored, ...]
    tiles: tuple[Stored, ...]
    rows: Any
    cursor: Any
    copies: Any
    holes: Any
    places: Any
    semaphores: Any
    row_semaphores: Any

    def end_page(self, piece: Any) -> Any:
        """Return the page past the last that a piece sees."""
        page_size = self.sizes.shape.page_size
        return _divided(self.pieces.ends[piece] + page_size - 1, page_size)

    def pages_of(self, piece: Any, tile: Any) -> tuple[Any, Any]:
        """Return the pages of a tile that a piece sees."""
        begin = self.pieces.begins[piece] + tile * self.sizes.block_pages
        return begin, jnp.minimum(self.end_page(piece), begin + self.sizes.block_pages)

    def num_tiles(self, piece: Any) -> Any:
        """Return how many tiles a piece has: the first begins where the piece does."""
        if self.sizes.pieces_at_once > 1:
            return 1
        num_pages = self.end_page(piece) - self.pieces.begins[piece]
        return _divided(num_pages + self.sizes.block_pages - 1, self.sizes.block_pages)

    def begin(self) -> None:
        """Start the copies of the first tiles, as many as there is room for beside one in use."""
        first = self.pieces.following[0]
        self.cursor[_PIECE] = first
        self.cursor[_TILE] = 0
        self.cursor[_FILL] = 0
        self.cursor[_DRAIN] = 0
        self.cursor[_SLOT] = 0
        part = self._part_of(jnp.minimum(first, self.sizes.num_pieces - 1))
        self._copy_rows(part, self._next_slot()).start()
        self._take_rows(part)

        def fetch(_, carry):
            ((has_holes, leave_out),) = (starts.end() for starts in self.fetch(1))
            pl.when(has_holes)(leave_out)
            return carry

        jax.lax.fori_loop(0, self.sizes.num_buffers - 1, fetch, 0)

    def fetch(self, count: int) -> list[Starts]:
        """Return the copies of the tiles from the cursor on, of nothing past the last, and move it on.

        Those of the second go to the buffer of the first that is in use, and so on.
        """
        piece, tile, buffer = [self.cursor[i] for i in (_PIECE, _TILE, _FILL)]
        starts = []
        for _ in range(count):
            starts.append(Starts(self._steps(piece, tile, buffer)))
            is_last = tile + 1 >= self.num_tiles(piece)
            following = self.pieces.following[jnp.minimum(piece + 1, self.sizes.num_pieces)]
            piece, tile = jnp.where(is_last, following, piece), jnp.where(is_last, 0, tile + 1)
            buffer = self._next(buffer)
        self.cursor[_PIECE], self.cursor[_TILE], self.cursor[_FILL] = piece, tile, buffer
        return starts

    def _steps(self, piece: Any, tile: Any, buffer: Any) -> Iterator[Any]:
        """Begin the copies of a page with each step, without a branch: see `Starts`."""
        sizes, max_pages = self.sizes, self.sizes.shape.max_pages
        # Past the last piece its row is read, of which nothing is seen.
        own = jnp.minimum(piece, sizes.shape.num_seqs * sizes.pieces_per_seq - 1)
        part = self._part_of(own)
        if sizes.num_parts > 1:
            is_next = (piece < sizes.num_pieces) & (part != self.cursor[_PART])
            pl.when(is_next)(lambda: self._take_rows(part))
        row = _divided(own, sizes.pieces_per_seq) - part * sizes.part_seqs
        base = self.cursor[_SLOT] * sizes.part_pages + row * max_pages
        begin, end = self.pages_of(piece, tile)
        first = (begin - _divided(begin, max_pages) * max_pages).astype(jnp.uint32)
        has_holes = self.pieces.holed[piece] != 0
        for place in range(sizes.block_pages):
            # A row that ends begins anew: without sign, what would be negative is the larger of the two.
            column = first + place % max_pages
            index = self.rows[base + jnp.minimum(column, column - max_pages).astype(jnp.int32)]
            is_page = (place < end - begin) & _is_below(index, sizes.num_pages)
            for array, tile_ref, semaphore in self._pairs(buffer, place):
                pages = array.at[pl.ds(self.offset[0], sizes.num_pages)]
                pl.when(is_page)(pltpu.make_async_copy(pages.at[index], tile_ref, semaphore).start)
            yield

        self.holes[buffer] = 0
        self.copies[buffer] = end - begin

        def leave_out():
            def look(place, carry):
                index = self.rows[base + jax.lax.rem(place, max_pages)]
                is_hole = ~_is_below(index, sizes.num_pages)
                pl.when(is_hole)(functools.partial(self._leave_out, buffer, place - begin))
                return carry

            jax.lax.fori_loop(begin, end, look, 0)
            self.copies[buffer] = end - begin - self.holes[buffer]

        yield has_holes, leave_out

    def take(self) -> Any:
        """Wait for every page of the next tile; return its buffer, in use until its values are loaded."""
        buffer = self.cursor[_DRAIN]
        copies = self.copies[buffer]
        for bit in range(self.sizes.block_pages.bit_length()):
            is_set = copies & (1 << bit) != 0
            pl.when(is_set)(functools.partial(self._wait, buffer, 1 << bit))
        self.cursor[_DRAIN] = self._next(buffer)
        return buffer

    def _part_of(self, piece: Any) -> Any:
        """Return the part of the table that names a piece's pages."""
        return _divided(piece, self.sizes.pieces_per_seq * self.sizes.part_seqs)

    def _take_rows(self, part: Any) -> None:
        """Wait for a part of the table, and start the copy of the next that is needed."""
        slot = self._next_slot()
        self._copy_rows(part, slot).wait()
        self.cursor[_PART] = part
        self.cursor[_SLOT] = slot
        end = (part + 1) * self.sizes.pieces_per_seq * self.sizes.part_seqs
        following = self.pieces.following[jnp.minimum(end, self.sizes.num_pieces)]

        @pl.when(following < self.sizes.num_pieces)
        def _():
            self._copy_rows(self._part_of(following), self._next_slot()).start()

    def _next_slot(self) -> Any:
        return jax.lax.rem(self.cursor[_SLOT] + 1, self.sizes.num_slots)

    def _copy_rows(self, part: Any, slot: Any) -> Any:
        rows = self.rows.at[pl.ds(slot * self.sizes.part_pages, self.sizes.part_pages)]
        return pltpu.make_async_copy(self.table.at[part], rows, self.row_semaphores.at[slot])

    def _wait(self, buffer: Any, count: int) -> None:
        """Wait for the copies of so many pages, whichever they are: semaphores count bytes."""
        for _, tile, semaphore in self._pairs(buffer, pl.ds(0, count)):
            pltpu.make_async_copy(tile, tile, semaphore).wait()

    def _pairs(self, buffer: Any, place: Any) -> list[tuple[Any, Any, Any]]:
        """Return each pool's arrays, where pages of them go, and the semaphore of that."""
        pairs, semaphore = [], self.semaphores.at[buffer]
        for pool, tiles in zip(self.pools, self.tiles, strict=True):
            pairs.append((pool.data, tiles.data.at[buffer, :, place], semaphore))
            if tiles.zero is not None:
                pairs.append((pool.scale, tiles.scale.at[buffer, :, place], semaphore))
                pairs.append((pool.zero, tiles.zero.at[buffer, :, place], semaphore))
            elif tiles.scale is not None:
                pairs.append((pool.scale, tiles.scale.at[buffer, place], semaphore))
        return pairs

    def _leave_out(self, buffer: Any, place: Any) -> None:
        """Note that a place in a tile has no page, and put zeros there: of values, 0 * NaN is NaN."""
        self.places[buffer, self.holes[buffer]] = place
        self.holes[buffer] += 1
        tiles = self.tiles[self.sizes.shape.value]
        for array in (tiles.data,) if tiles.zero is None else (tiles.scale, tiles.zero):
            array[buffer, :, place] = jnp.zeros((array.shape[1], *array.shape[3:]), array.dtype)

    def _next(self, buffer: Any) -> Any:
        return jnp.where(buffer + 1 == self.sizes.num_buffers, 0, buffer + 1)


def _divided(count: Any, by: int) -> Any:
    """Divide a number that is not negative, without a look at its sign."""
    return jax.lax.div(jnp.asarray(count).astype(jnp.uint32), jnp.uint32(by)).astype(jnp.int32)


def _is_below(count: Any, limit: Any) -> Any:
    """Return whether a number is in [0, limit), in one comparison: without sign a negative one is large."""
    return jnp.asarray(count).astype(jnp.uint32) < jnp.asarray(limit).astype(jnp.uint32)
