"""Paged attention for NVIDIA GPUs of the Hopper generation, on Pallas' Mosaic GPU backend.

A sequence is cut into splits of a fixed number of tokens; a program takes splits of one KV head, one after
another, and walks each in blocks of 64 tokens whose pages TMA brings, a few blocks ahead. Products have their
operands swapped, `keys @ query.T` and `values.T @ weights`: queries of a KV head, padded to 8 rows, are the
narrow side of a `wgmma`, and a softmax costs what they need and not 64 rows. A second kernel merges a
sequence's splits by their log-sum-exp.

Grid: `Tiling.num_programs`, whatever the batch; which splits there are is worked out on the device beside the
kernel, so cost follows the tokens held. Blocks and splits begin at multiples of their size: no result depends
on the rest of the batch. Shared memory: a query, a few blocks of keys and values, the weights of one block.
Logits, softmax and sums are float32; queries and weights are rounded to the dtype they are multiplied in, as
tensor cores ask: the pool's, bfloat16 for int8 and float16 for fp8, to which Hopper converts fast. Scales of
keys multiply logits, those of values weights.

An entry of the table that names no page is read as the layer's first page and masked, as are dead slots of a
page; their values are zeroed before the product, since 0 * NaN is NaN.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, Tiling

# Keys of a block: the M of one wgmma.
BLOCK_TOKENS = 64
# Partial sums are merged one after another: more splits would take longer to merge than to attend.
_MAX_SPLITS = 128
# Bytes of keys and values on their way. 36 KB for each multiprocessor would hide a microsecond of latency at
# 4.8 TB/s; two programs share one, and each waits for its own blocks.
_BYTES_AHEAD = 96 * 1024
# Partial results whose loads are in flight at once while a sequence is merged.
_MERGED_AT_ONCE = 8
# Query rows of a program, and the sums `[head_dim, row]` that its registers hold beside a product: with twice
# as many of either, the assembler spills.
_MAX_ROWS, _MAX_SUMS = 32, 4096
# New tokens of a sequence: partial results take as many bytes as there are queries, for each split, and every
# `_MAX_ROWS` of them read the keys and values again.
_MAX_TIME = 16
# Of partial results: they are held beside the cache, as many for each sequence as its table is long.
_MAX_PARTIAL_BYTES = 2**30
# Channels that one program merges.
_MERGED_CHANNELS = 64
_LOG2_E = math.log2(math.e)
_NO_POSITION = jnp.iinfo(jnp.int32).max
# A vector of a block's slots, and one of its query rows, as a wgmma's accumulator has them.
_BY_SLOT = plgpu.Layout.WGMMA.reduce(1)
_BY_ROW = plgpu.Layout.WGMMA.reduce(0)
# Bits of fp8 numbers, and what the numbers are.
_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


class _Form(NamedTuple):
    """How keys or values are stored, and multiplied.

    Attributes:
        entry: see `Pages`.
        stored: dtype of the pool.
        dtype: what entries are converted to, and what they are multiplied with.
        scaling: whether a token and head, or a head, has a scale.
    """

    entry: str
    stored: jnp.dtype
    dtype: jnp.dtype
    scaling: Literal["none", "token", "head"]

    @property
    def is_converted(self) -> bool:
        """Whether tensor cores do not take entries as they are stored."""
        return self.stored != self.dtype


class _Pool(NamedTuple):
    """Keys or values of all layers.

    Attributes:
        data: entries, `[page, kv_head, slot, head_dim]`.
        scale: of a token and head, `[page, kv_head, slot]`, or of a head, `[kv_head]`.
    """

    data: Any
    scale: Any


class _Blocks(NamedTuple):
    """Keys or values in shared memory.

    Attributes:
        data: blocks on their way or in use, `[stage, slot, head_dim]`.
        scale: their tokens' scales, `[stage, slot]`.
        numbers: the block in use, converted, `[slot, head_dim]`.
        barriers: `[stage]`, passed when a block is there.
    """

    data: Any
    scale: Any
    numbers: Any
    barriers: Any


class _Sizes(NamedTuple):
    """Static sizes and options of a call.

    Attributes:
        num_kv_heads: KV heads.
        head_dim: entries of a head.
        page_size: slots of a page.
        num_pages: pages of a layer.
        table_width: pages that the table names for a sequence.
        rows: query rows of a program, a multiple of 8.
        num_parts: what a split is divided into for programs: KV heads times blocks of query rows.
        split: tokens of a split.
        max_splits: splits of a sequence at most.
        num_stages: blocks of keys and values on their way or in use.
        num_programs: programs of the kernel.
        keys: form of the keys.
        values: form of the values.
        scale: multiplies the logits.
        window: see `reference`.
        soft_cap: see `reference`.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    table_width: int
    rows: int
    num_parts: int
    split: int
    max_splits: int
    num_stages: int
    num_programs: int
    keys: _Form
    values: _Form
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def row_blocks(self) -> int:
        """Blocks that the query rows of a KV head take."""
        return self.num_parts // self.num_kv_heads

    @property
    def block_pages(self) -> int:
        """Pages that a block's tokens lie in."""
        return max(1, BLOCK_TOKENS // self.page_size)


class _Splits(NamedTuple):
    """What there is to do, worked out on the device.

    Attributes:
        work: of each split its sequence, first block, blocks, first token that a query sees, and tokens held.
        counts: the number of splits, and the pool's page that is page 0 of the layer.
        of_sequences: of each sequence its first split, and how many it has.
        limits: the first position that a query row does not see; 0 for padding.
    """

    work: Int[Array, "split 5"]
    counts: Int[Array, " 2"]
    of_sequences: Int[Array, "seq 2"]
    limits: Int[Array, "seq row"]


def refusal(arguments: PagedArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does."""
    head_dim, page_size = arguments.keys.head_dim, arguments.keys.page_size
    if arguments.stripe is not None:
        return "the GPU kernel walks tables of all pages, got one of a stripe; use 'xla'"
    if (time := arguments.query.shape[1]) > _MAX_TIME:
        return f"the GPU kernel takes steps of at most {_MAX_TIME} tokens a sequence, got {time}; use 'xla'"
    for pages in (arguments.keys, arguments.values):
        if _form(pages) is None:
            scales = "no scale" if pages.scale is None else f"scales {pages.scale.shape}"
            return (
                "the GPU kernel takes bfloat16 and float16 without scales, int8 and fp8 with those of tokens "
                f"or heads, got entries of {pages.entry} in {pages.data.dtype} with {scales}; use 'xla'"
            )
    rows = {pages.data.shape[2:] for pages in (arguments.keys, arguments.values)}
    if rows != {(page_size, head_dim)}:
        return f"the GPU kernel takes pools of layout 'plain', got pages of {page_size} slots in rows {rows}"
    is_converted = arguments.keys.scale is not None or arguments.values.scale is not None
    allowed = (64, 128) if is_converted else (64, 128, 192, 256)
    if head_dim not in allowed:
        # Wider blocks, converted, take more registers than there are.
        kind = "int8 and fp8" if is_converted else "bfloat16 and float16"
        sizes = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
        return f"the GPU kernel takes {kind} heads of {sizes} entries, got {head_dim}; use 'xla'"
    if page_size < 8 or (BLOCK_TOKENS % page_size and page_size % BLOCK_TOKENS):
        return (
            f"the GPU kernel takes pages of 8, 16, 32 or a multiple of 64 tokens, got {page_size}; use 'xla'"
        )
    return _refusal_of_partial_results(arguments, tiling or Tiling())


def _refusal_of_partial_results(arguments: PagedArguments, tiling: Tiling) -> str | None:
    num_seqs, _, _, head_dim = arguments.query.shape
    rows, num_parts = _parts(arguments)
    _, max_splits = _splits(arguments, tiling)
    num_bytes = 4 * num_seqs * max_splits * num_parts * head_dim * rows
    if num_bytes <= _MAX_PARTIAL_BYTES:
        return None
    return (
        f"the GPU kernel takes partial results of at most {_MAX_PARTIAL_BYTES} bytes, got {num_bytes} of "
        f"{num_seqs} sequences in {max_splits} splits; use 'xla'"
    )


def _form(pages: Pages) -> _Form | None:
    """Return how pages are stored and multiplied; None where they cannot be."""
    bfloat16, float16, stored = jnp.dtype("bfloat16"), jnp.dtype("float16"), pages.data.dtype
    is_float = pages.entry == "number" and stored in (bfloat16, float16)
    if is_float and pages.scale is None:
        return _Form(pages.entry, stored, stored, "none")
    is_narrow = pages.entry in _FP8 or (pages.entry == "number" and stored == jnp.int8)
    if not is_narrow or pages.scale is None or pages.zero is not None:
        return None
    if pages.scale.shape not in (pages.data.shape[:3], pages.data.shape[1:2]):
        return None
    dtype = float16 if pages.entry in _FP8 else bfloat16
    return _Form(pages.entry, stored, dtype, "head" if pages.scale.ndim == 1 else "token")


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
        ValueError: `refusal` says why.
    """
    tiling = tiling or Tiling()
    if (reason := refusal(arguments, tiling)) is not None:
        raise ValueError(reason)
    query, keys, values = arguments[:3]
    num_seqs, time, num_heads, head_dim = query.shape
    sizes = _sizes(arguments, num_pages, tiling, scale, window, soft_cap)
    group = num_heads // sizes.num_kv_heads

    # [seq, kv_head, time * group, head_dim]: the queries of one KV head are rows of one product.
    rows = query.reshape(num_seqs, time, sizes.num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = rows.reshape(num_seqs, sizes.num_kv_heads, time * group, head_dim).astype(sizes.keys.dtype)
    padding = sizes.row_blocks * sizes.rows - time * group
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    splits = _plan(arguments, sizes, group, padding)
    pools = _Pool(keys.data, keys.scale), _Pool(values.data, values.scale)
    partial = _attend(rows, *pools, arguments.page_table, splits, sizes)
    out, log_sum = _merge(*partial, splits.of_sequences, sizes)

    def regroup(x: jax.Array) -> jax.Array:
        """Turn `[seq, part, ..., row]` into `[seq, time, q_head, ...]`."""
        x = jnp.moveaxis(x.reshape(num_seqs, sizes.num_kv_heads, sizes.row_blocks, *x.shape[2:]), -1, 3)
        x = x.reshape(num_seqs, sizes.num_kv_heads, -1, *x.shape[4:])[:, :, : time * group]
        x = x.reshape(num_seqs, sizes.num_kv_heads, time, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(num_seqs, time, num_heads, *x.shape[4:])

    out, log_sum = regroup(out), regroup(log_sum)
    if sinks is not None:
        is_query = jnp.arange(time, dtype=jnp.int32)[None] < arguments.lens[:, None]
        out, log_sum = _add_sinks(out, log_sum, jnp.where(is_query[..., None], sinks[None, None], -jnp.inf))
    return out.astype(query.dtype), log_sum


def _sizes(
    arguments: PagedArguments,
    num_pages: int,
    tiling: Tiling,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> _Sizes:
    query, keys, values, table = arguments[:4]
    head_dim = query.shape[-1]
    _, num_kv_heads, page_size, _ = keys.data.shape
    rows, num_parts = _parts(arguments)
    split, max_splits = _splits(arguments, tiling)
    forms = _form(keys), _form(values)
    assert forms[0] is not None
    assert forms[1] is not None
    block_bytes = BLOCK_TOKENS * head_dim * sum(form.stored.itemsize for form in forms if form)
    return _Sizes(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        table_width=table.shape[1],
        rows=rows,
        num_parts=num_parts,
        split=split,
        max_splits=max_splits,
        num_stages=max(2, min(4, _BYTES_AHEAD // block_bytes)),
        num_programs=min(tiling.num_programs, query.shape[0] * max_splits * num_parts),
        keys=forms[0],
        values=forms[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def _parts(arguments: PagedArguments) -> tuple[int, int]:
    """Return the query rows of a program, and the parts of a split."""
    _, time, num_heads, head_dim = arguments.query.shape
    num_kv_heads = arguments.keys.data.shape[1]
    query_rows = time * (num_heads // num_kv_heads)
    rows = min(_MAX_ROWS, _MAX_SUMS // head_dim // 8 * 8, -(-query_rows // 8) * 8)
    return rows, num_kv_heads * -(-query_rows // rows)


def _splits(arguments: PagedArguments, tiling: Tiling) -> tuple[int, int]:
    """Return the tokens of a split, and the splits of a sequence at most."""
    capacity = arguments.page_table.shape[1] * arguments.keys.page_size
    split = max(tiling.split_tokens, -(-capacity // _MAX_SPLITS))
    split = -(-split // BLOCK_TOKENS) * BLOCK_TOKENS
    # What is seen may begin within a split.
    return split, -(-capacity // split) + 1


def _plan(arguments: PagedArguments, sizes: _Sizes, group: int, padding: int) -> _Splits:
    query, _, _, _, starts, lens, offset, _ = arguments[:8]
    num_seqs, time = query.shape[:2]
    ends = starts + lens
    # A table names the latest pages: those before are written over.
    first_seen = jnp.maximum(ends - sizes.table_width * sizes.page_size, 0)
    if sizes.window is not None:
        first_seen = jnp.maximum(first_seen, starts - sizes.window + 1)
    first_split = first_seen // sizes.split
    counts = jnp.where(lens > 0, -(-ends // sizes.split) - first_split, 0)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    first = last - counts

    split = jnp.arange(num_seqs * sizes.max_splits, dtype=jnp.int32)
    # Past the last split there is a sequence too: what it says is not read.
    seq = jnp.minimum(jnp.searchsorted(last, split, side="right").astype(jnp.int32), num_seqs - 1)
    begin = (first_split[seq] + split - first[seq]) * sizes.split
    first_block = jnp.maximum(begin, first_seen[seq]) // BLOCK_TOKENS
    end_block = -(-jnp.minimum(begin + sizes.split, ends[seq]) // BLOCK_TOKENS)
    work = jnp.stack([seq, first_block, end_block - first_block, first_seen[seq], ends[seq]], axis=1)

    steps = jnp.arange(time, dtype=jnp.int32)[None]
    limits = jnp.where(steps < lens[:, None], starts[:, None] + steps + 1, 0)
    limits = jnp.pad(jnp.repeat(limits, group, axis=1), ((0, 0), (0, padding)))
    return _Splits(
        work=work.astype(jnp.int32),
        counts=jnp.stack([last[-1], jnp.asarray(offset, jnp.int32)]),
        of_sequences=jnp.stack([first, counts], axis=1).astype(jnp.int32),
        limits=limits.astype(jnp.int32),
    )


def _attend(
    rows: Float[Array, "seq kv_head row head_dim"],
    keys: _Pool,
    values: _Pool,
    table: Int[Array, "seq max_pages"],
    splits: _Splits,
    sizes: _Sizes,
) -> tuple[Float[Array, "split part head_dim block_row"], Float[Array, "split part block_row"]]:
    """Return each split's attended values and log-sum-exp; undefined past the last split."""
    num_splits = splits.work.shape[0]
    out, log_sum = plgpu.kernel(
        functools.partial(_attend_kernel, sizes),
        out_type=[
            jax.ShapeDtypeStruct((num_splits, sizes.num_parts, sizes.head_dim, sizes.rows), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, sizes.num_parts, sizes.rows), jnp.float32),
        ],
        scratch_types=[
            _matrices((sizes.rows, sizes.head_dim), sizes.keys.dtype),
            _blocks(sizes, sizes.keys),
            _blocks(sizes, sizes.values),
            _matrices((sizes.rows, BLOCK_TOKENS), sizes.values.dtype),
            plgpu.Barrier(),
        ],
        grid=(sizes.num_programs,),
        grid_names=("program",),
        kernel_name="jkv_paged_attention",
    )(rows, keys, values, table, splits.limits, splits.work, splits.counts)
    return out, log_sum


def _matrices(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Return the type of matrices in shared memory, tiled and swizzled as TMA and wgmma take them."""
    row_bytes = 128 if shape[-1] * dtype.itemsize % 128 == 0 else 64
    tiling = plgpu.TilingTransform((8, row_bytes // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _blocks(sizes: _Sizes, form: _Form) -> _Blocks:
    """Return the types of what shared memory holds of keys or values."""
    block = (BLOCK_TOKENS, sizes.head_dim)
    has_scales = form.scaling == "token"
    return _Blocks(
        data=_matrices((sizes.num_stages, *block), form.stored),
        scale=plgpu.SMEM((sizes.num_stages, BLOCK_TOKENS), jnp.float32) if has_scales else None,
        numbers=_matrices(block, form.dtype) if form.is_converted else None,
        barriers=plgpu.Barrier(
            num_arrivals=sizes.block_pages * (2 if has_scales else 1), num_barriers=sizes.num_stages
        ),
    )


def _attend_kernel(
    sizes: _Sizes,
    rows_ref,  # multiplied as keys are [seq, kv_head, row, head_dim]  GMEM
    keys_pool: _Pool,  # GMEM
    values_pool: _Pool,  # GMEM
    table_ref,  # int32 [seq, max_pages]                               GMEM
    limits_ref,  # int32 [seq, row]                                    GMEM
    work_ref,  # int32 [split, 5]                                      GMEM
    counts_ref,  # int32 [2]                                           GMEM
    out_ref,  # float32 [split, part, head_dim, row]                   GMEM
    log_sum_ref,  # float32 [split, part, row]                         GMEM
    query_ref,  # multiplied as keys are [row, head_dim]               SMEM
    keys: _Blocks,  # SMEM
    values: _Blocks,  # SMEM
    weights_ref,  # multiplied as values are [row, slot]               SMEM
    query_barrier,
):
    num_rows, num_stages = sizes.rows, sizes.num_stages
    program = lax.axis_index("program")
    page_offset = counts_ref[1]

    def attend_unit(index: jax.Array, _: None) -> None:
        """Attend from one block of query rows of a KV head to one split."""
        unit = program + index * sizes.num_programs
        split, part = _divide(unit, sizes.num_parts)
        head, row_block = _divide(part, sizes.row_blocks)
        seq, first_block, num_blocks, first_seen, end = (work_ref[split, i] for i in range(5))
        block_rows = pl.ds(row_block * num_rows, num_rows)
        plgpu.copy_gmem_to_smem(rows_ref.at[seq, head, block_rows], query_ref, query_barrier)

        def read_table(block: jax.Array) -> tuple[jax.Array, ...]:
            """Return the table's entries for a block of the sequence; of whatever page where it has none."""
            first_page = lax.div(block * BLOCK_TOKENS, jnp.int32(sizes.page_size))
            columns = (
                lax.rem(first_page + i, jnp.int32(sizes.table_width)) for i in range(sizes.block_pages)
            )
            return tuple(table_ref[seq, column] for column in columns)

        def fetch(block: jax.Array, stage: jax.Array | int, entries: tuple[jax.Array, ...]) -> None:
            """Start the copies of a block's keys and values."""
            tokens = min(sizes.page_size, BLOCK_TOKENS)
            within = (
                lax.rem(block * BLOCK_TOKENS, jnp.int32(sizes.page_size)) if tokens < sizes.page_size else 0
            )
            for i, entry in enumerate(entries):
                page = page_offset + jnp.where(_is_page(entry, sizes), entry, 0)
                source, target = (page, head, pl.ds(within, tokens)), (stage, pl.ds(i * tokens, tokens))
                for pool, blocks in ((keys_pool, keys), (values_pool, values)):
                    barrier = blocks.barriers.at[stage]
                    plgpu.copy_gmem_to_smem(pool.data.at[*source], blocks.data.at[*target], barrier)
                    if blocks.scale is not None:
                        # Of pages of 8 or 16 slots, scales begin where a tensor's copy may not: at other than
                        # multiples of 128 bytes. One that is promised to be in bounds asks for 16.
                        plgpu.copy_gmem_to_smem(
                            pool.scale.at[*source],
                            blocks.scale.at[*target],
                            barrier,
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

        ahead = []
        for stage in range(num_stages):
            entries = read_table(first_block + stage)
            ahead.append(_pages_named(entries, sizes))
            pl.when(stage < num_blocks)(functools.partial(fetch, first_block + stage, stage, entries))
        limits = plgpu.load(limits_ref.at[seq, block_rows], layout=_BY_ROW, optimized=False)
        plgpu.barrier_wait(query_barrier)

        def attend_block(index: jax.Array, carry: Any) -> Any:
            """Take a block of keys and values into the sums of an online softmax."""
            ahead, entries, peak, total, sums = carry
            block, stage = first_block + index, lax.rem(index, jnp.int32(num_stages))
            begin, named = block * BLOCK_TOKENS, ahead[0]
            positions = _live_positions(begin, named, first_seen, end, sizes)

            plgpu.barrier_wait(keys.barriers.at[stage])
            logits = _product(_numbers(keys, sizes.keys, stage), query_ref.transpose((1, 0)))
            logits = _scaled(logits, keys, keys_pool, stage, head, sizes)
            is_seen = _wide(positions, num_rows) < _tall(limits, BLOCK_TOKENS)
            if sizes.window is not None:
                is_seen &= _wide(positions, num_rows) >= _tall(limits - sizes.window, BLOCK_TOKENS)
            logits = jnp.where(is_seen, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, logits.max(axis=0))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp2(logits - _tall(shift, BLOCK_TOKENS))
            keep = jnp.exp2(peak - shift)
            total = total * _tall(keep, BLOCK_TOKENS) + weights

            plgpu.barrier_wait(values.barriers.at[stage])
            weights, unit_scale = _scaled_weights(weights, values, stage, positions, sizes.values)
            weights_ref.transpose((1, 0))[...] = weights.astype(weights_ref.dtype)
            numbers_ref = _numbers(values, sizes.values, stage)
            is_whole = named == (1 << sizes.block_pages) - 1
            is_whole &= (begin >= first_seen) & (begin + BLOCK_TOKENS <= end)

            @pl.when(jnp.logical_not(is_whole))
            def _zero_the_dead() -> None:
                numbers = plgpu.load(numbers_ref, layout=plgpu.Layout.WGMMA, optimized=False)
                is_live = _wide(positions < _NO_POSITION, sizes.head_dim)
                numbers_ref[...] = jnp.where(is_live, numbers, jnp.zeros((), numbers.dtype))

            plgpu.commit_smem()
            update = _product(numbers_ref.transpose((1, 0)), weights_ref.transpose((1, 0)))
            if unit_scale is not None:
                update = update * unit_scale
            sums = sums * _tall(keep, sizes.head_dim) + update
            # The entries of the block after this one are on their way while it is attended.
            later = read_table(block + num_stages + 1)
            pl.when(index + num_stages < num_blocks)(
                functools.partial(fetch, block + num_stages, stage, entries)
            )
            return (*ahead[1:], _pages_named(entries, sizes)), later, new_peak, total, sums

        empty = (
            plgpu.layout_cast(jnp.full((num_rows,), -jnp.inf, jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((BLOCK_TOKENS, num_rows), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.zeros((sizes.head_dim, num_rows), jnp.float32), plgpu.Layout.WGMMA),
        )
        carry = (tuple(ahead), read_table(first_block + num_stages), *empty)
        _, _, peak, total, sums = lax.fori_loop(0, num_blocks, attend_block, carry)
        total = total.sum(axis=0)
        sums = sums / _tall(jnp.where(total == 0, 1.0, total), sizes.head_dim)
        out_ref.at[split, part][...] = (
            sums * values_pool.scale[head] if sizes.values.scaling == "head" else sums
        )
        log_sum_ref.at[split, part][...] = _log_sum(peak, total)

    num_units = counts_ref[0] * sizes.num_parts
    own, _ = _divide(num_units - program + sizes.num_programs - 1, sizes.num_programs)
    lax.fori_loop(0, own, attend_unit, None)


def _divide(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, jnp.int32(divisor)), lax.rem(number, jnp.int32(divisor))


def _wide(by_slot: jax.Array, num_columns: int) -> jax.Array:
    """Repeat a vector along a new last axis."""
    return lax.broadcast_in_dim(by_slot, (by_slot.shape[0], num_columns), (0,))


def _tall(by_row: jax.Array, num_rows: int) -> jax.Array:
    """Repeat a vector along a new first axis."""
    return lax.broadcast_in_dim(by_row, (num_rows, by_row.shape[0]), (1,))


def _is_page(entry: jax.Array, sizes: _Sizes) -> jax.Array:
    return (entry >= 0) & (entry < sizes.num_pages)


def _pages_named(entries: tuple[jax.Array, ...], sizes: _Sizes) -> jax.Array:
    """Return a bit for each entry that names a page."""
    bits = jnp.int32(0)
    for i, entry in enumerate(entries):
        bits |= jnp.where(_is_page(entry, sizes), jnp.int32(1 << i), jnp.int32(0))
    return bits


def _live_positions(
    begin: jax.Array, named: jax.Array, first_seen: jax.Array, end: jax.Array, sizes: _Sizes
) -> jax.Array:
    """Return the position of each of a block's slots, `_NO_POSITION` where none is held that a query sees."""
    slots = plgpu.broadcasted_iota(jnp.int32, (BLOCK_TOKENS,), 0, layout=_BY_SLOT)
    positions = begin + slots
    is_live = (positions >= first_seen) & (positions < end)
    is_live &= ((named >> (slots // min(sizes.page_size, BLOCK_TOKENS))) & 1) == 1
    return jnp.where(is_live, positions, _NO_POSITION)


def _product(left_ref: Any, right_ref: Any) -> jax.Array:
    """Return the float32 product of two matrices in shared memory."""

    def multiply(sums_ref: Any) -> jax.Array:
        plgpu.wgmma(sums_ref, left_ref, right_ref)
        return sums_ref[...]

    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((left_ref.shape[0], right_ref.shape[1]), jnp.float32)
    )


def _numbers(blocks: _Blocks, form: _Form, stage: jax.Array) -> Any:
    """Return the block in use as numbers that tensor cores take, in shared memory."""
    if not form.is_converted:
        return blocks.data.at[stage]
    entries = blocks.data[stage]
    if form.entry in _FP8:
        entries = lax.bitcast_convert_type(entries, _FP8[form.entry])
    blocks.numbers[...] = entries.astype(form.dtype)
    plgpu.commit_smem()
    return blocks.numbers


def _scaled(
    products: jax.Array, keys: _Blocks, pool: _Pool, stage: jax.Array, head: jax.Array, sizes: _Sizes
) -> jax.Array:
    """Return logits in units of the logarithm to base 2."""
    factor = sizes.scale * _LOG2_E
    if sizes.soft_cap is not None:
        factor *= 2 / sizes.soft_cap
    if keys.scale is not None:
        scales = plgpu.load(keys.scale.at[stage], layout=_BY_SLOT, optimized=False)
        logits = products * _wide(scales * factor, sizes.rows)
    else:
        logits = products * (pool.scale[head] * factor if sizes.keys.scaling == "head" else factor)
    if sizes.soft_cap is None:
        return logits
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's tanh has 11 bits.
    return (1 - 2 / (1 + jnp.exp2(logits))) * (sizes.soft_cap * _LOG2_E)


def _scaled_weights(
    weights: jax.Array, values: _Blocks, stage: jax.Array, positions: jax.Array, form: _Form
) -> tuple[jax.Array, jax.Array | None]:
    """Return the weights times the scales of the block's values, over what their sum is yet to be scaled by.

    A float16 of a weight times a small scale would be none: there the largest scale is left to the sum.
    """
    if values.scale is None:
        return weights, None
    scales = plgpu.load(values.scale.at[stage], layout=_BY_SLOT, optimized=False)
    scales = jnp.where(positions < _NO_POSITION, scales, 0.0)
    largest = None
    if form.dtype == jnp.float16:
        largest = scales.max()
        scales = scales / jnp.where(largest == 0, 1.0, largest)
    return weights * _wide(scales, weights.shape[1]), largest


def _log_sum(peak: jax.Array, total: jax.Array) -> jax.Array:
    """Return the natural logarithm of a sum of powers of 2 less `peak`; -inf of an empty one."""
    log_sum = (peak + jnp.log2(jnp.where(total == 0, 1.0, total))) / _LOG2_E
    return jnp.where(total == 0, -jnp.inf, log_sum)


def _merge(
    out: Float[Array, "split part head_dim block_row"],
    log_sum: Float[Array, "split part block_row"],
    of_sequences: Int[Array, "seq 2"],
    sizes: _Sizes,
) -> tuple[Float[Array, "seq part head_dim block_row"], Float[Array, "seq part block_row"]]:
    """Return each sequence's attended values and log-sum-exp; zero and -inf where it has no split."""
    num_seqs = of_sequences.shape[0]
    merged, merged_log_sum = plgpu.kernel(
        functools.partial(_merge_kernel, sizes),
        out_type=[
            jax.ShapeDtypeStruct((num_seqs, *out.shape[1:]), jnp.float32),
            jax.ShapeDtypeStruct((num_seqs, *log_sum.shape[1:]), jnp.float32),
        ],
        grid=(num_seqs, sizes.num_parts, sizes.head_dim // _MERGED_CHANNELS),
        grid_names=("seq", "part", "channels"),
        kernel_name="jkv_paged_attention_merge",
    )(out, log_sum, of_sequences)
    return merged, merged_log_sum


def _merge_kernel(
    sizes: _Sizes,
    out_ref,  # float32 [split, part, head_dim, row]   GMEM
    log_sum_ref,  # float32 [split, part, row]         GMEM
    of_sequences_ref,  # int32 [seq, 2]                GMEM
    merged_ref,  # float32 [seq, part, head_dim, row]  GMEM
    merged_log_sum_ref,  # float32 [seq, part, row]    GMEM
):
    seq, part, block = (lax.axis_index(name) for name in ("seq", "part", "channels"))
    channels = pl.ds(block * _MERGED_CHANNELS, _MERGED_CHANNELS)
    first, count = of_sequences_ref[seq, 0], of_sequences_ref[seq, 1]

    def add(index: jax.Array, carry: Any) -> Any:
        peak, total, sums = carry
        loaded = []
        for i in range(_MERGED_AT_ONCE):
            split = first + jnp.minimum(index * _MERGED_AT_ONCE + i, count - 1)
            log_sum = plgpu.load(log_sum_ref.at[split, part], layout=_BY_ROW, optimized=False)
            log_sum += jnp.where(index * _MERGED_AT_ONCE + i < count, 0.0, -jnp.inf)
            out = plgpu.load(out_ref.at[split, part, channels], layout=plgpu.Layout.WGMMA, optimized=False)
            loaded.append((log_sum * _LOG2_E, out))
        new_peak = functools.reduce(jnp.maximum, (log_sum for log_sum, _ in loaded), peak)
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        keep = jnp.exp2(peak - shift)
        total, sums = total * keep, sums * _tall(keep, _MERGED_CHANNELS)
        for log_sum, out in loaded:
            weight = jnp.exp2(log_sum - shift)
            total, sums = total + weight, sums + out * _tall(weight, _MERGED_CHANNELS)
        return new_peak, total, sums

    empty = (
        plgpu.layout_cast(jnp.full((sizes.rows,), -jnp.inf, jnp.float32), _BY_ROW),
        plgpu.layout_cast(jnp.zeros((sizes.rows,), jnp.float32), _BY_ROW),
        plgpu.layout_cast(jnp.zeros((_MERGED_CHANNELS, sizes.rows), jnp.float32), plgpu.Layout.WGMMA),
    )
    steps, _ = _divide(count + _MERGED_AT_ONCE - 1, _MERGED_AT_ONCE)
    peak, total, sums = lax.fori_loop(0, steps, add, empty)
    total_or_one = jnp.where(total == 0, 1.0, total)
    merged_ref.at[seq, part, channels][...] = sums / _tall(total_or_one, _MERGED_CHANNELS)

    @pl.when(block == 0)
    def _write_log_sum() -> None:
        merged_log_sum_ref.at[seq, part][...] = _log_sum(peak, total)


def _add_sinks(
    out: Float[Array, "seq time q_head head_dim"],
    log_sum: Float[Array, "seq time q_head"],
    sinks: Float[Array, "seq time q_head"],
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Give each sink its probability; one of -inf has none."""
    sinks = sinks.astype(jnp.float32)
    # Where nothing is seen the sink may be -inf too, and the difference is NaN.
    share = jnp.where(log_sum == -jnp.inf, 0.0, jax.nn.sigmoid(log_sum - sinks))
    return out * share[..., None], jnp.logaddexp(log_sum, sinks)
