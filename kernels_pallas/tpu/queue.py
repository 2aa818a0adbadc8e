"""The queue of tiles: the copies that bring them from the pools in HBM, for all pieces in their order.

While one tile is attended to, the next `num_buffers - 1` are on their way, the first tiles of the next pieces
among them, so that short sequences do not wait for one another. A tile is of one piece, or of as many as are
attended to at once. Of a tile only the pages that a query sees are fetched, in one copy of all heads for each
pool. Of the page table the part that names them is in SMEM, and the next on its way. Pages are counted in
their stripe. Knows no query and no number that is stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class _Row(NamedTuple):
    """Where the table names the pages of a piece in a tile.

    Attributes:
        base: of its row, in SMEM.
        begin: its first page there.
        end: of its pages.
    """

    base: Any
    begin: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class Queue:
    """The queue, inside a kernel.

    Attributes:
        sizes: of the call.
        pieces: in SMEM.
        offset: int32 `[1]` in SMEM.
        table: int32 `[part, seq * max_pages]` in HBM.
        pools: in HBM.
        tiles: entries `[buffer, page, kv_head, row, 128]` and scales `[buffer, page, kv_head * row, 128]` of
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
        """Return the pages that a piece sees of a tile."""
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
            has_holes, leave_out = self.fetch().end()
            pl.when(has_holes)(leave_out)
            return carry

        jax.lax.fori_loop(0, self.sizes.num_buffers - 1, fetch, 0)

    def fetch(self) -> Starts:
        """Return the copies of the tile at the cursor, of nothing past the last, and move it on."""
        piece, tile, buffer = [self.cursor[i] for i in (_PIECE, _TILE, _FILL)]
        is_last = tile + 1 >= self.num_tiles(piece)
        end = jnp.minimum(piece + self.sizes.pieces_at_once, self.sizes.num_pieces)
        self.cursor[_PIECE] = jnp.where(is_last, self.pieces.following[end], piece)
        self.cursor[_TILE] = jnp.where(is_last, 0, tile + 1)
        self.cursor[_FILL] = self._next(buffer)
        return Starts(self._steps(piece, tile, buffer))

    def _steps(self, piece: Any, tile: Any, buffer: Any) -> Iterator[Any]:
        """Begin the copies of a page with each step, without a branch: see `Starts`."""
        num_copies, holed = jnp.int32(0), []
        for member in range(self.sizes.pieces_at_once):
            row = self._row_of(piece + member, tile)
            yield from self._steps_of_piece(row, buffer, member * self.sizes.block_pages)
            num_copies += row.end - row.begin
            has_holes = self.pieces.holed[piece + member] != 0
            holed.append((has_holes, functools.partial(self._leave_out_holes, row, buffer, member)))
        self.holes[buffer] = 0
        self.copies[buffer] = num_copies

        def leave_out():
            for has_holes, leave_out_holes in holed:
                pl.when(has_holes)(leave_out_holes)
            self.copies[buffer] = num_copies - self.holes[buffer]

        yield functools.reduce(jnp.logical_or, [has_holes for has_holes, _ in holed]), leave_out

    def _row_of(self, piece: Any, tile: Any) -> _Row:
        """Return where the pages of a piece in a tile are named."""
        sizes = self.sizes
        # Past the last piece its row is read, of which nothing is seen.
        own = jnp.minimum(piece, sizes.shape.num_seqs * sizes.pieces_per_seq - 1)
        part = self._part_of(own)
        if sizes.num_parts > 1:
            is_next = (piece < sizes.num_pieces) & (part != self.cursor[_PART])
            pl.when(is_next)(lambda: self._take_rows(part))
        row = _divided(own, sizes.pieces_per_seq) - part * sizes.part_seqs
        base = self.cursor[_SLOT] * sizes.part_pages + row * sizes.shape.max_pages
        return _Row(base, *self.pages_of(piece, tile))

    def _steps_of_piece(self, row: _Row, buffer: Any, first_place: int) -> Iterator[None]:
        """Begin the copies of a piece's pages, those of a page with each step."""
        sizes, max_pages = self.sizes, self.sizes.shape.max_pages
        first = (row.begin - _divided(row.begin, max_pages) * max_pages).astype(jnp.uint32)
        for page in range(sizes.block_pages):
            # A row that ends begins anew: without sign, what would be negative is the larger of the two.
            column = first + page % max_pages
            index = self.rows[row.base + jnp.minimum(column, column - max_pages).astype(jnp.int32)]
            is_page = (page < row.end - row.begin) & _is_below(index, sizes.num_pages)
            for array, tile_ref, semaphore in self._pairs(buffer, first_place + page):
                pages = array.at[pl.ds(self.offset[0], sizes.num_pages)]
                pl.when(is_page)(pltpu.make_async_copy(pages.at[index], tile_ref, semaphore).start)
            yield

    def _leave_out_holes(self, row: _Row, buffer: Any, member: int) -> None:
        """Look for a piece's pages that are none, and leave them out."""

        def look_at(page, carry):
            index = self.rows[row.base + jax.lax.rem(page, self.sizes.shape.max_pages)]
            place = member * self.sizes.block_pages + page - row.begin
            is_hole = ~_is_below(index, self.sizes.num_pages)
            pl.when(is_hole)(functools.partial(self._leave_out, buffer, place))
            return carry

        jax.lax.fori_loop(row.begin, row.end, look_at, 0)

    def take(self) -> Any:
        """Wait for every page of the next tile; return its buffer, in use until its values are loaded."""
        buffer = self.cursor[_DRAIN]
        copies = self.copies[buffer]
        for bit in range(self.sizes.tile_pages.bit_length()):
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
            pairs.append((pool.data, tiles.data.at[buffer, place], semaphore))
            if tiles.zero is not None:
                pairs.append((pool.scale, tiles.scale.at[buffer, place], semaphore))
                pairs.append((pool.zero, tiles.zero.at[buffer, place], semaphore))
            elif tiles.scale is not None:
                pairs.append((pool.scale, tiles.scale.at[buffer, place], semaphore))
        return pairs

    def _leave_out(self, buffer: Any, place: Any) -> None:
        """Note that a place in a tile has no page, and put zeros there: of values, 0 * NaN is NaN."""
        self.places[buffer, self.holes[buffer]] = place
        self.holes[buffer] += 1
        tiles = self.tiles[self.sizes.shape.value]
        for array in (tiles.data,) if tiles.zero is None else (tiles.scale, tiles.zero):
            array[buffer, place] = jnp.zeros(array.shape[2:], array.dtype)

    def _next(self, buffer: Any) -> Any:
        return jnp.where(buffer + 1 == self.sizes.num_buffers, 0, buffer + 1)


def _divided(count: Any, by: int) -> Any:
    """Divide a number that is not negative, without a look at its sign."""
    return jax.lax.div(jnp.asarray(count).astype(jnp.uint32), jnp.uint32(by)).astype(jnp.int32)


def _is_below(count: Any, limit: Any) -> Any:
    """Return whether a number is in [0, limit), in one comparison: without sign a negative one is large."""
    return jnp.asarray(count).astype(jnp.uint32) < jnp.asarray(limit).astype(jnp.uint32)
