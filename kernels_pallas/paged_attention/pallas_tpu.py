"""Paged attention on TPUs.

Each piece, a few new tokens of one sequence, walks the pages that its sequence holds in tiles of
`Tiling.block_tokens`, all KV heads at once, with an online softmax in float32. Tiles of all pieces form one
queue: while one is attended to, the next `num_buffers - 1` are on their way from the pool in HBM, the first
tiles of the next pieces among them, so that short sequences do not wait for one another. Of a tile only the
pages that a query sees are fetched, in one copy each for the keys and the values of all heads.

Grid: steps of `pieces_per_step` pieces, in order. VMEM: a step's queries and outputs, `num_buffers` tiles, and
the sums of one piece. SMEM: page table, starts, lengths, the queue's cursor. Limits: `refusal`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Tiling

LANES = 128
# Rows of queries are whole tiles of 8 sublanes.
_SUBLANES = 8
# Bytes of a tile's keys and values: a v6e reads them in 0.6 us, about what a copy takes to begin.
_TILE_BYTES = 2**20
# Rows of logits computed at once, of several heads where a head has fewer, and bytes of queries that a step
# of the grid brings in.
_MAX_ROWS, _STEP_BYTES = 512, 2**19
_MAX_BLOCK = 512
# Half of the SMEM of every generation, 1 MiB; half of a v7x core's VMEM.
_SMEM_BYTES, _VMEM_BYTES = 2**19, 2**25
# Larger than any place, and small enough that a window is added without overflow.
_HIDDEN = 2**30
# Below every logit of finite keys; finite, so that differences of two are numbers.
_LOWEST = -(2.0**127)
# The queue's cursor in SMEM.
_PIECE, _BLOCK, _FILL, _DRAIN = range(4)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is known of a call before it runs.

    Attributes:
        num_seqs: rows of the page table.
        max_pages: its width.
        num_pages: pages of a layer.
        num_kv_heads: heads of the pools.
        page_size: slots of a page.
        group: query heads of a KV head.
        query_tokens: new tokens of a piece.
        pieces_per_seq: pieces of a row of the step.
        pieces_per_step: pieces of a step of the grid.
        num_pieces: of all, rounded up to whole steps.
        rows: queries of a piece and KV head, `token * group + head`, rounded up to whole sublanes.
        block: tokens of a tile.
        num_buffers: tiles in VMEM.
    """

    num_seqs: int
    max_pages: int
    num_pages: int
    num_kv_heads: int
    page_size: int
    group: int
    query_tokens: int
    pieces_per_seq: int
    pieces_per_step: int
    num_pieces: int
    rows: int
    block: int
    num_buffers: int


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is computed; see `reference.paged_attention`."""

    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


def refusal(arguments: PagedArguments) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does."""
    keys, values, table = arguments.keys, arguments.values, arguments.page_table
    page_size, head_dim = keys.data.shape[2:]
    allowed = (jnp.float32, jnp.bfloat16)
    if keys.data.dtype != values.data.dtype or keys.data.dtype not in allowed:
        return f"pools must hold bfloat16 or float32, got {keys.data.dtype} and {values.data.dtype}"
    if head_dim != LANES:
        return f"head_dim must be {LANES}, got {head_dim}"
    if page_size % 16:
        return f"page_size must be a multiple of 16, got {page_size}"
    table_bytes = 4 * math.prod(table.shape)
    if table_bytes > _SMEM_BYTES:
        return (
            f"the page table must take at most {_SMEM_BYTES:,} bytes, got {table_bytes:,} for "
            f"{table.shape[0]} sequences of {table.shape[1]} pages; use larger pages"
        )
    return None


def tiling_for(arguments: PagedArguments, *, window: int | None) -> Tiling:
    """Return the tiling that a call gets where none is given.

    A tile is as long as it takes to read `_TILE_BYTES`, but no longer than a sequence or a window may be.
    """
    keys, values = arguments.keys.data, arguments.values.data
    _, num_kv_heads, page_size, width = keys.shape
    token_bytes = num_kv_heads * width * (keys.dtype.itemsize + values.dtype.itemsize)
    longest = arguments.page_table.shape[1] * page_size
    if window is not None:
        longest = min(longest, window + page_size)
    block = min(_MAX_BLOCK, max(LANES, _TILE_BYTES // token_bytes), longest)
    group = arguments.query.shape[2] // num_kv_heads
    return Tiling(block, max(1, _MAX_ROWS // group), num_buffers=3)


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
    if (why := refusal(arguments)) is not None:
        raise ValueError(f"paged attention on TPUs cannot run: {why}")
    sizes = _sizes(arguments, num_pages, tiling or tiling_for(arguments, window=window))
    options = _Options(scale, window, soft_cap, has_sinks=sinks is not None)
    query = arguments.query.astype(arguments.keys.data.dtype)
    rows = _to_rows(query, sizes)
    scalars = (
        arguments.page_table.reshape(-1),
        *_pieces(arguments.starts, arguments.lens, sizes),
        jnp.asarray(arguments.page_offset, jnp.int32)[None],
    )
    inputs = [rows]
    if sinks is not None:
        per_token = jnp.tile(
            sinks.astype(jnp.float32).reshape(-1, 1, sizes.group), (1, sizes.query_tokens, 1)
        )
        per_row = per_token.reshape(sizes.num_kv_heads, -1, 1)
        inputs.append(jnp.pad(per_row, ((0, 0), (0, sizes.rows - per_row.shape[1]), (0, 0))))
    out, log_sum = _call(sizes, options, rows.dtype, arguments)(
        *scalars, *inputs, arguments.keys.data, arguments.values.data
    )
    log_sum = log_sum.reshape(*log_sum.shape[:2], -1)[:, :, : sizes.rows]
    time = query.shape[1]
    return _from_rows(out, sizes, time).astype(arguments.query.dtype), _from_rows(log_sum, sizes, time)


def _sizes(arguments: PagedArguments, num_pages: int, tiling: Tiling) -> _Sizes:
    num_seqs, time, num_heads, _ = arguments.query.shape
    _, num_kv_heads, page_size, _ = arguments.keys.data.shape
    group = num_heads // num_kv_heads
    query_tokens = min(time, tiling.query_tokens)
    pieces_per_seq = -(-time // query_tokens)
    rows = _round_up(query_tokens * group, _SUBLANES)
    # Whole pages, and whole rows of lanes in the logits.
    block = _round_up(max(tiling.block_tokens, page_size), math.lcm(page_size, LANES))
    step = max(1, _STEP_BYTES // (num_kv_heads * rows * LANES * arguments.keys.data.dtype.itemsize))
    pieces_per_step = min(num_seqs * pieces_per_seq, step)
    return _Sizes(
        num_seqs=num_seqs,
        max_pages=arguments.page_table.shape[1],
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        group=group,
        query_tokens=query_tokens,
        pieces_per_seq=pieces_per_seq,
        pieces_per_step=pieces_per_step,
        num_pieces=_round_up(num_seqs * pieces_per_seq, pieces_per_step),
        rows=rows,
        block=block,
        num_buffers=tiling.num_buffers,
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _pieces(
    starts: Int[Array, " seq"], lens: Int[Array, " seq"], sizes: _Sizes
) -> tuple[Int[Array, " one_more"], Int[Array, " one_more"], Int[Array, " one_more"]]:
    """Return starts and lengths of all pieces, and of each the first from it on that has tokens.

    A piece without tokens starts at 0, so that it has no pages.
    """
    past = jnp.arange(sizes.pieces_per_seq, dtype=jnp.int32)[None] * sizes.query_tokens
    piece_lens = jnp.clip(lens[:, None] - past, 0, sizes.query_tokens).reshape(-1)
    piece_starts = jnp.where(piece_lens > 0, (starts[:, None] + past).reshape(-1), 0)
    padding = (0, sizes.num_pieces + 1 - piece_lens.shape[0])
    piece_starts, piece_lens = jnp.pad(piece_starts, padding), jnp.pad(piece_lens, padding)
    index = jnp.arange(sizes.num_pieces + 1, dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(piece_lens > 0, index, sizes.num_pieces), reverse=True)
    return piece_starts, piece_lens, following


def _to_rows(query: Float[Array, "seq time q_head head_dim"], sizes: _Sizes) -> Array:
    """Return queries as `[piece, kv_head, row, head_dim]`, padded with zeros."""
    num_seqs, time, _, head_dim = query.shape
    time_padding = sizes.pieces_per_seq * sizes.query_tokens - time
    query = jnp.pad(query, ((0, 0), (0, time_padding), (0, 0), (0, 0)))
    split = query.reshape(-1, sizes.query_tokens, sizes.num_kv_heads, sizes.group, head_dim).swapaxes(1, 2)
    rows = split.reshape(*split.shape[:2], -1, head_dim)
    piece_padding = sizes.num_pieces - num_seqs * sizes.pieces_per_seq
    return jnp.pad(rows, ((0, piece_padding), (0, 0), (0, sizes.rows - rows.shape[2]), (0, 0)))


def _from_rows(x: Array, sizes: _Sizes, time: int) -> Array:
    """Turn `[piece, kv_head, row, ...]` back into `[seq, time, q_head, ...]`."""
    real = x[: sizes.num_seqs * sizes.pieces_per_seq, :, : sizes.query_tokens * sizes.group]
    split = real.reshape(*real.shape[:2], sizes.query_tokens, sizes.group, *x.shape[3:]).swapaxes(1, 2)
    whole = split.reshape(sizes.num_seqs, -1, sizes.num_kv_heads * sizes.group, *x.shape[3:])
    return whole[:, :time]


def _call(sizes: _Sizes, options: _Options, dtype: Any, arguments: PagedArguments) -> Any:
    """Return the call of the kernel on scalars, queries, sinks and pools."""
    of_pieces = (sizes.pieces_per_step, sizes.num_kv_heads, sizes.rows, LANES)
    sum_rows = -(-sizes.rows // LANES)
    piece_spec = pl.BlockSpec(of_pieces, lambda step, *_: (step, 0, 0, 0))
    sum_spec = pl.BlockSpec((*of_pieces[:2], sum_rows, LANES), lambda step, *_: (step, 0, 0, 0))
    sink_spec = pl.BlockSpec((sizes.num_kv_heads, sizes.rows, 1), lambda step, *_: (0, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    tiles = [
        pltpu.VMEM((sizes.num_buffers, sizes.num_kv_heads, sizes.block, LANES), pages.data.dtype)
        for pages in (arguments.keys, arguments.values)
    ]
    sums = pltpu.VMEM((sizes.num_kv_heads, sizes.rows, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(sizes.num_pieces // sizes.pieces_per_step,),
            in_specs=[piece_spec, *([sink_spec] if options.has_sinks else []), in_hbm, in_hbm],
            out_specs=[piece_spec, sum_spec],
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
            jax.ShapeDtypeStruct((sizes.num_pieces, *of_pieces[1:]), dtype),
            jax.ShapeDtypeStruct((sizes.num_pieces, sizes.num_kv_heads, sum_rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        name="jkv_paged_attention",
    )


def _kernel(
    table_ref,  # int32 [seq * max_pages]             SMEM, prefetched
    starts_ref,  # int32 [piece + 1]                  SMEM, prefetched
    lens_ref,  # int32 [piece + 1]                    SMEM, prefetched
    following_ref,  # int32 [piece + 1]               SMEM, prefetched
    offset_ref,  # int32 [1]                          SMEM, prefetched
    query_ref,  # [step_piece, kv_head, row, 128]     VMEM
    *refs,
    sizes: _Sizes,
    options: _Options,
):
    sink_ref = refs[0] if options.has_sinks else None  # float32 [kv_head, row, 1]   VMEM
    (
        keys_ref,  # [page, kv_head, slot, 128]                    HBM
        values_ref,  # [page, kv_head, slot, 128]                  HBM
        out_ref,  # [step_piece, kv_head, row, 128]                VMEM
        log_sum_ref,  # float32 [step_piece, kv_head, n, 128]      VMEM
        key_tiles_ref,  # [buffer, kv_head, token, 128]            VMEM
        value_tiles_ref,  # [buffer, kv_head, token, 128]          VMEM
        hidden_ref,  # int32 [1, token]: of pages that are none    VMEM
        peak_ref,  # float32 [kv_head, row, 128], equal lanes      VMEM
        total_ref,  # float32 [kv_head, row, 128], to be added     VMEM
        sum_ref,  # float32 [kv_head, row, 128]                    VMEM
        cursor_ref,  # int32 [4]                                   SMEM
        copies_ref,  # int32 [buffer]: pages on their way          SMEM
        holes_ref,  # int32 [buffer]: pages that are none          SMEM
        semaphores_ref,  # DMA [keys or values, buffer]
    ) = refs[1:] if options.has_sinks else refs
    block, page_size = sizes.block, sizes.page_size
    block_pages = block // page_size

    def first_page(piece):
        """Return the first page that a piece sees."""
        if options.window is None:
            return jnp.int32(0)
        return jax.lax.div(jnp.maximum(starts_ref[piece] - options.window + 1, 0), page_size)

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

    def copies(index, buffer, at):
        """Return the copies of a page of the pools to token `at` of a tile."""
        to = pl.ds(pl.multiple_of(at, page_size), page_size)
        return [
            pltpu.make_async_copy(
                pool_ref.at[index], tiles_ref.at[buffer, :, to], semaphores_ref.at[side, buffer]
            )
            for side, (pool_ref, tiles_ref) in enumerate(
                [(keys_ref, key_tiles_ref), (values_ref, value_tiles_ref)]
            )
        ]

    def fetch():
        """Start the copies of the tile at the cursor, if there is one, and move the cursor on."""
        piece, tile, buffer = (cursor_ref[i] for i in (_PIECE, _BLOCK, _FILL))

        @pl.when(piece < sizes.num_pieces)
        def _():
            begin, end = pages_of(piece, tile)

            def fetch_page(page, num_copies):
                index, at = page_id(piece, page), (page - tile * block_pages) * page_size

                @pl.when(is_page(index))
                def _():
                    for copy in copies(index + offset_ref[0], buffer, at):
                        copy.start()

                @pl.when(~is_page(index))
                def _():
                    to = pl.ds(pl.multiple_of(at, page_size), page_size)
                    zeros = (sizes.num_kv_heads, page_size, LANES)
                    value_tiles_ref[buffer, :, to] = jnp.zeros(zeros, value_tiles_ref.dtype)

                return num_copies + is_page(index).astype(jnp.int32)

            num_copies = jax.lax.fori_loop(begin, end, fetch_page, jnp.int32(0))
            copies_ref[buffer] = num_copies
            holes_ref[buffer] = end - begin - num_copies
            is_last = tile + 1 >= tiles_of(piece)[1]
            following = following_ref[piece + 1]
            cursor_ref[_PIECE] = jnp.where(is_last, following, piece)
            cursor_ref[_BLOCK] = jnp.where(is_last, tiles_of(following)[0], tile + 1)
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

    def clear_values(buffer, begin, end):
        """Zero a tile's values outside [begin, end): 0 * NaN is NaN."""

        def clear(chunk, carry):
            at = pl.multiple_of(chunk * LANES, LANES)

            @pl.when((at < begin) | (at + LANES > end))
            def _():
                place = at + jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
                is_kept = (place >= begin) & (place < end)
                for head in range(sizes.num_kv_heads):
                    values = value_tiles_ref[buffer, head, pl.ds(at, LANES)].astype(jnp.float32)
                    kept = jnp.where(is_kept, values, 0.0).astype(value_tiles_ref.dtype)
                    value_tiles_ref[buffer, head, pl.ds(at, LANES)] = kept

            return carry

        jax.lax.fori_loop(0, block // LANES, clear, 0)

    def hide(piece, tile):
        """Mark the tokens of a tile whose pages are none."""
        lanes = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        begin, end = pages_of(piece, tile)

        def hide_page(page, hidden):
            place = lanes - (page - tile * block_pages) * page_size
            is_hidden = (place >= 0) & (place < page_size) & ~is_page(page_id(piece, page))
            return jnp.where(is_hidden, _HIDDEN, hidden)

        hidden_ref[...] = jax.lax.fori_loop(begin, end, hide_page, jnp.zeros((1, block), jnp.int32))

    def show_all():
        hidden_ref[...] = jnp.zeros((1, block), jnp.int32)

    def attend(index, piece, tile, buffer):
        """Take a tile into the sums of a piece."""
        place = tile * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1) - starts_ref[piece]
        # Row `token * group + head` sees places up to its token's, compared in rows: nothing is divided.
        past = jnp.where(hidden_ref[...] > 0, _HIDDEN, place * sizes.group)
        row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, block), 0)
        is_seen = past <= row
        if options.window is not None:
            is_seen &= past + options.window * sizes.group > row
        batch = max(
            heads
            for heads in range(1, sizes.num_kv_heads + 1)
            if sizes.num_kv_heads % heads == 0 and heads * sizes.rows <= max(_MAX_ROWS, sizes.rows)
        )

        def take_heads(part, carry):
            heads = pl.ds(part * batch, batch)
            logits = _products("hrd,hsd->hrs", query_ref[index, heads], key_tiles_ref[buffer, heads])
            logits = logits * options.scale
            if options.soft_cap is not None:
                logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
            logits = jnp.where(is_seen[None], logits, -jnp.inf)
            last_peak = peak_ref[heads]
            peak = jnp.maximum(last_peak, jnp.max(logits, axis=-1, keepdims=True))
            keep = jnp.exp(last_peak - peak)
            weights = jnp.exp(logits - jnp.concatenate([peak] * (block // LANES), axis=-1))
            added = sum(weights[:, :, lane : lane + LANES] for lane in range(0, block, LANES))
            values = value_tiles_ref[buffer, heads]
            update = _products("hrs,hsd->hrd", weights.astype(values.dtype), values)
            peak_ref[heads] = peak
            total_ref[heads] = total_ref[heads] * keep + added
            sum_ref[heads] = sum_ref[heads] * keep + update
            return carry

        jax.lax.fori_loop(0, sizes.num_kv_heads // batch, take_heads, 0)

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
            values = sum_ref[head]
            if sink_ref is not None:
                last_peak, sink = peak, sink_ref[head]
                peak = jnp.maximum(last_peak, sink)
                keep = jnp.exp(last_peak - peak)
                total, values = total * keep + jnp.exp(sink - peak), values * keep
            # Not `total > 0`: a NaN that a query sees is to be seen.
            is_written = is_row & (total != 0)
            total = jnp.where(is_written, total, 1.0)
            out_ref[index, head] = jnp.where(is_written, values / total, 0.0).astype(out_ref.dtype)
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
            begin = first_page(piece) * page_size - tile * block
            end = starts_ref[piece] + lens_ref[piece] - tile * block
            pl.when((begin > 0) | (end < block))(lambda: clear_values(buffer, begin, end))
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
        cursor_ref[_BLOCK] = tiles_of(first)[0]
        cursor_ref[_FILL] = 0
        cursor_ref[_DRAIN] = 0
        for _ in range(sizes.num_buffers - 1):
            fetch()

    jax.lax.fori_loop(0, sizes.pieces_per_step, walk, 0)


def _products(equation: str, left: Array, right: Array) -> Array:
    """Multiply in float32; operands that are float32 are not rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)
