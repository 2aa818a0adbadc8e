"""Paged attention for NVIDIA GPUs of the Hopper generation, on Pallas' Mosaic GPU backend.

A step of more than 16 tokens is for `pallas_gpu_prefill`; of those that it does not take each piece of 16
tokens walks as a sequence of its own to where it ends, in one split. Of shorter steps a sequence is cut into
splits of a fixed number of tokens; a program takes splits of one KV head, one after another, and walks each
in blocks of 64 tokens whose pages TMA brings, a few blocks ahead. Products have their operands swapped,
`keys @ query.T` and `values.T @ weights`: queries of a KV head, padded to 8 rows, are the narrow side of a
`wgmma`, and a softmax costs what they need and not 64 rows. A second kernel merges a sequence's splits by
their log-sum-exp. Channels of values are rows of a `wgmma`, 64 or a multiple; of other heads the last 64
channels are multiplied by themselves, those among them that were before once more.

Grid: `Tiling.num_programs`, whatever the batch; which splits there are is worked out on the device beside the
kernel, so cost follows the tokens held. Where a table is that of a stripe, they are counted in the stripe.
Blocks and splits begin at multiples of their size: no result depends on the rest of the batch. Shared memory:
a query, a few blocks of keys and values, the weights of one block. Logits, softmax and sums are float32;
queries and weights are rounded to the dtype they are multiplied in, as tensor cores ask: the pool's, bfloat16
for int8 and int4 and float16 for fp8, to which Hopper converts fast. Scales of keys multiply logits, those of
values weights; those of runs, with their zero points, 4-bit entries while they are converted. What a query
sees of its own run, whose keys are not in the pages where runs are of slots, is attended to in plain JAX and
merged by its log-sum-exp.

An entry of the table that names no page is read as the layer's first page and masked, as are dead slots of a
page; their values are zeroed before the product, since 0 * NaN is NaN.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.hopper import splits as splitting
from kernels_pallas.hopper.accumulators import (
    LOG2_E,
    OF_COLUMNS,
    OF_ROWS,
    full,
    log_sum_of,
    matrices,
    product,
    tall,
    wide,
)
from kernels_pallas.hopper.blocks import (
    BLOCK_TOKENS,
    NO_POSITION,
    Walk,
    divide,
    refusal_of_page_size,
    slots_of_block,
)
from kernels_pallas.hopper.forms import Form, form_of, refusal_of_form
from kernels_pallas.hopper.splits import Cut, Splits
from kernels_pallas.hopper.stages import (
    Pool,
    Stages,
    copy_piece,
    load_scales,
    numbers_of,
    pool_of,
    stages,
    write_numbers,
    zero_dead,
)
from kernels_pallas.paged_attention import pallas_gpu_prefill as prefill
from kernels_pallas.paged_attention.contract import PagedArguments, Stripe, Tiling, check_rows
from kernels_pallas.paged_attention.xla import attend_to_own_runs

# Bytes of keys and values on their way. 36 KB for each multiprocessor would hide a microsecond of latency at
# 4.8 TB/s; two programs share one, and each waits for its own blocks.
_BYTES_AHEAD = 96 * 1024
# Query rows of a program, and the sums `[head_dim, row]` that its registers hold beside a product: with twice
# as many of either, the assembler spills. So it does with half as many where wide heads are converted.
_MAX_ROWS, _MAX_SUMS, _MAX_CONVERTED_SUMS = 32, 4096, 2048
# Channels of values that are rows of a product, and heads of at least as many.
_PRODUCT_ROWS = 64
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)

_Attended = tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]


class _Sizes(NamedTuple):
    """Static sizes and options of a call.

    Attributes:
        num_kv_heads: KV heads.
        head_dim: entries of a head.
        walk: of a sequence's pages.
        cut: of a sequence into splits.
        rows: query rows of a program, a multiple of 8.
        num_parts: what a split is divided into for programs: KV heads times blocks of query rows.
        num_stages: blocks of keys and values on their way or in use.
        num_programs: programs of the kernel.
        keys: form of the keys.
        values: form of the values.
        scale: multiplies the logits.
        window: see `reference`.
        soft_cap: see `reference`.
        is_striped: whether the table is that of a stripe.
        is_interpreted: see `Tiling`.
    """

    num_kv_heads: int
    head_dim: int
    walk: Walk
    cut: Cut
    rows: int
    num_parts: int
    num_stages: int
    num_programs: int
    keys: Form
    values: Form
    scale: float
    window: int | None
    soft_cap: float | None
    is_striped: bool
    is_interpreted: bool

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """First channel and number of channels of the products of values: most of them, and the last 64."""
        whole = self.head_dim // _PRODUCT_ROWS * _PRODUCT_ROWS
        last = self.head_dim - _PRODUCT_ROWS, _PRODUCT_ROWS
        return [(0, whole)] if whole == self.head_dim else [(0, whole), last]

    @property
    def row_blocks(self) -> int:
        """Blocks that the query rows of a KV head take."""
        return self.num_parts // self.num_kv_heads


def refusal(arguments: PagedArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does."""
    head_dim, page_size = arguments.keys.head_dim, arguments.keys.page_size
    for pages in (arguments.keys, arguments.values):
        if (reason := refusal_of_form(pages)) is not None:
            return reason
    for pages in (arguments.keys, arguments.values):
        if (rows := pages.data.shape[2:]) != pages.data_shape:
            return (
                f"the GPU kernel takes pools of layout 'plain', got pages of {page_size} slots in rows {rows}"
            )
    if head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        return f"the GPU kernel takes heads of one of {sizes} entries, got {head_dim}; use 'xla'"
    if (reason := refusal_of_page_size(page_size)) is not None:
        return reason
    if page_size == 8 and head_dim == 256 and _is_converted(arguments):
        # Eight entries of the table for a block take more registers than the conversion leaves.
        return "the GPU kernel takes heads of 256 in 4 or 8 bits in pages of 16 tokens or more, got 8"
    if prefill.takes(arguments):
        return None
    cut = _cut(arguments, tiling or Tiling())
    arguments = jax.eval_shape(lambda given: splitting.in_pieces(given, "query"), arguments)
    rows, num_parts = _parts(arguments)
    numbers = num_parts * _summed(head_dim) * rows
    return splitting.refusal_of_partial_results(cut, arguments.query.shape[0], numbers)


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
        ValueError: `refusal` says why, or rows are not the sequences'.
    """
    tiling = tiling or Tiling()
    check_rows(arguments)
    if (reason := refusal(arguments, tiling)) is not None:
        raise ValueError(reason)
    time = arguments.query.shape[1]
    options = {"num_pages": num_pages, "scale": scale, "window": window, "soft_cap": soft_cap}
    if prefill.takes(arguments):
        # What is merged is rounded after.
        query = arguments.query if arguments.recent is None else arguments.query.astype(jnp.float32)
        out, log_sum = prefill.attend(arguments._replace(query=query), sinks=sinks, tiling=tiling, **options)
        sinks = None
    else:
        pieces = splitting.in_pieces(arguments, "query")
        sizes = _sizes(pieces, num_pages, _cut(arguments, tiling), tiling, scale, window, soft_cap)
        attended = _attend_from_pieces(pieces, splitting.held_of_pieces(arguments), sizes)
        out, log_sum = (splitting.joined(x, time) for x in attended)
    if arguments.recent is not None:
        out, log_sum = _merged((out, log_sum), attend_to_own_runs(arguments, **options))
    if sinks is not None:
        is_query = jnp.arange(time, dtype=jnp.int32)[None] < arguments.lens[:, None]
        out, log_sum = _add_sinks(out, log_sum, jnp.where(is_query[..., None], sinks[None, None], -jnp.inf))
    return out.astype(arguments.query.dtype), log_sum


def _attend_from_pieces(arguments: PagedArguments, held: Int[Array, " seq"], sizes: _Sizes) -> _Attended:
    """Return what pieces see of the pages, and its log-sum-exp; `held` is what their sequences hold."""
    query, keys, values = arguments[:3]
    num_seqs, time, num_heads, head_dim = query.shape
    group = num_heads // sizes.num_kv_heads

    # [seq, kv_head, time * group, head_dim]: the queries of one KV head are rows of one product.
    rows = query.reshape(num_seqs, time, sizes.num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = rows.reshape(num_seqs, sizes.num_kv_heads, time * group, head_dim)
    rows = sizes.keys.multiplied(rows)
    padding = sizes.row_blocks * sizes.rows - time * group
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    splits = splitting.plan(
        *arguments[4:7],
        sizes.cut,
        arguments.stripe,
        time=time,
        group=group,
        padding=padding,
        window=sizes.window,
        held=held,
    )
    pools = pool_of(keys), pool_of(values)
    partial = _attend(rows, *pools, arguments.page_table, splits, sizes)
    out, log_sum = splitting.merge(
        *partial, splits.of_sequences, query_axis=1, name="jkv_paged_attention_merge"
    )

    def regroup(x: jax.Array) -> jax.Array:
        """Turn `[seq, part, ..., row]` into `[seq, time, q_head, ...]`."""
        x = jnp.moveaxis(x.reshape(num_seqs, sizes.num_kv_heads, sizes.row_blocks, *x.shape[2:]), -1, 3)
        x = x.reshape(num_seqs, sizes.num_kv_heads, -1, *x.shape[4:])[:, :, : time * group]
        x = x.reshape(num_seqs, sizes.num_kv_heads, time, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(num_seqs, time, num_heads, *x.shape[4:])

    (_, whole), *_ = sizes.tiles
    out = jnp.concatenate([out[:, :, :whole], out[:, :, _summed(head_dim) - head_dim + whole :]], axis=2)
    return sizes.values.summed(regroup(out)), regroup(log_sum)


def _sizes(
    arguments: PagedArguments,
    num_pages: int,
    cut: Cut,
    tiling: Tiling,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> _Sizes:
    query, keys, values, table = arguments[:4]
    head_dim = query.shape[-1]
    _, num_kv_heads, page_size, _ = keys.data.shape
    rows, num_parts = _parts(arguments)
    forms = form_of(keys), form_of(values)
    assert forms[0] is not None
    assert forms[1] is not None
    block_bytes = BLOCK_TOKENS * _summed(head_dim) * sum(form.stored.itemsize for form in forms if form)
    return _Sizes(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        walk=Walk(page_size, num_pages, table.shape[1]),
        cut=cut,
        rows=rows,
        num_parts=num_parts,
        num_stages=max(2, min(4, _BYTES_AHEAD // block_bytes)),
        num_programs=min(tiling.num_programs, query.shape[0] * cut.max_splits * num_parts),
        keys=forms[0],
        values=forms[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        is_striped=arguments.stripe is not None,
        is_interpreted=tiling.is_interpreted,
    )


def _parts(arguments: PagedArguments) -> tuple[int, int]:
    """Return the query rows of a program, and the parts of a split."""
    _, time, num_heads, head_dim = arguments.query.shape
    num_kv_heads = arguments.keys.data.shape[1]
    query_rows = time * (num_heads // num_kv_heads)
    max_sums = _MAX_CONVERTED_SUMS if head_dim > 128 and _is_converted(arguments) else _MAX_SUMS
    rows = min(_MAX_ROWS, max_sums // _summed(head_dim) // 8 * 8, -(-query_rows // 8) * 8)
    return rows, num_kv_heads * -(-query_rows // rows)


def _is_converted(arguments: PagedArguments) -> bool:
    return arguments.keys.scale is not None or arguments.values.scale is not None


def _summed(head_dim: int) -> int:
    """Return the channels of all products of values."""
    return -(-head_dim // _PRODUCT_ROWS) * _PRODUCT_ROWS


def _cut(arguments: PagedArguments, tiling: Tiling) -> Cut:
    max_pages, page_size = arguments.page_table.shape[1], arguments.keys.page_size
    return splitting.cut(max_pages, page_size, tiling.split_tokens, arguments.query.shape[1])


def _attend(
    rows: Float[Array, "seq kv_head row head_dim"],
    keys: Pool,
    values: Pool,
    table: Int[Array, "seq max_pages"],
    splits: Splits,
    sizes: _Sizes,
) -> tuple[Float[Array, "split part channel block_row"], Float[Array, "split part block_row"]]:
    """Return each split's attended values and log-sum-exp; undefined past the last split."""
    num_splits, head_dim = splits.work.shape[0], sizes.head_dim
    out, log_sum = plgpu.kernel(
        functools.partial(_attend_kernel, sizes),
        out_type=[
            jax.ShapeDtypeStruct((num_splits, sizes.num_parts, _summed(head_dim), sizes.rows), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, sizes.num_parts, sizes.rows), jnp.float32),
        ],
        scratch_types=[
            matrices((sizes.rows, head_dim), sizes.keys.dtype, sizes.keys.tile),
            *(
                stages(form, sizes.num_stages, sizes.walk.block_pages, head_dim)
                for form in (sizes.keys, sizes.values)
            ),
            matrices((sizes.rows, BLOCK_TOKENS), sizes.values.dtype, sizes.values.tile or head_dim),
            plgpu.Barrier(),
        ],
        grid=(sizes.num_programs,),
        grid_names=("program",),
        kernel_name="jkv_paged_attention",
    )(rows, keys, values, table, splits.limits, splits.work, splits.counts)
    return out, log_sum


def _attend_kernel(
    sizes: _Sizes,
    rows_ref,  # multiplied as keys are [seq, kv_head, row, head_dim]  GMEM
    keys_pool: Pool,  # GMEM
    values_pool: Pool,  # GMEM
    table_ref,  # int32 [seq, max_pages]                               GMEM
    limits_ref,  # int32 [seq, row]                                    GMEM
    work_ref,  # int32 [split, 5]                                      GMEM
    counts_ref,  # int32 [2], or [4] with a stripe                     GMEM
    out_ref,  # float32 [split, part, channel, row]                    GMEM
    log_sum_ref,  # float32 [split, part, row]                         GMEM
    query_ref,  # multiplied as keys are [row, head_dim]               SMEM
    keys: Stages,  # SMEM
    values: Stages,  # SMEM
    weights_ref,  # multiplied as values are [row, slot]               SMEM
    query_barrier,
):
    num_rows, num_stages = sizes.rows, sizes.num_stages
    program = lax.axis_index("program")
    page_offset = counts_ref[1]
    stripe = Stripe(counts_ref[2], counts_ref[3]) if sizes.is_striped else None

    def attend_unit(index: jax.Array, _: None) -> None:
        """Attend from one block of query rows of a KV head to one split."""
        unit = program + index * sizes.num_programs
        split, part = divide(unit, sizes.num_parts)
        head, row_block = divide(part, sizes.row_blocks)
        seq, first_block, num_blocks, first_seen, end = (work_ref[split, i] for i in range(5))
        block_rows = pl.ds(row_block * num_rows, num_rows)
        plgpu.copy_gmem_to_smem(rows_ref.at[seq, head, block_rows], query_ref, query_barrier)

        def fetch(block: jax.Array, stage: jax.Array | int, entries: tuple[jax.Array, ...]) -> None:
            """Start the copies of a block's keys and values."""
            num_slots = min(sizes.walk.page_size, BLOCK_TOKENS)
            for piece in sizes.walk.pieces(block, entries, page_offset, num_slots):
                for pool, blocks, form in (
                    (keys_pool, keys, sizes.keys),
                    (values_pool, values, sizes.values),
                ):
                    copy_piece(pool, blocks, form, piece, num_slots, head, stage)

        read_table = functools.partial(sizes.walk.read_table, table_ref, seq)
        ahead = []
        for stage in range(num_stages):
            entries = read_table(first_block + stage)
            ahead.append(sizes.walk.named(entries))
            pl.when(stage < num_blocks)(functools.partial(fetch, first_block + stage, stage, entries))
        limits = plgpu.load(limits_ref.at[seq, block_rows], layout=OF_COLUMNS, optimized=False)
        ends = limits
        if sizes.keys.scaling == "slots":
            # Of the runs before that of the query itself.
            ends = (limits - 1) & -sizes.keys.run_slots
        plgpu.barrier_wait(query_barrier)

        def attend_block(index: jax.Array, carry: Any) -> Any:
            """Take a block of keys and values into the sums of an online softmax."""
            ahead, entries, peak, total, sums = carry
            block, stage = first_block + index, lax.rem(index, jnp.int32(num_stages))
            held = block, ahead[0], first_seen, end, stripe
            positions = sizes.walk.live_positions(slots_of_block(BLOCK_TOKENS, OF_ROWS), *held)

            plgpu.barrier_wait(keys.barriers.at[stage])
            write_numbers(sizes.keys, keys, stage, is_interpreted=sizes.is_interpreted)
            keys_ref = numbers_of(sizes.keys, keys, stage)
            if sizes.keys.is_converted:
                plgpu.commit_smem()
            logits = product((keys_ref, query_ref.transpose((1, 0))))
            logits = _scaled(logits, keys, keys_pool, stage, head, sizes)
            is_seen = wide(positions, num_rows) < tall(ends, BLOCK_TOKENS)
            if sizes.window is not None:
                is_seen &= wide(positions, num_rows) >= tall(limits - sizes.window, BLOCK_TOKENS)
            logits = jnp.where(is_seen, logits, -jnp.inf)
            plgpu.barrier_wait(values.barriers.at[stage])
            scales = None
            if sizes.values.scaling == "token":
                scales = load_scales(values.scale.at[stage], positions < NO_POSITION, OF_ROWS)
                if sizes.values.is_narrow:
                    logits += wide(jnp.log2(scales), num_rows)
            new_peak = jnp.maximum(peak, logits.max(axis=0))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp2(logits - tall(shift, BLOCK_TOKENS))
            keep = jnp.exp2(peak - shift)
            scaled = unscaled = weights
            if scales is not None and sizes.values.is_narrow:
                unscaled = weights * wide(1 / scales, num_rows)
            elif scales is not None:
                scaled = weights * wide(scales, num_rows)
            total = total * tall(keep, BLOCK_TOKENS) + unscaled

            weights_ref.transpose((1, 0))[...] = scaled.astype(weights_ref.dtype)
            write_numbers(sizes.values, values, stage, is_interpreted=sizes.is_interpreted)
            numbers_ref = numbers_of(sizes.values, values, stage)

            @pl.when(jnp.logical_not(sizes.walk.is_whole(*held)))
            def _zero_the_dead() -> None:
                zero_dead(numbers_ref, positions < NO_POSITION)

            plgpu.commit_smem()
            sums = tuple(
                before * tall(keep, num_channels)
                + product(
                    (
                        numbers_ref.at[:, pl.ds(first, num_channels)].transpose((1, 0)),
                        weights_ref.transpose((1, 0)),
                    )
                )
                for (first, num_channels), before in zip(sizes.tiles, sums, strict=True)
            )
            # The entries of the block after this one are on their way while it is attended.
            later = read_table(block + num_stages + 1)
            pl.when(index + num_stages < num_blocks)(
                functools.partial(fetch, block + num_stages, stage, entries)
            )
            return (*ahead[1:], sizes.walk.named(entries)), later, new_peak, total, sums

        empty = (
            full((num_rows,), -jnp.inf, OF_COLUMNS),
            full((BLOCK_TOKENS, num_rows), 0.0, plgpu.Layout.WGMMA),
            tuple(full((channels, num_rows), 0.0, plgpu.Layout.WGMMA) for _, channels in sizes.tiles),
        )
        carry = (tuple(ahead), read_table(first_block + num_stages), *empty)
        _, _, peak, total, sums = lax.fori_loop(0, num_blocks, attend_block, carry)
        total = total.sum(axis=0)
        share = 1 / jnp.where(total == 0, 1.0, total)
        if sizes.values.scaling == "head":
            share = share * values_pool.scale[head]
        place = 0
        for tile in sums:
            num_channels = tile.shape[0]
            out_ref.at[split, part, pl.ds(place, num_channels)][...] = tile * tall(share, num_channels)
            place += num_channels
        log_sum_ref.at[split, part][...] = log_sum_of(peak, total)

    num_units = counts_ref[0] * sizes.num_parts
    own, _ = divide(num_units - program + sizes.num_programs - 1, sizes.num_programs)
    lax.fori_loop(0, own, attend_unit, None)


def _scaled(
    products: jax.Array, keys: Stages, pool: Pool, stage: jax.Array, head: jax.Array, sizes: _Sizes
) -> jax.Array:
    """Return logits in units of the logarithm to base 2."""
    factor = sizes.scale * LOG2_E
    if sizes.soft_cap is not None:
        factor *= 2 / sizes.soft_cap
    if sizes.keys.scaling == "token":
        scales = plgpu.load(keys.scale.at[stage], layout=OF_ROWS, optimized=False)
        logits = products * wide(scales * factor, sizes.rows)
    else:
        logits = products * (pool.scale[head] * factor if sizes.keys.scaling == "head" else factor)
    if sizes.soft_cap is None:
        return logits
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's tanh has 11 bits.
    return (1 - 2 / (1 + jnp.exp2(logits))) * (sizes.soft_cap * LOG2_E)


def _merged(first: _Attended, second: _Attended) -> _Attended:
    """Return the values and the log-sum-exp of two parts of what queries see."""
    log_sum = jnp.logaddexp(first[1], second[1])
    shift = jnp.where(log_sum == -jnp.inf, 0.0, log_sum)
    one, other = (out * jnp.exp(own - shift)[..., None] for out, own in (first, second))
    return one + other, log_sum


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
