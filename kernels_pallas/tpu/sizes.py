"""The sizes of a call of the walk, the tiling that it gets, and the memory that it takes."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from kernels_pallas.paged_attention.contract import Tiling
from kernels_pallas.tpu.parts import LANES, SUBLANES, Part, Runs

# Bytes of a decode's tile: a v6e reads them in 1.9 us, three times what a copy takes to begin; an eighth of
# it is what a tile costs however long it is, some 400 cycles. That grows with rows: a decode's tile with as
# many as `_WIDE_ROWS` is longer. Steps of several tokens spread it, so that half does.
_TILE_BYTES, _WIDE_TILE_BYTES, _WIDE_ROWS = 3 * 2**20, 5 * 2**20, 64
# Bytes that are on their way, and tiles that they are, where tiles are short.
_BYTES_AHEAD, _MAX_BUFFERS = 3 * 2**20, 12
# Tokens of tiles at most that are attended to at once, where each is all that a piece sees.
_MAX_TOKENS_AT_ONCE = 2048
# Tiles of the longest row, at least: all of its last one is computed, however little of it is seen.
_LEAST_TILES = 2
# Rows of logits computed at once, of all runs and of several heads where a head has fewer, and bytes of
# queries that a step of the grid brings in.
MAX_ROWS, _STEP_BYTES = 512, 2**19
# Rows of 128 lanes of all heads' queries at most: with their sums and sinks they take 14 to 22 MiB.
_MAX_HEAD_ROWS = 2**12
# Tokens of a tile at most, and logits of a head in it, of all runs.
_MAX_BLOCK, _MAX_BLOCK_LOGITS = 4096, 2**19
# Tokens of a tile that are multiplied at once, and logits of a head in them, at most.
_MAX_CHUNK, _MAX_CHUNK_LOGITS = 1024, 2**17
# Logits of several chunks that become weights at once, at most.
_MAX_TURN_LOGITS = 2**14
# Rows of queries that become integers, at most.
_MOST_INT8_ROWS = 32
# Digits, of 8 bits and either sign, of queries that are multiplied with integers.
DIGITS = 3
# Pages of a tile at most, where none is asked for: the copies of each are in the program.
_MAX_PAGES = 64
# Half of the SMEM of every generation, 1 MiB, of which pieces take less than the other; half of a v7x core's
# VMEM.
SMEM_BYTES, VMEM_BYTES = 2**19, 2**25
_PIECE_NUMBERS, _MAX_PIECES_BYTES = 7, 3 * 2**17


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a call that its arrays have.

    Attributes:
        num_seqs: rows of the page table.
        max_pages: its width.
        num_kv_heads: heads of the pools.
        group: query heads of a KV head.
        time: new tokens of a row.
        page_size: slots of a page.
        parts: the pools.
        num_keys: of them, from the first on: a slot's logits are the sum over these.
        value: the pool that holds values, which may be one of keys.
        query_dtype: of queries and output.
        multiplies_int8: whether the chip does.
    """

    num_seqs: int
    max_pages: int
    num_kv_heads: int
    group: int
    time: int
    page_size: int
    parts: tuple[Part, ...]
    num_keys: int
    value: int
    query_dtype: Any
    multiplies_int8: bool

    @property
    def keys(self) -> tuple[Part, ...]:
        """The pools that logits are made of."""
        return self.parts[: self.num_keys]

    @property
    def values(self) -> Part:
        """The pool that sums are made of."""
        return self.parts[self.value]

    @property
    def runs(self) -> Runs | None:
        """Runs of channels, which are the same in all pools that have any."""
        return next((part.runs for part in self.parts if part.scaling == "channels"), None)

    @property
    def run_slots(self) -> int | None:
        """Slots of a run where keys have runs of slots; a query sees its own run as it was given."""
        return next((part.runs.span for part in self.keys if part.runs and part.scaling == "slots"), None)

    @property
    def num_sums(self) -> int:
        """Logits or weights of a slot and query: of runs of a token's channels, each has its own."""
        return max(part.runs.count if part.runs and part.scaling == "channels" else 1 for part in self.parts)

    @property
    def share(self) -> int:
        """Columns of slots that a page's logits go by: the most of any pool."""
        return max(part.columns.share for part in self.parts)

    @property
    def column(self) -> int:
        """Slots of such a column."""
        return self.page_size // self.share

    @property
    def is_paired(self) -> bool:
        """Whether tiles have the even rows of a column before the odd ones.

        A word has four rows of bytes, of which 16-bit numbers are made two by two, without moving any.
        """
        return all(part.entry == "int4" and part.columns.num_rows % 32 == 0 for part in self.parts)

    def row_of(self, place: Any) -> Any:
        """Return the row of a column at a place in its order in tiles."""
        if not self.is_paired:
            return place
        # 1 from the middle on, in numpy as in a kernel.
        is_odd = 1 + ((place - self.column // 2) >> 31)
        return 2 * place - (self.column - 1) * is_odd

    @property
    def num_parts(self) -> int:
        """The most rows of 128 lanes that a slot's entries or their sum take."""
        return max(sum(part.num_parts for part in self.keys), self.values.num_parts)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's entries in all pools."""
        rows = sum(part.rows * part.dtype.itemsize for part in self.parts)
        return self.num_kv_heads * rows * LANES // self.page_size

    @property
    def operand_dtype(self) -> Any:
        """What is multiplied: float32 pools and queries to what is decoded are not rounded to bfloat16."""
        is_wide = any(part.dtype == jnp.float32 for part in self.parts)
        is_decoded = not all(part.is_raw for part in self.parts)
        return jnp.float32 if is_wide or (is_decoded and self.query_dtype == jnp.float32) else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How the work of a call is cut.

    Attributes:
        shape: what is cut.
        num_pages: pages of a layer.
        query_tokens: new tokens of a piece.
        pieces_per_seq: pieces of a row of the step.
        pieces_per_step: pieces of a step of the grid.
        num_pieces: of all, rounded up to whole steps.
        rows: queries of a piece and KV head, `token * group + head`, rounded up to whole sublanes.
        block_pages: pages of a piece in a tile.
        num_buffers: tiles in VMEM.
        pieces_at_once: that share a tile, where none has several: of short ones latency is what takes time.
            If they are several, each has its pages in a tile, whatever it sees.
        part_seqs: rows of the page table that are in SMEM at once.
    """

    shape: Shape
    num_pages: int
    query_tokens: int
    pieces_per_seq: int
    pieces_per_step: int
    num_pieces: int
    rows: int
    block_pages: int
    num_buffers: int
    pieces_at_once: int
    part_seqs: int

    @property
    def num_parts(self) -> int:
        """Parts of the page table."""
        return -(-self.shape.num_seqs // self.part_seqs)

    @property
    def num_slots(self) -> int:
        """Parts that SMEM has room for: one that is in use and one on its way, or all that there is."""
        return min(2, self.num_parts)

    @property
    def part_pages(self) -> int:
        """Pages of a part of the table."""
        return self.part_seqs * self.shape.max_pages

    @property
    def tile_pages(self) -> int:
        """Pages of a tile, those of a piece after those of another."""
        return self.pieces_at_once * self.block_pages

    @property
    def block(self) -> int:
        """Tokens of a piece in a tile."""
        return self.block_pages * self.shape.page_size

    @property
    def chunk_pages(self) -> int:
        """Pages of a tile that are multiplied at once: of larger chunks the loads go by way of VMEM."""
        least = math.lcm(self.shape.page_size, LANES * self.shape.share)
        counts = [count for count in range(1, self.block // least + 1) if self.block % (count * least) == 0]
        most = max(
            [counts[0], *(count for count in counts if count * least <= _chunk_tokens(self.shape, self.rows))]
        )
        return most * least // self.shape.page_size

    @property
    def turns(self) -> list[range]:
        """Chunks of a tile whose logits become weights at once: of few rows several, for turns wait."""
        num_chunks = self.block_pages // self.chunk_pages
        logits = self.batch_heads * self.rows * self.chunk_pages * self.shape.page_size
        count = max(1, _MAX_TURN_LOGITS // logits)
        return [range(i, min(i + count, num_chunks)) for i in range(0, num_chunks, count)]

    def has_int8_product(self, part: Part) -> bool:
        """Whether the integers of a pool of keys are multiplied as such, by the digits of queries.

        That spares conversions, and half of what loads a tile into the units that multiply; more rows of
        logits, and a conversion of each, cost less only where rows are few.
        """
        is_whole = part.entry == "number" and part.dtype == jnp.int8 and self.shape.column % 32 == 0
        is_rounded = self.shape.multiplies_int8 and self.shape.operand_dtype == jnp.bfloat16
        return is_whole and is_rounded and self.rows <= _MOST_INT8_ROWS and self.pieces_at_once == 1

    def operand_dtype(self, part: Part) -> Any:
        """Return what entries of a pool of keys are multiplied as."""
        return jnp.int8 if self.has_int8_product(part) else self.shape.operand_dtype

    def query_rows(self, part: Part) -> int:
        """Return the rows of a head's queries for a pool of keys: digits, at each place in a row of lanes."""
        num_places = 1 if part.scaling == "channels" else part.columns.share
        return num_places * (DIGITS if self.has_int8_product(part) else 1) * self.rows

    @property
    def batch_heads(self) -> int:
        """KV heads whose logits are computed at once."""
        num_heads, most = self.shape.num_kv_heads, max(1, MAX_ROWS // (self.rows * self.shape.num_sums))
        return max(heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads <= most)

    @property
    def own_keys(self) -> int:
        """Keys of the runs that a piece's queries lie in; 0 where there are no runs of slots."""
        span = self.shape.run_slots
        if span is None:
            return 0
        return span if self.query_tokens == 1 else (-(-self.query_tokens // span) + 1) * span

    @property
    def own_lanes(self) -> int:
        """Lanes of one of them."""
        return round_up(self.shape.keys[0].head_dim, LANES)


def sizes_of(shape: Shape, num_pages: int, tiling: Tiling, *, window: int | None) -> Sizes:
    """Return how a tiling cuts a call's work."""
    query_tokens = min(shape.time, tiling.query_tokens)
    pieces_per_seq = -(-shape.time // query_tokens)
    rows = round_up(query_tokens * shape.group, SUBLANES)
    step = max(1, _STEP_BYTES // (shape.num_kv_heads * rows * shape.num_parts * LANES * 4))
    at_once = _pieces_at_once(shape, tiling, query_tokens, window)
    pieces_per_step = round_up(min(shape.num_seqs * pieces_per_seq, step), at_once)
    return Sizes(
        shape=shape,
        num_pages=num_pages,
        query_tokens=query_tokens,
        pieces_per_seq=pieces_per_seq,
        pieces_per_step=pieces_per_step,
        num_pieces=round_up(shape.num_seqs * pieces_per_seq, pieces_per_step),
        rows=rows,
        block_pages=block_tokens(shape, tiling) // shape.page_size,
        # Of several pieces a tile's copies begin together: one is in use, one waited for, one on its way.
        num_buffers=tiling.num_buffers if at_once == 1 else max(3, -(-tiling.num_buffers // at_once)),
        pieces_at_once=at_once,
        part_seqs=_part_seqs(shape),
    )


def _pieces_at_once(shape: Shape, tiling: Tiling, query_tokens: int, window: int | None) -> int:
    """Return how many pieces are attended to at once, a power of two."""
    # A row that begins anew in its table sees the rest of the page that it writes over, too.
    block, num_pages = block_tokens(shape, tiling), shape.max_pages + 1
    if window is not None:
        # The first token that is seen may be the last of its page.
        num_pages = min(num_pages, (window + query_tokens + shape.page_size - 3) // shape.page_size + 1)
    # All rows of the page table are in SMEM: copies of two parts' pages may not begin together.
    if num_pages * shape.page_size > block or _part_seqs(shape) < shape.num_seqs:
        return 1
    rows = round_up(query_tokens * shape.group, SUBLANES) * shape.num_kv_heads * shape.num_sums
    room = _MAX_TOKENS_AT_ONCE // block, _TILE_BYTES // (block * shape.token_bytes), MAX_ROWS // rows
    most = max(1, min(shape.num_seqs, *room))
    return 2 ** (most.bit_length() - 1)


def _chunk_tokens(shape: Shape, rows: int) -> int:
    """Return the most tokens of a tile that are multiplied at once, with so many rows of queries."""
    # Scales of runs are spread over their entries by products, which chunks would make more of.
    has_runs = any(part.runs for part in shape.parts)
    return min(_MAX_BLOCK if has_runs else _MAX_CHUNK, _MAX_CHUNK_LOGITS // rows)


def _part_seqs(shape: Shape) -> int:
    """Return the rows of the page table in a part: all, or as many as leave room for another part."""
    most = SMEM_BYTES // (4 * shape.max_pages)
    return shape.num_seqs if shape.num_seqs <= most else most // 2


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def block_tokens(shape: Shape, tiling: Tiling) -> int:
    """Return the tokens of a tile: the tiling's, rounded up to whole pages and whole rows of logits."""
    return round_up(tiling.block_tokens, math.lcm(shape.page_size, LANES * shape.share))


def tiling_for(shape: Shape, *, window: int | None) -> Tiling:
    """Return the tiling that a call gets where none is given and none was found by trying.

    A tile is as long as its bytes may be, but a small part of what a query may see; or all tiles of a window
    are as long.
    """
    most_rows = min(MAX_ROWS // shape.num_sums, _MAX_HEAD_ROWS // (shape.num_kv_heads * shape.num_parts))
    query_tokens = max(1, most_rows // shape.group)
    rows = min(shape.time, query_tokens) * shape.group
    most = min(_MAX_BLOCK, _MAX_BLOCK_LOGITS // (rows * shape.num_sums), _MAX_PAGES * shape.page_size)
    longest = longest_seen(shape, window=window)
    tile_bytes = _TILE_BYTES // 2
    if shape.time == 1:
        tile_bytes = _WIDE_TILE_BYTES if rows >= _WIDE_ROWS else _TILE_BYTES
    of_tile = max(LANES, tile_bytes // shape.token_bytes)
    if window is None:
        block = min(most, max(LANES, min(of_tile, longest // _LEAST_TILES)))
        chunk = _chunk_tokens(shape, rows)
        block -= block % chunk if block > chunk else 0
    else:
        block = -(-longest // -(-longest // min(most, of_tile)))
    in_bytes = block_tokens(shape, Tiling(block)) * shape.token_bytes
    num_buffers = 1 + max(2, min(_MAX_BUFFERS - 1, -(-_BYTES_AHEAD // in_bytes)))
    return Tiling(min(block, longest), query_tokens, num_buffers=num_buffers)


def longest_seen(shape: Shape, *, window: int | None) -> int:
    """Return the most tokens that a query may see, in whole pages where a window may begin inside one."""
    longest = shape.max_pages * shape.page_size
    return longest if window is None else min(longest, window + shape.page_size)


def refusal(shape: Shape, tiling: Tiling) -> str | None:
    """Return why a call does not fit a TPU's memories, in one sentence; None where it does."""
    if _part_seqs(shape) == 0:
        return (
            f"a row of the page table must take at most {SMEM_BYTES // min(2, shape.num_seqs):,} bytes, got "
            f"{4 * shape.max_pages:,} for {shape.max_pages} pages; use larger pages"
        )
    if shape.query_dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries must be bfloat16 or float32, got {shape.query_dtype}"
    sizes = sizes_of(shape, 1, tiling, window=1)
    pieces_bytes = 4 * _PIECE_NUMBERS * (sizes.num_pieces + sizes.pieces_at_once)
    if pieces_bytes > _MAX_PIECES_BYTES:
        return (
            f"numbers of pieces must take at most {_MAX_PIECES_BYTES:,} bytes, got {pieces_bytes:,} for "
            f"{shape.num_seqs} rows of {shape.time} tokens; use fewer rows or larger pieces"
        )
    is_scaled = any(part.scaling in ("token", "channels") for part in shape.parts)
    if is_scaled and shape.column % LANES and LANES % shape.column:
        return (
            f"a page's slots in {shape.share} columns must divide {LANES} or be a multiple of it, got "
            f"{shape.column}; use a page_size that is a power of two"
        )
    return vmem_refusal(shape, tiling)


def vmem_refusal(shape: Shape, tiling: Tiling) -> str | None:
    """Return why a tiling does not fit a TPU's vector memory, in one sentence; None where it does."""
    # Under the least window as many pieces as may be are attended to at once.
    sizes = sizes_of(shape, 1, tiling, window=1)
    vmem_bytes = _vmem_bytes(sizes)
    if vmem_bytes > VMEM_BYTES:
        return (
            f"tiles and sums must take at most {VMEM_BYTES:,} bytes, got {vmem_bytes:,} for "
            f"{shape.num_kv_heads} KV heads, pages of {shape.page_size} slots and pieces "
            f"of {sizes.query_tokens} tokens; use smaller pages or tiles"
        )
    return None


def _vmem_bytes(sizes: Sizes) -> int:
    """Return the bytes of tiles, sums, two steps' blocks with sinks, the spread of scales, and own runs."""
    shape, value_lanes = sizes.shape, sizes.shape.values.lanes
    # A row's query, its unit, padded, and its output, of two steps; its sink, twice, padded; its three sums.
    query_bytes = sum(
        sizes.query_rows(part) // sizes.rows * part.lanes * jnp.dtype(sizes.operand_dtype(part)).itemsize
        + (LANES * 4 if sizes.has_int8_product(part) else 0)
        for part in shape.keys
    )
    step_bytes = query_bytes + value_lanes * jnp.dtype(shape.query_dtype).itemsize
    row_bytes = 2 * sizes.pieces_per_step * step_bytes + ((2 + 2) * LANES + value_lanes) * 4
    tiles = [array for part in shape.parts for array in tile_shapes(sizes, part) if array is not None]
    tile_bytes = sum(math.prod(dims) * jnp.dtype(dtype).itemsize for dims, dtype in tiles)
    if shape.run_slots is not None:
        own_rows = 2 * sizes.pieces_per_step * shape.num_kv_heads * (sizes.own_keys + sizes.rows)
        tile_bytes += own_rows * sizes.own_lanes * jnp.dtype(shape.operand_dtype).itemsize
        tile_bytes += sizes.pieces_at_once * sizes.batch_heads * sizes.rows * sizes.block * 4
    if shape.runs is not None:
        num_patterns = shape.page_size // min(LANES, shape.column)
        tile_bytes += 2 * num_patterns * LANES * shape.runs.count * LANES * 2
    return shape.num_kv_heads * sizes.rows * row_bytes + tile_bytes


def tile_shapes(sizes: Sizes, part: Part) -> tuple[tuple[tuple[int, ...], Any] | None, ...]:
    """Return the shapes and dtypes of what holds a pool's tiles, as `Stored`; None is not there."""
    num_heads, page_size = sizes.shape.num_kv_heads, sizes.shape.page_size
    of_pages = (sizes.num_buffers, sizes.tile_pages)
    data = (*of_pages, num_heads, part.rows, LANES), part.dtype
    if part.runs is not None:
        runs = (*of_pages, num_heads, part.runs.rows, LANES), jnp.bfloat16
        return data, runs, runs
    if part.scaling != "token":
        return data, None, None
    scale_rows = num_heads * max(1, page_size // LANES)
    return data, ((*of_pages, scale_rows, LANES), jnp.float32), None
