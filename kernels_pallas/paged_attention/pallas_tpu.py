"""Paged attention on TPUs.

Each piece, a few new tokens of one sequence, walks the pages that its sequence holds in tiles of
`Tiling.block_tokens`, all KV heads at once, with an online softmax in float32. Tiles of all pieces form one
queue: while one is attended to, the next `num_buffers - 1` are on their way from the pool in HBM, the first
tiles of the next pieces among them, so that short sequences do not wait for one another. Of a tile only the
pages that a query sees are fetched, in one copy each for the keys and the values of all heads.

Grid: steps of `pieces_per_step` pieces, in order. VMEM: a step's queries and outputs, `num_buffers` tiles,
and the sums of one piece. SMEM: page table, starts, lengths, the queue's cursor. Limits: `refusal`.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, Tiling
from kernels_pallas.slots import as_matrices, slot_lanes

LANES = 128
# Rows of queries are whole tiles of 8 sublanes.
_SUBLANES = 8
# Bytes of a tile's keys and values: a v6e reads them in 0.6 us, about what a copy takes to begin.
_TILE_BYTES = 2**20
# Rows of logits computed at once, of several heads where a head has fewer, and bytes of queries that a step
# of the grid brings in.
_MAX_ROWS, _STEP_BYTES = 512, 2**19
# Rows of queries of all heads at most: with their sums and sinks they take 14 to 22 MiB.
_MAX_HEAD_ROWS = 2**12
# Tokens of a tile at most, and logits of a head in it.
_MAX_BLOCK, _MAX_LOGITS = 2048, 2**18
# Half of the SMEM of every generation, 1 MiB; half of a v7x core's VMEM.
_SMEM_BYTES, _VMEM_BYTES = 2**19, 2**25
# Larger than any place, and small enough that a window is added without overflow.
_HIDDEN = 2**30
# Below every logit of finite keys; finite, so that differences of two are numbers.
_LOWEST = -(2.0**127)
# The queue's cursor in SMEM.
_PIECE, _TILE, _FILL, _DRAIN = range(4)
_FP8: dict[str, Any] = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is known of a call before it runs.

    Attributes:
        num_seqs: rows of the page table.
        max_pages: its width.
        num_pages: pages of a layer.
        num_kv_heads: heads of the pools.
        page_size: slots of a page.
        head_dim: entries of a head.
        width: lanes from one slot to the next.
        group: query heads of a KV head.
        query_tokens: new tokens of a piece.
        pieces_per_seq: pieces of a row of the step.
        pieces_per_step: pieces of a step of the grid.
        num_pieces: of all, rounded up to whole steps.
        rows: queries of a piece and KV head, `token * group + head`, rounded up to whole sublanes.
        block_pages: pages of a tile.
        num_buffers: tiles in VMEM.
    """

    num_seqs: int
    max_pages: int
    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    width: int
    group: int
    query_tokens: int
    pieces_per_seq: int
    pieces_per_step: int
    num_pieces: int
    rows: int
    block_pages: int
    num_buffers: int

    @property
    def block(self) -> int:
        """Tokens of a tile."""
        return self.block_pages * self.page_size

    @property
    def share(self) -> int:
        """Slots that share a row of lanes."""
        return LANES // self.width


class _Stored(NamedTuple):
    """What there is of keys, or of values: arrays, or what a kernel has in their place.

    Attributes:
        data: entries; `[page, kv_head, row, 128]`.
        scale: float32; of tokens, `[page, kv_head * row, 128]`, or of heads, `[kv_head, 1, 128]`; None where
            there are none.
    """

    data: Any
    scale: Any = None


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is computed; see `reference.paged_attention`.

    Attributes:
        dtype: of the operands that are multiplied.
        entries: what the entries of keys and of values are; see `Pages`.
        scalings: whose scales they have: "token", "head" or None.
    """

    dtype: Any
    entries: tuple[str, str]
    scalings: tuple[str | None, str | None]
    scale: float
    window: int | None
    soft_cap: float | None


def refusal(arguments: PagedArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does.

    Args:
        arguments: the call.
        tiling: None is that of `tiling_for` without a window, which makes no tile larger.
    """
    if arguments.stripe is not None:
        return "the TPU kernel walks tables of all pages, got one of a stripe; use 'xla'"
    for name, pages in (("keys", arguments.keys), ("values", arguments.values)):
        if (why := _refused_pages(name, pages)) is not None:
            return why
    table = arguments.page_table
    table_bytes = 4 * math.prod(table.shape)
    if table_bytes > _SMEM_BYTES:
        return (
            f"the page table must take at most {_SMEM_BYTES:,} bytes, got {table_bytes:,} for "
            f"{table.shape[0]} sequences of {table.shape[1]} pages; use larger pages"
        )
    tiling = tiling or tiling_for(arguments, window=None)
    vmem_bytes = _vmem_bytes(arguments, tiling)
    if vmem_bytes > _VMEM_BYTES:
        return (
            f"tiles and sums must take at most {_VMEM_BYTES:,} bytes, got {vmem_bytes:,} for "
            f"{arguments.keys.data.shape[1]} KV heads, pages of {arguments.keys.page_size} slots and pieces "
            f"of {min(arguments.query.shape[1], tiling.query_tokens)} tokens; use smaller pages or tiles"
        )
    return None


def _vmem_bytes(arguments: PagedArguments, tiling: Tiling) -> int:
    """Return the bytes of tiles, sums and two steps' blocks, as if there were sinks."""
    sizes = _sizes(arguments, arguments.keys.data.shape[0], tiling)
    # A row's query at each place and its output, of two steps; its sink, twice, padded; its three sums.
    query_bytes = sizes.share * _operand_dtype(arguments).dtype.itemsize
    step_bytes = 2 * sizes.pieces_per_step * (query_bytes + arguments.query.dtype.itemsize)
    row_bytes = LANES * (step_bytes + (2 + 3) * 4)
    tiles = [array for pages in arguments[1:3] for array in _tiles(sizes, pages) if array is not None]
    tile_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in tiles)
    return sizes.num_kv_heads * sizes.rows * row_bytes + tile_bytes


def _refused_pages(name: str, pages: Pages) -> str | None:
    rows, lanes = pages.data.shape[2:]
    if lanes != LANES:
        return f"{name} must lie in rows of {LANES} lanes, got {lanes}; use the pool layout 'tpu'"
    if pages.head_dim > LANES:
        return f"head_dim must be at most {LANES}, got {pages.head_dim}"
    if pages.zero is not None:
        return f"{name} must have no zero points, got 4-bit entries"
    if _is_raw(pages) and pages.data.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{name} without scales must be bfloat16 or float32, got {pages.data.dtype}"
    # What is multiplied is bfloat16, whose tiles are 16 rows high, or float32.
    least = _SUBLANES if pages.data.dtype == jnp.float32 else 2 * _SUBLANES
    if rows % least:
        return (
            f"a page of {name} must be a multiple of {least} rows of {LANES} lanes, got {rows} for "
            f"{pages.page_size} slots of {pages.head_dim} entries; use larger pages"
        )
    if rows * LANES != pages.page_size * slot_lanes(pages.head_dim, LANES):
        return (
            f"a page of {name} must fill its {rows} rows of {LANES} lanes, got {pages.page_size} slots of "
            f"{pages.head_dim} entries; use larger pages"
        )
    if pages.scale is None or _scaling(pages) != "token":
        return None
    if pages.page_size % LANES and LANES % pages.page_size:
        return f"page_size must divide {LANES} or be a multiple of it, got {pages.page_size}"
    scale_rows = math.prod(pages.scale.shape[2:-1])
    if scale_rows != max(1, pages.page_size // LANES):
        return (
            f"the scales of a page of {name} must fill their {scale_rows} rows of {LANES} lanes, got "
            f"{pages.page_size} slots; use a page_size that is a power of two"
        )
    return None


def _is_raw(pages: Pages) -> bool:
    return pages.scale is None and pages.entry == "number"


def _scaling(pages: Pages) -> str | None:
    if pages.scale is None:
        return None
    return "head" if pages.scale.ndim == 1 else "token"


def tiling_for(arguments: PagedArguments, *, window: int | None) -> Tiling:
    """Return the tiling that a call gets where none is given.

    A tile is as long as it takes to read `_TILE_BYTES`, but no longer than a sequence or a window may be.
    """
    page_size = arguments.keys.page_size
    arrays = [arguments.keys.data, arguments.values.data]
    token_bytes = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays) // page_size
    longest = arguments.page_table.shape[1] * page_size
    if window is not None:
        longest = min(longest, window + page_size)
    group = arguments.query.shape[2] // arguments.keys.data.shape[1]
    most_rows = min(_MAX_ROWS, _MAX_HEAD_ROWS // arguments.keys.data.shape[1])
    query_tokens = max(1, most_rows // group)
    rows = min(arguments.query.shape[1], query_tokens) * group
    most = min(_MAX_BLOCK, _MAX_LOGITS // rows)
    block = min(most, max(LANES, _TILE_BYTES // token_bytes), longest)
    return Tiling(block, query_tokens, num_buffers=3)


def block_tokens(arguments: PagedArguments, *, window: int | None, tiling: Tiling | None = None) -> int:
    """Return the tokens of a tile: the tiling's, rounded up to whole pages and whole rows of logits."""
    tiling = tiling or tiling_for(arguments, window=window)
    width = slot_lanes(arguments.keys.head_dim, LANES)
    # The slots that have one place in their rows fill lanes of their own.
    return _round_up(tiling.block_tokens, math.lcm(arguments.keys.page_size, LANES * LANES // width))


def paged_attention(
    arguments: PagedArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.paged_attention` defines; logits, softmax and sums are float32.

    Raises:
        ValueError: the kernel does not take the call; see `refusal`.
    """
    if (why := refusal(arguments, tiling)) is not None:
        raise ValueError(f"paged attention on TPUs cannot run: {why}")
    query, keys, values = arguments[:3]
    both = (keys, values)
    sizes = _sizes(arguments, num_pages, tiling or tiling_for(arguments, window=window))
    options = _Options(
        dtype=_operand_dtype(arguments),
        entries=(keys.entry, values.entry),
        scalings=(_scaling(keys), _scaling(values)),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    out, log_sum = _call(sizes, options, both, query.dtype, has_sinks=sinks is not None)(
        arguments.page_table.reshape(-1),
        *_pieces(arguments.starts, arguments.lens, sizes, window),
        jnp.asarray(arguments.page_offset, jnp.int32)[None],
        _to_rows(query.astype(options.dtype), sizes),
        None if sinks is None else _sink_rows(sinks, sizes),
        *(_Stored(pages.data, _scale_rows(pages)) for pages in both),
    )
    log_sum = log_sum.reshape(*log_sum.shape[:2], -1)[:, :, : sizes.rows]
    time = query.shape[1]
    return _from_rows(out[..., : sizes.head_dim], sizes, time), _from_rows(log_sum, sizes, time)


def _operand_dtype(arguments: PagedArguments) -> Any:
    """Return what is multiplied: float32 pools and queries to what is decoded are not rounded to bfloat16."""
    both = arguments[1:3]
    is_raw = [_is_raw(pages) for pages in both]
    is_wide = any(pages.data.dtype == jnp.float32 for pages in both)
    return (
        jnp.float32 if is_wide or (not all(is_raw) and arguments.query.dtype == jnp.float32) else jnp.bfloat16
    )


def _sizes(arguments: PagedArguments, num_pages: int, tiling: Tiling) -> _Sizes:
    num_seqs, time, num_heads, head_dim = arguments.query.shape
    num_kv_heads, page_size = arguments.keys.data.shape[1], arguments.keys.page_size
    width = slot_lanes(head_dim, LANES)
    group = num_heads // num_kv_heads
    query_tokens = min(time, tiling.query_tokens)
    pieces_per_seq = -(-time // query_tokens)
    rows = _round_up(query_tokens * group, _SUBLANES)
    step = max(1, _STEP_BYTES // (num_kv_heads * rows * LANES * 4))
    pieces_per_step = min(num_seqs * pieces_per_seq, step)
    return _Sizes(
        num_seqs=num_seqs,
        max_pages=arguments.page_table.shape[1],
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        width=width,
        group=group,
        query_tokens=query_tokens,
        pieces_per_seq=pieces_per_seq,
        pieces_per_step=pieces_per_step,
        num_pieces=_round_up(num_seqs * pieces_per_seq, pieces_per_step),
        rows=rows,
        block_pages=block_tokens(arguments, window=None, tiling=tiling) // page_size,
        num_buffers=tiling.num_buffers,
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _pieces(
    starts: Int[Array, " seq"], lens: Int[Array, " seq"], sizes: _Sizes, window: int | None
) -> tuple[
    Int[Array, " one_more"], Int[Array, " one_more"], Int[Array, " one_more"], Int[Array, " one_more"]
]:
    """Return starts, lengths and first positions seen of all pieces, and of each the next that sees any.

    A piece without tokens starts at 0, so that it has no pages; the next may be the piece itself.
    """
    past = jnp.arange(sizes.pieces_per_seq, dtype=jnp.int32)[None] * sizes.query_tokens
    piece_lens = jnp.clip(lens[:, None] - past, 0, sizes.query_tokens).reshape(-1)
    piece_starts = jnp.where(piece_lens > 0, (starts[:, None] + past).reshape(-1), 0)
    # What is further back than the table is wide has been written over.
    kept = jnp.maximum(starts + lens - sizes.max_pages * sizes.page_size, 0)
    firsts = jnp.repeat(kept, sizes.pieces_per_seq)
    if window is not None:
        firsts = jnp.maximum(firsts, piece_starts - window + 1)
    firsts = jnp.where(firsts < piece_starts + piece_lens, firsts, _HIDDEN)
    padding = (0, sizes.num_pieces + 1 - piece_lens.shape[0])
    piece_starts, piece_lens = jnp.pad(piece_starts, padding), jnp.pad(piece_lens, padding)
    firsts = jnp.pad(firsts, padding, constant_values=_HIDDEN)
    index = jnp.arange(sizes.num_pieces + 1, dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(firsts < _HIDDEN, index, sizes.num_pieces), reverse=True)
    return piece_starts, piece_lens, firsts, following


def _to_rows(query: Float[Array, "seq time q_head head_dim"], sizes: _Sizes) -> Array:
    """Return queries as `[piece, kv_head, share * row, 128]`, padded with zeros.

    Where slots share rows of lanes, a query is there once for each place in a row, with zeros at the others.
    """
    num_seqs, time, _, head_dim = query.shape
    time_padding = sizes.pieces_per_seq * sizes.query_tokens - time
    query = jnp.pad(query, ((0, 0), (0, time_padding), (0, 0), (0, 0)))
    split = query.reshape(-1, sizes.query_tokens, sizes.num_kv_heads, sizes.group, head_dim).swapaxes(1, 2)
    rows = split.reshape(*split.shape[:2], -1, head_dim)
    piece_padding = sizes.num_pieces - num_seqs * sizes.pieces_per_seq
    rows = jnp.pad(rows, ((0, piece_padding), (0, 0), (0, sizes.rows - rows.shape[2]), (0, 0)))
    lanes = [(place * sizes.width, LANES - place * sizes.width - head_dim) for place in range(sizes.share)]
    return jnp.concatenate([jnp.pad(rows, ((0, 0), (0, 0), (0, 0), pair)) for pair in lanes], axis=2)


def _sink_rows(sinks: Float[Array, " q_head"], sizes: _Sizes) -> Float[Array, "kv_head row 1"]:
    per_head = sinks.astype(jnp.float32).reshape(-1, 1, sizes.group)
    rows = jnp.tile(per_head, (1, sizes.query_tokens, 1)).reshape(sizes.num_kv_heads, -1, 1)
    return jnp.pad(rows, ((0, 0), (0, sizes.rows - rows.shape[1]), (0, 0)))


def _scale_rows(pages: Pages) -> Array | None:
    """Return scales as `_Stored` has them."""
    if pages.scale is None:
        return None
    if pages.scale.ndim == 1:
        return jnp.broadcast_to(
            pages.scale.astype(jnp.float32)[:, None, None], (pages.scale.shape[0], 1, LANES)
        )
    matrices = as_matrices(pages.scale)
    return matrices.reshape(matrices.shape[0], -1, LANES)


def _from_rows(x: Array, sizes: _Sizes, time: int) -> Array:
    """Turn `[piece, kv_head, row, ...]` back into `[seq, time, q_head, ...]`."""
    real = x[: sizes.num_seqs * sizes.pieces_per_seq, :, : sizes.query_tokens * sizes.group]
    split = real.reshape(*real.shape[:2], sizes.query_tokens, sizes.group, *x.shape[3:]).swapaxes(1, 2)
    whole = split.reshape(sizes.num_seqs, -1, sizes.num_kv_heads * sizes.group, *x.shape[3:])
    return whole[:, :time]


def _call(
    sizes: _Sizes, options: _Options, both: tuple[Pages, Pages], out_dtype: Any, *, has_sinks: bool
) -> Any:
    """Return the call of the kernel on scalars, queries, sinks, keys and values."""
    of_pieces = (sizes.pieces_per_step, sizes.num_kv_heads)
    sum_rows = -(-sizes.rows // LANES)

    def of_step(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((*of_pieces, rows, LANES), lambda step, *_: (step, 0, 0, 0))

    def of_call(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda step, *_: (0,) * len(shape))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    of_scales = {"token": in_hbm, "head": of_call(sizes.num_kv_heads, 1, LANES), None: None}
    stored = [_Stored(in_hbm, of_scales[scaling]) for scaling in options.scalings]
    tiles = [_tiles(sizes, pages) for pages in both]
    sums = pltpu.VMEM((sizes.num_kv_heads, sizes.rows, LANES), jnp.float32)
    sink_spec = of_call(sizes.num_kv_heads, sizes.rows, 1) if has_sinks else None
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(sizes.num_pieces // sizes.pieces_per_step,),
            in_specs=[of_step(sizes.share * sizes.rows), sink_spec, *stored],
            out_specs=[of_step(sizes.rows), of_step(sum_rows)],
            scratch_shapes=[
                *tiles,
                pltpu.VMEM((1, sizes.block), jnp.int32),
                sums,
                sums,
                sums,
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, sizes.num_buffers)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((sizes.num_pieces, sizes.num_kv_heads, sizes.rows, LANES), out_dtype),
            jax.ShapeDtypeStruct((sizes.num_pieces, sizes.num_kv_heads, sum_rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        name="jkv_paged_attention",
    )


def _tiles(sizes: _Sizes, pages: Pages) -> _Stored:
    """Return the scratch that holds tiles, and the scales of their tokens."""
    of_pages = (sizes.num_buffers, sizes.num_kv_heads, sizes.block_pages)
    data = pltpu.VMEM((*of_pages, *pages.data.shape[2:]), pages.data.dtype)
    if _scaling(pages) != "token":
        return _Stored(data)
    scale_rows = sizes.num_kv_heads * max(1, sizes.page_size // LANES)
    return _Stored(data, pltpu.VMEM((sizes.num_buffers, sizes.block_pages, scale_rows, LANES), jnp.float32))


def _kernel(
    table_ref,  # int32 [seq * max_pages]                      SMEM, prefetched
    starts_ref,  # int32 [piece + 1]                           SMEM, prefetched
    lens_ref,  # int32 [piece + 1]                             SMEM, prefetched
    firsts_ref,  # int32 [piece + 1]                           SMEM, prefetched
    following_ref,  # int32 [piece + 1]                        SMEM, prefetched
    offset_ref,  # int32 [1]                                   SMEM, prefetched
    query_ref,  # [step_piece, kv_head, share * row, 128]      VMEM
    sink_ref,  # float32 [kv_head, row, 1], or None            VMEM
    keys: _Stored,  # entries and scales of tokens             HBM; scales of heads VMEM
    values: _Stored,  # the same
    out_ref,  # [step_piece, kv_head, row, 128]                VMEM
    log_sum_ref,  # float32 [step_piece, kv_head, n, 128]      VMEM
    key_tiles: _Stored,  # [buffer, kv_head, page, row, 128], scales [buffer, page, kv_head * row, 128]   VMEM
    value_tiles: _Stored,  # the same
    hidden_ref,  # int32 [1, token]: of pages that are none    VMEM
    peak_ref,  # float32 [kv_head, row, 128], equal lanes      VMEM
    total_ref,  # float32 [kv_head, row, 128], to be added     VMEM
    sum_ref,  # float32 [kv_head, row, 128]                    VMEM
    cursor_ref,  # int32 [4]                                   SMEM
    copies_ref,  # int32 [buffer]: pages on their way          SMEM
    holes_ref,  # int32 [buffer]: pages that are none          SMEM
    semaphores_ref,  # DMA [keys or values, buffer]
    *,
    sizes: _Sizes,
    options: _Options,
):
    block, block_pages, page_size = sizes.block, sizes.block_pages, sizes.page_size
    page_rows, block_rows = page_size // sizes.share, block // sizes.share

    def first_page(piece):
        """Return the first page that a piece sees."""
        return jax.lax.div(firsts_ref[piece], page_size)

    def end_page(piece):
        return jax.lax.div(starts_ref[piece] + lens_ref[piece] + page_size - 1, page_size)

    def pages_of(piece, tile):
        """Return the pages of a tile that a piece sees."""
        begin = tile * block_pages
        return jnp.maximum(first_page(piece), begin), jnp.minimum(end_page(piece), begin + block_pages)

    def tiles_of(piece):
        return jax.lax.div(first_page(piece), block_pages), pl.cdiv(end_page(piece), block_pages)

    def page_id(piece, page):
        """Return a page's place in its layer; no page's where it is outside [0, num_pages)."""
        row = jax.lax.div(piece, sizes.pieces_per_seq) * sizes.max_pages
        return table_ref[row + jax.lax.rem(page, sizes.max_pages)]

    def is_page(index):
        return (index >= 0) & (index < sizes.num_pages)

    def copies(index, buffer, place):
        """Return the copies of a page of the pools to a place in a tile."""
        pairs = []
        for side, (pool, tiles) in enumerate([(keys, key_tiles), (values, value_tiles)]):
            pairs.append((side, pool.data, tiles.data.at[buffer, :, place]))
            if tiles.scale is not None:
                pairs.append((side, pool.scale, tiles.scale.at[buffer, place]))
        return [
            pltpu.make_async_copy(pool_ref.at[index], tile_ref, semaphores_ref.at[side, buffer])
            for side, pool_ref, tile_ref in pairs
        ]

    def fetch():
        """Start the copies of the tile at the cursor, if there is one, and move the cursor on."""
        piece, tile, buffer = (cursor_ref[i] for i in (_PIECE, _TILE, _FILL))

        @pl.when(piece < sizes.num_pieces)
        def _():
            begin, end = pages_of(piece, tile)

            def fetch_page(page, num_copies):
                index, place = page_id(piece, page), page - tile * block_pages

                @pl.when(is_page(index))
                def _():
                    for copy in copies(index + offset_ref[0], buffer, place):
                        copy.start()

                @pl.when(~is_page(index))
                def _():
                    zeros = jnp.zeros((sizes.num_kv_heads, page_rows, LANES), value_tiles.data.dtype)
                    value_tiles.data[buffer, :, place] = zeros

                return num_copies + is_page(index).astype(jnp.int32)

            num_copies = jax.lax.fori_loop(begin, end, fetch_page, jnp.int32(0))
            copies_ref[buffer] = num_copies
            holes_ref[buffer] = end - begin - num_copies
            is_last = tile + 1 >= tiles_of(piece)[1]
            following = following_ref[piece + 1]
            cursor_ref[_PIECE] = jnp.where(is_last, following, piece)
            cursor_ref[_TILE] = jnp.where(is_last, tiles_of(following)[0], tile + 1)
            cursor_ref[_FILL] = next_buffer(buffer)

    def next_buffer(buffer):
        return jnp.where(buffer + 1 == sizes.num_buffers, 0, buffer + 1)

    def wait(buffer):
        """Wait for every page of a tile."""

        def wait_page(_, carry):
            for copy in copies(0, buffer, 0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, copies_ref[buffer], wait_page, 0)

    def clear(side, tiles, buffer, begin, end):
        """Zero a tile's entries outside slots [begin, end): 0 * NaN is NaN."""
        slot = jax.lax.broadcasted_iota(jnp.int32, (page_rows, LANES), 0) * sizes.share
        slot += jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (page_rows, LANES), 1), sizes.width)
        # Of a dtype whose masks are as wide as the places.
        wide = jnp.float32 if options.entries[side] == "number" else jnp.int32

        def clear_page(page, carry):
            first = page * page_size

            @pl.when((first < begin) | (first + page_size > end))
            def _():
                is_kept = (slot + first >= begin) & (slot + first < end)
                for head in range(sizes.num_kv_heads):
                    entries = tiles.data[buffer, head, page]
                    kept = jnp.where(is_kept, entries.astype(wide), jnp.zeros((), wide))
                    tiles.data[buffer, head, page] = kept.astype(entries.dtype)

            return carry

        jax.lax.fori_loop(0, block_pages, clear_page, 0)

    def clear_edges(piece, tile, buffer):
        """Zero what a dead slot would spoil: all of a weighted sum, or the slot that shares its row."""
        begin = first_page(piece) * page_size - tile * block
        end = starts_ref[piece] + lens_ref[piece] - tile * block
        for side, tiles in enumerate([key_tiles, value_tiles]):
            # Integers are never NaN, and scales of dead slots are dropped.
            if tiles.data.dtype != jnp.int8 and (side == 1 or sizes.share > 1):
                pl.when((begin > 0) | (end < block))(
                    functools.partial(clear, side, tiles, buffer, begin, end)
                )

    def slots():
        """Return the slots of a tile in the order of the logits' lanes: by their place in a pool's row."""
        row = jax.lax.broadcasted_iota(jnp.int32, (1, block_rows), 1) * sizes.share
        return jnp.concatenate([row + place for place in range(sizes.share)], axis=1)

    def hide(piece, tile):
        """Mark the tokens of a tile whose pages are none."""
        begin, end = pages_of(piece, tile)

        def hide_page(page, hidden):
            slot = slots() - (page - tile * block_pages) * page_size
            is_hidden = (slot >= 0) & (slot < page_size) & ~is_page(page_id(piece, page))
            return jnp.where(is_hidden, _HIDDEN, hidden)

        hidden_ref[...] = jax.lax.fori_loop(begin, end, hide_page, jnp.zeros((1, block), jnp.int32))

    def show_all():
        hidden_ref[...] = jnp.zeros((1, block), jnp.int32)

    def numbers(side, tiles, buffer, heads):
        """Return entries of a tile as what is multiplied, `[head, row, 128]`."""
        entries = tiles.data[buffer, heads]
        if options.entries[side] in _FP8:
            entries = pltpu.bitcast(entries, _FP8[options.entries[side]])
        return entries.astype(options.dtype).reshape(entries.shape[0], block_rows, LANES)

    def scales(side, pool, tiles, buffer):
        """Return the scales of all heads in the order of the logits' lanes, `[kv_head, 1, token]` or None."""
        if options.scalings[side] is None:
            return None
        if options.scalings[side] == "head":
            return jnp.concatenate([pool.scale[...]] * (block // LANES), axis=-1)
        in_order = jnp.concatenate(
            [scale_lanes(tiles.scale, buffer, i) for i in range(block // LANES)], axis=-1
        )
        if sizes.share > 1:
            in_order = by_place(in_order)
        return in_order[:, None]

    def scale_lanes(scale_ref, buffer, chunk):
        """Return the scales of 128 slots, `[kv_head, 128]`."""
        if page_size >= LANES:
            num_rows = page_size // LANES
            page, row = divmod(chunk, num_rows)
            if num_rows == 1:
                return scale_ref[buffer, page]
            return scale_ref[buffer, page, pl.ds(row, sizes.num_kv_heads, stride=num_rows)]
        lane = jax.lax.broadcasted_iota(jnp.int32, (sizes.num_kv_heads, LANES), 1)
        num_pages = LANES // page_size
        joined = scale_ref[buffer, chunk * num_pages]
        for i in range(1, num_pages):
            page = pltpu.roll(scale_ref[buffer, chunk * num_pages + i], i * page_size, 1)
            joined = jnp.where(lane < i * page_size, joined, page)
        return joined

    def by_place(lanes):
        """Put lanes in the order of slots into that of `slots`, 128 rows of a pool at a time."""
        size = LANES * sizes.share
        slot, lane = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        is_own = slot == jax.lax.rem(lane, LANES) * sizes.share + jax.lax.div(lane, LANES)
        # 0 * NaN is NaN, in every lane: what is not finite is put in order by itself.
        is_finite = jnp.isfinite(lanes)
        both = jnp.concatenate([jnp.where(is_finite, lanes, 0.0), jnp.where(is_finite, 0.0, 1.0)], axis=0)
        chunks = [
            _products("hs,sl->hl", both[:, first : first + size], is_own.astype(jnp.float32))
            for first in range(0, block, size)
        ]
        places = range(0, size, LANES)
        ordered = jnp.concatenate([chunk[:, at : at + LANES] for at in places for chunk in chunks], axis=1)
        ordered, is_other = jnp.split(ordered, 2, axis=0)
        return jnp.where(is_other > 0, jnp.nan, ordered)

    def attend(index, piece, tile, buffer):
        """Take a tile into the sums of a piece."""
        position = tile * block + slots()
        is_hidden = (hidden_ref[...] > 0) | (position < firsts_ref[piece])
        # Row `token * group + head` sees places up to its token's, compared in rows: nothing is divided.
        past = jnp.where(is_hidden, _HIDDEN, (position - starts_ref[piece]) * sizes.group)
        row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, block), 0)
        is_seen = past <= row
        if options.window is not None:
            is_seen &= past + options.window * sizes.group > row
        key_scale, value_scale = scales(0, keys, key_tiles, buffer), scales(1, values, value_tiles, buffer)
        if value_scale is not None:
            is_live = past < lens_ref[piece] * sizes.group
            if options.window is not None:
                is_live &= past + options.window * sizes.group > 0
            value_scale = jnp.where(is_live, value_scale, 0.0)
        batch = max(
            heads
            for heads in range(1, sizes.num_kv_heads + 1)
            if sizes.num_kv_heads % heads == 0 and heads * sizes.rows <= max(_MAX_ROWS, sizes.rows)
        )
        lane = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 1)

        def take_heads(first):
            heads, own = pl.ds(first, batch), slice(first, first + batch)
            shared = _products("hrd,hsd->hrs", query_ref[index, heads], numbers(0, key_tiles, buffer, heads))
            logits = jnp.concatenate(
                [shared[:, i * sizes.rows : (i + 1) * sizes.rows] for i in range(sizes.share)], axis=-1
            )
            logits = logits * options.scale
            if key_scale is not None:
                logits = logits * key_scale[own]
            if options.soft_cap is not None:
                logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
            logits = jnp.where(is_seen[None], logits, -jnp.inf)
            last_peak = peak_ref[heads]
            peak = jnp.maximum(last_peak, jnp.max(logits, axis=-1, keepdims=True))
            keep = jnp.exp(last_peak - peak)
            weights = jnp.exp(logits - jnp.concatenate([peak] * (block // LANES), axis=-1))
            added = sum(weights[:, :, lane : lane + LANES] for lane in range(0, block, LANES))
            if value_scale is not None:
                weights = weights * value_scale[own]
            weights = jnp.concatenate(
                [weights[:, :, i * block_rows : (i + 1) * block_rows] for i in range(sizes.share)], axis=1
            )
            parts = _products(
                "hrs,hsd->hrd", weights.astype(options.dtype), numbers(1, value_tiles, buffer, heads)
            )
            update = parts[:, : sizes.rows]
            for i in range(1, sizes.share):
                part = parts[:, i * sizes.rows : (i + 1) * sizes.rows]
                update = jnp.where((lane < i * sizes.width)[None], update, part)
            peak_ref[heads] = peak
            total_ref[heads] = total_ref[heads] * keep + added
            sum_ref[heads] = sum_ref[heads] * keep + update

        for first in range(0, sizes.num_kv_heads, batch):
            take_heads(first)

    def begin_piece():
        peak_ref[...] = jnp.full(peak_ref.shape, _LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def end_piece(index, piece):
        """Write what a piece attended to."""
        row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
        is_row = row < lens_ref[piece] * sizes.group
        for head in range(sizes.num_kv_heads):
            peak = peak_ref[head][:, :1]
            total = jnp.sum(total_ref[head], axis=-1, keepdims=True)
            heads = sum_ref[head]
            for i in range(1, sizes.share):
                heads += pltpu.roll(sum_ref[head], LANES - i * sizes.width, 1)
            if sink_ref is not None:
                last_peak, sink = peak, sink_ref[head]
                peak = jnp.maximum(last_peak, sink)
                keep = jnp.exp(last_peak - peak)
                total, heads = total * keep + jnp.exp(sink - peak), heads * keep
            # Not `total > 0`: a NaN that a query sees is to be seen.
            is_written = is_row & (total != 0)
            total = jnp.where(is_written, total, 1.0)
            out_ref[index, head] = jnp.where(is_written, heads / total, 0.0).astype(out_ref.dtype)
            write_log_sum(index, head, jnp.where(is_written, peak + jnp.log(total), -jnp.inf))

    def write_log_sum(index, head, log_sum):
        """Lay a column of rows along the lanes."""
        for begin in range(0, sizes.rows, LANES):
            column = log_sum[begin : begin + LANES]
            shape = (column.shape[0], LANES)
            is_own = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(
                jnp.int32, shape, 1
            )
            lanes = jnp.sum(jnp.where(is_own, column, 0.0), axis=0, keepdims=True)
            log_sum_ref[index, head, pl.ds(begin // LANES, 1)] = lanes

    def walk(index, carry):
        """Attend from one piece."""
        piece = pl.program_id(0) * sizes.pieces_per_step + index
        begin_piece()

        def take(tile, carry):
            fetch()
            buffer = cursor_ref[_DRAIN]
            has_holes = holes_ref[buffer] > 0
            wait(buffer)
            clear_edges(piece, tile, buffer)
            pl.when(has_holes)(lambda: hide(piece, tile))
            attend(index, piece, tile, buffer)
            pl.when(has_holes)(show_all)
            cursor_ref[_DRAIN] = next_buffer(buffer)
            return carry

        jax.lax.fori_loop(*tiles_of(piece), take, 0)
        end_piece(index, piece)
        return carry

    @pl.when(pl.program_id(0) == 0)
    def _():
        show_all()
        first = following_ref[0]
        cursor_ref[_PIECE] = first
        cursor_ref[_TILE] = tiles_of(first)[0]
        cursor_ref[_FILL] = 0
        cursor_ref[_DRAIN] = 0
        for _ in range(sizes.num_buffers - 1):
            fetch()

    jax.lax.fori_loop(0, sizes.pieces_per_step, walk, 0)


def _products(equation: str, left: Array, right: Array) -> Array:
    """Multiply in float32; operands that are float32 are not rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)
