"""Absorbed latent attention for NVIDIA GPUs of the Hopper generation, on Pallas' Mosaic GPU backend.

Query heads are rows, 64 of them a program, of products with latents: `query @ latents.T` and
`weights @ latents`. A block of 64 latents is loaded once for both. The sums, 64 rows of 512 channels, are
more than one warp group's registers hold, so two share a program: each takes the logits of one half of a
block's slots, and sums one half of the channels over all of them. Between the two they tell each other their
logits' maxima and their weights, through shared memory.

Pieces of steps, splits, their scheduler and the kernel that merges them are those of
`kernels_pallas.hopper.splits`. Grid: half of `Tiling.num_programs`, since shared memory has room for one
program a multiprocessor: the query, two blocks, and the weights of one. Of latents in 8 or 4 bits a block is
converted, by each warp group the channels that it sums: of 4-bit latents these are one half of every byte.
Logits, softmax and sums are float32; queries and weights are rounded to the dtype that they are
multiplied in, as tensor cores ask: that of `hopper.forms`, and of rotated parts their own.

An entry of the table that names no page is read as the layer's first page and masked, as are dead slots of a
page; they are zeroed before they are summed, since 0 * NaN is NaN.
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
    plus_product,
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
    convert,
    convert_half,
    copy_scales,
    load_scales,
    zero_dead,
)
from kernels_pallas.latent_attention.contract import LatentArguments
from kernels_pallas.paged_attention.contract import Stripe, Tiling, check_rows

# Query rows of a program: the M of one wgmma.
_ROWS = 64
# Warp groups of a program, and the slots of a block that each takes the logits of.
_GROUPS = 2
_GROUP_TOKENS = BLOCK_TOKENS // _GROUPS
# Blocks of 72 KB, one in use and one on its way: with a query, as large, they fill shared memory.
_STAGES = 2
# Channels of a warp group are a multiple.
_CHANNELS = 64
_MAX_LATENT_DIM, _ROPE_DIM = 512, 64
# Of `Tiling.split_tokens`: a row's partial results are four times as wide as those of a head.
_SPLITS_JOINED = 2


class _Blocks(NamedTuple):
    """Latents and their rotated parts in shared memory.

    Attributes:
        latents: blocks on their way or in use, `[stage, channel's group, slot, channel]`; of bytes of two
            channels, half of them for each group.
        numbers: the one in use, converted, `[channel's group, slot, channel]`.
        scale: of tokens, `[stage, slot's group, slot]`, or of runs, `[stage, channel's group, slot, run]`.
        zero: zero points of runs.
        ropes: as `latents`, of the rotated parts, `[stage, slot's group, slot, channel]`.
        latent_barriers: `[stage, channel's group]`, passed when those channels of a block, or half the bytes
            of two channels, are there, and scales and zero points of their runs.
        rope_barriers: `[stage, slot's group]`, passed when rotated parts and scales of those slots are.
    """

    latents: Any
    numbers: Any
    scale: Any
    zero: Any
    ropes: Any
    latent_barriers: Any
    rope_barriers: Any


class _Shared(NamedTuple):
    """What the warp groups of a program share.

    Attributes:
        query: `[channel's group, row, channel]`.
        rope_query: `[row, channel]`.
        blocks: of tokens.
        weights: of a block's slots, `[slot, row]`.
        of_rows: maxima of logits of a block, and sums of weights of a split, that each group has taken,
            `[maximum or sum, group, row]`.
        query_barrier: passed when the query is there.
        told: passed when all groups have told what they had to: peaks, weights and totals.
    """

    query: Any
    rope_query: Any
    blocks: _Blocks
    weights: Any
    of_rows: Any
    query_barrier: Any
    told: Any


class _Sizes(NamedTuple):
    """Static sizes and options of a call.

    Attributes:
        latent_dim: entries of a latent.
        walk: of a sequence's pages.
        cut: of a sequence into splits.
        row_blocks: blocks of 64 rows that a sequence's queries take.
        num_programs: programs of the kernel.
        form: of latents.
        scale: multiplies the logits.
        window: see `reference`.
        is_striped: whether the table is that of a stripe.
        is_interpreted: see `Tiling`.
    """

    latent_dim: int
    walk: Walk
    cut: Cut
    row_blocks: int
    num_programs: int
    form: Form
    scale: float
    window: int | None
    is_striped: bool
    is_interpreted: bool

    @property
    def is_tight(self) -> bool:
        """Whether registers are few: entries are converted, and a block has more than two pages.

        Of a stripe, positions take more registers to work out again than slots that are kept.
        """
        return self.form.is_converted and self.walk.block_pages > 2 and not self.is_striped

    @property
    def channels(self) -> int:
        """Channels that a warp group sums."""
        return self.latent_dim // _GROUPS


def refusal(arguments: LatentArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does."""
    latents, ropes = arguments.latents, arguments.ropes
    if arguments.up is not None:
        return "the GPU kernel attends to latents as they are, got up-projections of heads; use 'xla'"
    if (reason := refusal_of_form(latents)) is not None:
        return reason
    form, rope_form = form_of(latents), form_of(ropes)
    if rope_form is None or rope_form.is_converted:
        stored = f"{ropes.entry} in {ropes.data.dtype}"
        return f"the GPU kernel takes rotated parts in bfloat16 and float16, got {stored}; use 'xla'"
    dims = latents.head_dim, ropes.head_dim
    if dims[0] % (_GROUPS * _CHANNELS) or dims[0] > _MAX_LATENT_DIM or dims[1] != _ROPE_DIM:
        return (
            f"the GPU kernel takes latents of a multiple of {_GROUPS * _CHANNELS} entries up to "
            f"{_MAX_LATENT_DIM} with rotated parts of {_ROPE_DIM}, got {dims[0]} and {dims[1]}; use 'xla'"
        )
    if form is not None and form.has_runs and dims[0] != _MAX_LATENT_DIM:
        # Scales of half of a slot's runs are then not the 16 bytes that a copy takes at least.
        return f"the GPU kernel takes 4-bit latents of {_MAX_LATENT_DIM} entries, got {dims[0]}; use 'xla'"
    page_size = latents.page_size
    rows = tuple(pages.data.shape[2:] for pages in (latents, ropes))
    if rows != (latents.data_shape, ropes.data_shape):
        return f"the GPU kernel takes pools of layout 'plain', got pages of {page_size} slots in rows {rows}"
    if page_size == 8:
        # Eight entries of the table for a block take more registers than the sums leave.
        return "the GPU kernel of latents takes pages of 16 tokens or more, got 8; use 'xla'"
    if (reason := refusal_of_page_size(page_size)) is not None:
        return reason
    cut = _cut(arguments, tiling or Tiling())
    pieces = jax.eval_shape(_in_pieces, arguments)
    numbers = _row_blocks(pieces) * _ROWS * dims[0]
    return splitting.refusal_of_partial_results(cut, pieces.query.shape[0], numbers)


def latent_attention(
    arguments: LatentArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "seq time q_head latent"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.latent_attention` defines; logits, softmax and sums are float32.

    Raises:
        ValueError: `refusal` says why, or rows are not the sequences'.
    """
    tiling = tiling or Tiling()
    check_rows(arguments)
    if (reason := refusal(arguments, tiling)) is not None:
        raise ValueError(reason)
    pieces, form, rope_form = _in_pieces(arguments), form_of(arguments.latents), form_of(arguments.ropes)
    assert form is not None
    assert rope_form is not None
    query, rope_query, latents, ropes, table = pieces[:5]
    num_seqs, time, num_heads, latent_dim = query.shape
    cut, row_blocks = _cut(arguments, tiling), _row_blocks(pieces)
    # One program fills a multiprocessor.
    num_programs = min(max(1, tiling.num_programs // 2), num_seqs * cut.max_splits * row_blocks)
    walk = Walk(latents.page_size, num_pages, table.shape[1])
    sizes = _Sizes(
        latent_dim,
        walk,
        cut,
        row_blocks,
        num_programs,
        form,
        scale,
        window,
        is_striped=arguments.stripe is not None,
        is_interpreted=tiling.is_interpreted,
    )
    padding = row_blocks * _ROWS - time * num_heads
    splits = splitting.plan(
        *pieces[5:8],
        cut,
        arguments.stripe,
        time=time,
        group=num_heads,
        padding=padding,
        window=window,
        held=splitting.held_of_pieces(arguments),
    )

    def rows_of(query: jax.Array) -> jax.Array:
        rows = query.reshape(num_seqs, time * num_heads, -1)
        return jnp.pad(rows, ((0, 0), (0, padding), (0, 0)))

    queries = rows_of(form.multiplied(query)), rows_of(rope_form.multiplied(rope_query))
    # One KV head; the scale of a head has no page.
    pool = Pool(latents.data, latents.scale, latents.zero)
    pool = jax.tree.map(lambda array: array.squeeze(1) if array.ndim > 1 else array, pool)
    partial = _attend(*queries, pool, ropes.data.squeeze(1), table, splits, sizes)
    merged = splitting.merge(*partial, splits.of_sequences, query_axis=0, name="jkv_latent_attention_merge")

    def regroup(x: jax.Array) -> jax.Array:
        """Turn `[seq, part, row, ...]` into `[seq, time, q_head, ...]`."""
        x = x.reshape(num_seqs, row_blocks * _ROWS, *x.shape[3:])[:, : time * num_heads]
        return x.reshape(num_seqs, time, num_heads, *x.shape[2:])

    out, log_sum = (splitting.joined(regroup(x), arguments.query.shape[1]) for x in merged)
    return form.summed(out).astype(query.dtype), log_sum


def _in_pieces(arguments: LatentArguments) -> LatentArguments:
    return splitting.in_pieces(arguments, "query", "rope_query")


def _row_blocks(pieces: LatentArguments) -> int:
    return -(-pieces.query.shape[1] * pieces.query.shape[2] // _ROWS)


def _cut(arguments: LatentArguments, tiling: Tiling) -> Cut:
    max_pages, page_size = arguments.page_table.shape[1], arguments.latents.page_size
    split_tokens = tiling.split_tokens * _SPLITS_JOINED
    return splitting.cut(max_pages, page_size, split_tokens, arguments.query.shape[1])


def _attend(
    query: Float[Array, "seq row latent"],
    rope_query: Float[Array, "seq row rope"],
    latents: Pool,
    ropes: Float[Array, "page slot rope"],
    table: Int[Array, "seq max_pages"],
    splits: Splits,
    sizes: _Sizes,
) -> tuple[Float[Array, "split part block_row latent"], Float[Array, "split part block_row"]]:
    """Return each split's attended latents and log-sum-exp; undefined past the last split."""
    parts = splits.work.shape[0], sizes.row_blocks, _ROWS
    form, rope_dtype = sizes.form, ropes.dtype
    block = (_GROUPS, BLOCK_TOKENS, sizes.channels)
    scale = zero = None
    if form.scaling == "token":
        scale = plgpu.SMEM((_STAGES, _GROUPS, _GROUP_TOKENS), jnp.float32)
    if form.has_runs:
        runs = form.run_scales // _GROUPS
        scale = zero = plgpu.SMEM((_STAGES, _GROUPS, BLOCK_TOKENS, runs), jnp.bfloat16)
    pages, group_pages = sizes.walk.block_pages, max(1, _GROUP_TOKENS // sizes.walk.page_size)
    shared = _Shared(
        query=matrices((_GROUPS, _ROWS, sizes.channels), form.dtype, form.tile),
        rope_query=matrices((_ROWS, _ROPE_DIM), rope_dtype),
        blocks=_Blocks(
            latents=matrices(
                (_STAGES, _GROUPS, BLOCK_TOKENS, latents.data.shape[-1] // _GROUPS), form.stored, form.tile
            ),
            numbers=matrices(block, form.dtype, form.tile) if form.is_converted else None,
            scale=scale,
            zero=zero,
            ropes=matrices((_STAGES, _GROUPS, _GROUP_TOKENS, _ROPE_DIM), rope_dtype),
            latent_barriers=plgpu.Barrier(
                num_arrivals=pages * (3 if form.has_runs else 1), num_barriers=(_STAGES, _GROUPS)
            ),
            rope_barriers=plgpu.Barrier(
                num_arrivals=group_pages * (2 if form.scaling == "token" else 1),
                num_barriers=(_STAGES, _GROUPS),
            ),
        ),
        weights=matrices((BLOCK_TOKENS, _ROWS), form.dtype, form.tile),
        of_rows=plgpu.SMEM((2, _GROUPS, _ROWS), jnp.float32),
        query_barrier=plgpu.Barrier(num_arrivals=_GROUPS + 1),
        told=plgpu.Barrier(num_arrivals=_GROUPS),
    )

    # [..., group, channel]: where a warp group's channels begin is then known to be a multiple of a tile.
    def by_group(array: jax.Array) -> jax.Array:
        return array.reshape(*array.shape[:-1], _GROUPS, -1)

    out, log_sum = plgpu.kernel(
        functools.partial(_attend_kernel, sizes),
        out_type=[
            jax.ShapeDtypeStruct((*parts, sizes.latent_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        scratch_types=[shared],
        grid=(sizes.num_programs,),
        grid_names=("program",),
        num_threads=_GROUPS,
        thread_name="group",
        # Rows lie in a warp: none of their sums goes through shared memory.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        kernel_name="jkv_latent_attention",
    )(
        by_group(query),
        rope_query,
        jax.tree.map(by_group, latents) if form.has_runs else latents._replace(data=by_group(latents.data)),
        ropes,
        table,
        splits.limits,
        splits.work,
        splits.counts,
    )
    return out, log_sum


def _attend_kernel(
    sizes: _Sizes,
    rows_ref,  # multiplied as latents are [seq, row, group, channel]  GMEM
    rope_rows_ref,  # the dtype of rotated parts [seq, row, rope]  GMEM
    pool: Pool,  # [page, slot, group, channel]            GMEM
    ropes_ref,  # [page, slot, rope]                       GMEM
    table_ref,  # int32 [seq, max_pages]                   GMEM
    limits_ref,  # int32 [seq, row]                        GMEM
    work_ref,  # int32 [split, 5]                          GMEM
    counts_ref,  # int32 [2], or [4] with a stripe          GMEM
    out_ref,  # float32 [split, part, row, latent]         GMEM
    log_sum_ref,  # float32 [split, part, row]             GMEM
    shared: _Shared,  # SMEM
):
    program, group = lax.axis_index("program"), lax.axis_index("group")
    layer_offset = counts_ref[1]
    blocks, channels = shared.blocks, sizes.channels
    own_slots = pl.ds(group * _GROUP_TOKENS, _GROUP_TOKENS)

    def exchange(which: int, own: jax.Array) -> jax.Array:
        """Tell the other warp group a vector of rows, and return its own."""
        shared.of_rows.at[which, group][...] = own
        tell()
        return plgpu.load(shared.of_rows.at[which, 1 - group], layout=OF_ROWS, optimized=False)

    def tell() -> None:
        """Wait until both warp groups have written what the other is to read."""
        plgpu.barrier_arrive(shared.told)
        plgpu.barrier_wait(shared.told)

    def attend_unit(index: jax.Array, _: None) -> None:
        """Attend from one block of query rows to one split."""
        split, part = divide(program + index * sizes.num_programs, sizes.row_blocks)
        seq, first_block, num_blocks, first_seen, end = (work_ref[split, i] for i in range(5))
        rows = pl.ds(part * _ROWS, _ROWS)
        # Both warp groups are past their last logits of the unit before.
        plgpu.copy_gmem_to_smem(rows_ref.at[seq, rows, group], shared.query.at[group], shared.query_barrier)

        @pl.when(group == 0)
        def _fetch_rope_query() -> None:
            plgpu.copy_gmem_to_smem(rope_rows_ref.at[seq, rows], shared.rope_query, shared.query_barrier)

        def fetch(block: jax.Array, stage: jax.Array | int, entries: tuple[jax.Array, ...]) -> None:
            """Start the copies of the channels that this warp group sums, and of the rest of its slots."""
            num_slots = min(sizes.walk.page_size, BLOCK_TOKENS)
            page_offset = counts_ref[1 + (block >> 31)] if sizes.is_tight else layer_offset
            for piece in sizes.walk.pieces(block, entries, page_offset, num_slots):
                plgpu.copy_gmem_to_smem(
                    pool.data.at[piece.page, pl.ds(piece.slot, num_slots), group],
                    blocks.latents.at[stage, group, pl.ds(piece.place, num_slots)],
                    blocks.latent_barriers.at[stage, group],
                )
                for scales_ref, own_ref in ((pool.scale, blocks.scale), (pool.zero, blocks.zero)):
                    if sizes.form.has_runs:
                        plgpu.copy_gmem_to_smem(
                            scales_ref.at[piece.page, pl.ds(piece.slot, num_slots), group],
                            own_ref.at[stage, group, pl.ds(piece.place, num_slots)],
                            blocks.latent_barriers.at[stage, group],
                        )
            num_slots = min(num_slots, _GROUP_TOKENS)
            for piece in sizes.walk.pieces(block, entries, page_offset, num_slots):
                owner, slot = divmod(piece.place, _GROUP_TOKENS)

                @pl.when(group == owner)
                def _fetch_rope(piece=piece, owner=owner, slot=slot) -> None:
                    source = piece.page, pl.ds(piece.slot, num_slots)
                    target = stage, owner, pl.ds(slot, num_slots)
                    barrier = blocks.rope_barriers.at[stage, owner]
                    plgpu.copy_gmem_to_smem(ropes_ref.at[*source], blocks.ropes.at[*target], barrier)
                    if sizes.form.scaling == "token":
                        copy_scales(pool.scale.at[*source], blocks.scale.at[*target], barrier)

        read_table = functools.partial(sizes.walk.read_table, table_ref, seq)
        entries = read_table(first_block)
        fetch(first_block, 0, entries)
        limits = plgpu.load(limits_ref.at[seq, rows], layout=OF_ROWS, optimized=False)
        plgpu.barrier_wait(shared.query_barrier)

        def attend_block(index: jax.Array, carry: Any) -> Any:
            """Take a block of latents into the sums of an online softmax."""
            named, entries, peak, total, sums = carry
            block, (_, stage) = first_block + index, divide(index, _STAGES)
            # Zero, though no compiler knows: it would keep addresses, and what lies there, in registers that
            # sums need.
            zero = block >> 31
            # Slots, too, where that helps more than it costs.
            again = zero if sizes.is_tight else 0
            its_slots = pl.ds((group + again) * _GROUP_TOKENS, _GROUP_TOKENS)
            # The next block takes the place of the one before this, which this warp group has summed, and of
            # which both have taken the logits.
            pl.when(index + 1 < num_blocks)(functools.partial(fetch, block + 1, 1 - stage, entries))
            numbers = in_use(stage, group + zero)
            stripe = Stripe(counts_ref[2 + zero], counts_ref[3 + zero]) if sizes.is_striped else None
            held = block, named, first_seen, end, stripe
            slots = slots_of_block(_GROUP_TOKENS, OF_COLUMNS) + (group + again) * _GROUP_TOKENS
            positions = sizes.walk.live_positions(slots, *held)
            plgpu.barrier_wait(blocks.rope_barriers.at[stage, group])
            rope_factors = shared.rope_query, blocks.ropes.at[stage, group].transpose((1, 0))
            factors = [
                (shared.query.at[i + zero], numbers.at[i + zero, its_slots].transpose((1, 0)))
                for i in range(_GROUPS)
            ]
            scales = None
            if sizes.form.scaling == "token":
                own_ref = blocks.scale.at[stage, group]
                scales = load_scales(own_ref, positions < NO_POSITION, OF_COLUMNS)
            if sizes.form.scaling in ("none", "channels"):
                logits = product(rope_factors, *factors)
            else:
                scale = pool.scale[0] if scales is None else tall(scales, _ROWS)
                logits = product(*factors) * scale
                logits = plus_product(logits, *rope_factors, in_place=not sizes.is_interpreted)
            is_seen = tall(positions, _ROWS) < wide(limits, _GROUP_TOKENS)
            if sizes.window is not None:
                is_seen &= tall(positions, _ROWS) >= wide(limits - sizes.window, _GROUP_TOKENS)
            logits = jnp.where(is_seen, logits * (sizes.scale * LOG2_E), -jnp.inf)
            if scales is not None and sizes.form.is_narrow:
                logits += tall(jnp.log2(scales), _ROWS)
            own_peak = logits.max(axis=1)
            new_peak = jnp.maximum(peak, jnp.maximum(own_peak, exchange(0, own_peak)))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp2(logits - wide(shift, _GROUP_TOKENS))
            keep = jnp.exp2(peak - shift)
            scaled = unscaled = weights
            if scales is not None and sizes.form.is_narrow:
                unscaled = weights * tall(1 / scales, _ROWS)
            elif scales is not None:
                scaled = weights * tall(scales, _ROWS)
            total = total * keep + unscaled.sum(axis=1)
            shared.weights.at[own_slots].transpose((1, 0))[...] = scaled.astype(shared.weights.dtype)

            # No logits are taken of this block any more: its dead slots may be zeroed.
            @pl.when(jnp.logical_not(sizes.walk.is_whole(*held)))
            def _zero_the_dead() -> None:
                slots = slots_of_block(BLOCK_TOKENS, OF_ROWS) + again
                zero_dead(numbers.at[group + zero], sizes.walk.live_positions(slots, *held) < NO_POSITION)

            plgpu.commit_smem()
            tell()
            sums = plus_product(
                sums * wide(keep, channels),
                shared.weights.transpose((1, 0)),
                numbers.at[group + zero],
                in_place=not sizes.is_interpreted,
            )
            # The entries of the block after the next are on their way while this one is attended.
            return sizes.walk.named(entries), read_table(block + 2), new_peak, total, sums

        def in_use(stage: jax.Array, own: jax.Array) -> Any:
            """Wait for a block, and return its latents as numbers that tensor cores take."""
            if sizes.form.is_converted and not sizes.form.has_runs:
                plgpu.barrier_wait(blocks.latent_barriers.at[stage, group])
                own_ref, numbers_ref = blocks.latents.at[stage, own], blocks.numbers.at[own]
                convert(sizes.form, own_ref, numbers_ref, is_interpreted=sizes.is_interpreted)
                plgpu.commit_smem()
                tell()
                return blocks.numbers
            for i in range(_GROUPS):
                plgpu.barrier_wait(blocks.latent_barriers.at[stage, i])
            if not sizes.form.has_runs:
                return blocks.latents.at[stage]
            convert_half(
                sizes.form,
                [blocks.latents.at[stage, i] for i in range(_GROUPS)],
                blocks.scale.at[stage, own],
                blocks.zero.at[stage, own],
                blocks.numbers.at[own],
                own,
                is_interpreted=sizes.is_interpreted,
            )
            plgpu.commit_smem()
            tell()
            return blocks.numbers

        empty = (
            full((_ROWS,), -jnp.inf, OF_ROWS),
            full((_ROWS,), 0.0, OF_ROWS),
            full((_ROWS, channels), 0.0, plgpu.Layout.WGMMA),
        )
        carry = (sizes.walk.named(entries), read_table(first_block + 1), *empty)
        _, _, peak, total, sums = lax.fori_loop(0, num_blocks, attend_block, carry)
        # Worked out again, though no compiler knows: it would keep them in registers that sums need.
        split, part = divide(program + (index + (num_blocks >> 31)) * sizes.num_programs, sizes.row_blocks)
        total += exchange(1, total)
        share = 1 / jnp.where(total == 0, 1.0, total)
        if sizes.form.scaling == "head":
            share = share * pool.scale[0]
        out_ref.at[split, part, :, pl.ds(group * channels, channels)][...] = sums * wide(share, channels)

        @pl.when(group == 0)
        def _write_log_sum() -> None:
            log_sum_ref.at[split, part][...] = log_sum_of(peak, total)

    num_units = counts_ref[0] * sizes.row_blocks
    own, _ = divide(num_units - program + sizes.num_programs - 1, sizes.num_programs)
    lax.fori_loop(0, own, attend_unit, None)
