"""Paged attention of long steps for NVIDIA GPUs of the Hopper generation, on Pallas' Mosaic GPU backend.

Query rows, the heads of new tokens that share a KV head, are the M of `query @ keys.T` and of
`weights @ values`, 64 of a warp group; two warp groups of a program read the same blocks of 64 tokens, whose
pages TMA brings a few blocks ahead. A program walks from the first token that its first query sees to its
last query, in one online softmax along the rows; blocks that all its rows see wholly are not masked. Nothing
is partial.

Grid: a program for each sequence, KV head and tile of rows, the last tiles first, which walk farthest; those
past a sequence's tokens write zeros. A row's bits depend neither on the batch nor on how a step is cut.
Shared memory: the tile's query, blocks of keys and values, the weights of one. One warp group brings keys,
the other values, each into the place of a block that both are past; entries of 4 and 8 bits are converted by
the one that brought them. Logits, softmax and sums are float32; queries and weights are rounded to the dtype
that they are multiplied in. What is dead is treated as in `pallas_gpu`, which calls this.
"""

import functools
from collections.abc import Callable
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
from kernels_pallas.hopper.blocks import BLOCK_TOKENS, NO_POSITION, Walk, slots_of_block
from kernels_pallas.hopper.forms import Form, form_of
from kernels_pallas.hopper.stages import (
    Pool,
    Stages,
    copy_piece,
    load_scales,
    numbers_of,
    pool_of,
    stages,
    stored_bytes,
    write_numbers,
    zero_dead,
)
from kernels_pallas.paged_attention.contract import PagedArguments, Stripe, Tiling

# Query rows of a warp group: the M of one wgmma.
_ROWS = 64
# Warp groups of a program at most: one waits for its weights while the other multiplies.
_MAX_GROUPS = 2
# Heads whose sums leave registers for what 4 and 8 bits are converted by.
_NARROW_DIM = 128
# Of shared memory: 227 KB but for barriers. Blocks that are enough to hide a copy's latency.
_SHARED_BYTES = 225 * 1024
_MAX_STAGES = 4


class _Sizes(NamedTuple):
    """Static sizes and options of a call.

    Attributes:
        head_dim: entries of a head.
        walk: of a sequence's pages.
        num_groups: warp groups of a program.
        num_stages: blocks of keys and values on their way or in use.
        keys: form of the keys.
        values: form of the values.
        scale: multiplies the logits.
        window: see `reference`.
        soft_cap: see `reference`.
        is_striped: whether the table is that of a stripe.
        is_interpreted: see `Tiling`.
    """

    head_dim: int
    walk: Walk
    num_groups: int
    num_stages: int
    keys: Form
    values: Form
    scale: float
    window: int | None
    soft_cap: float | None
    is_striped: bool
    is_interpreted: bool

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.num_groups * _ROWS

    @property
    def is_converted(self) -> bool:
        """Whether keys or values are converted in shared memory."""
        return self.keys.is_converted or self.values.is_converted


def takes(arguments: PagedArguments) -> bool:
    """Return whether a call that `pallas_gpu` does not refuse is one for this kernel.

    It is where a step has more than 16 tokens, but in heads of 192 and 256 that are converted.
    """
    forms = form_of(arguments.keys), form_of(arguments.values)
    is_wide = arguments.keys.head_dim > _NARROW_DIM
    is_long = arguments.query.shape[1] > splitting.PIECE_TOKENS
    return is_long and not (is_wide and any(form is None or form.is_converted for form in forms))


def attend(
    arguments: PagedArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " q_head"] | None,
    tiling: Tiling,
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.paged_attention` defines, of a call that the kernel `takes`.

    Where keys are scaled by runs of slots, what queries see of the pages: not of their own runs.
    """
    query, keys, values, table = arguments[:4]
    num_seqs, time, num_heads, head_dim = query.shape
    num_kv_heads, page_size = keys.data.shape[1], keys.page_size
    group = num_heads // num_kv_heads
    forms = form_of(keys), form_of(values)
    assert forms[0] is not None
    assert forms[1] is not None
    num_groups = min(_MAX_GROUPS, -(-time * group // _ROWS))
    sizes = _Sizes(
        head_dim=head_dim,
        walk=Walk(page_size, num_pages, table.shape[1]),
        num_groups=num_groups,
        num_stages=_num_stages(forms[0], forms[1], head_dim, num_groups),
        keys=forms[0],
        values=forms[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        is_striped=arguments.stripe is not None,
        is_interpreted=tiling.is_interpreted,
    )
    num_rows = -(-time * group // sizes.rows) * sizes.rows
    padding = num_rows - time * group

    # [seq, kv_head, time * group, ...]: the queries of one KV head are rows of one product.
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = sizes.keys.multiplied(rows.reshape(num_seqs, num_kv_heads, time * group, head_dim))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    of_heads = jnp.full(num_heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32) * LOG2_E
    of_rows = jnp.tile(of_heads.reshape(num_kv_heads, group), (1, time))
    of_rows = jnp.pad(of_rows, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    limits = splitting.limits(arguments.starts, arguments.lens, time=time, group=group, padding=padding)
    out, log_sum = plgpu.kernel(
        functools.partial(_attend_kernel, sizes),
        out_type=[
            jax.ShapeDtypeStruct(rows.shape, query.dtype),
            jax.ShapeDtypeStruct(rows.shape[:3], jnp.float32),
        ],
        scratch_types=[
            matrices((num_groups, _ROWS, head_dim), sizes.keys.dtype, sizes.keys.tile),
            *(stages(form, sizes.num_stages, sizes.walk.block_pages, head_dim) for form in forms if form),
            matrices((num_groups, _ROWS, BLOCK_TOKENS), sizes.values.dtype, sizes.values.tile or head_dim),
            plgpu.Barrier(num_barriers=num_groups),
            plgpu.Barrier(num_arrivals=num_groups, num_barriers=sizes.num_stages),
            plgpu.Barrier(num_arrivals=num_groups),
        ],
        grid=(num_seqs, num_kv_heads, num_rows // sizes.rows),
        grid_names=("seq", "kv_head", "tile"),
        num_threads=num_groups,
        thread_name="group",
        # Rows lie in a warp: none of their sums goes through shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="jkv_paged_prefill",
    )(rows, pool_of(keys), pool_of(values), table, limits, of_rows, *_plan(arguments, limits, sizes, group))

    def regroup(x: jax.Array) -> jax.Array:
        """Turn `[seq, kv_head, row, ...]` into `[seq, time, q_head, ...]`."""
        x = x[:, :, : time * group].reshape(num_seqs, num_kv_heads, time, group, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(num_seqs, time, num_heads, *x.shape[4:])

    return sizes.values.ordered(regroup(out)), regroup(log_sum)


def _num_stages(keys: Form, values: Form, head_dim: int, num_groups: int) -> int:
    """Return the blocks that shared memory has room for."""
    rows_bytes = num_groups * _ROWS * (head_dim * keys.dtype.itemsize + BLOCK_TOKENS * values.dtype.itemsize)
    numbers = (BLOCK_TOKENS * head_dim * form.dtype.itemsize for form in (keys, values) if form.is_converted)
    stored = (stored_bytes(form, head_dim) for form in (keys, values))
    return min(_MAX_STAGES, (_SHARED_BYTES - rows_bytes - sum(numbers)) // sum(stored))


def _plan(
    arguments: PagedArguments, limits: Int[Array, "seq row"], sizes: _Sizes, group: int
) -> tuple[Int[Array, "seq tile 6"], Int[Array, " count"]]:
    """Return what each tile has to do, and what it is to know of the layer.

    Of a tile, its first block, blocks, the first token that a query sees, tokens held, and the first and last
    position that all its rows see, the last exclusive; the layer's page 0, and the stripe's stride and offset
    where there is one.
    """
    stripe, walk, starts, lens = arguments.stripe, sizes.walk, arguments.starts, arguments.lens
    stride = 1 if stripe is None else stripe.stride
    least = limits[:, :: sizes.rows]
    starts, ends = (jnp.broadcast_to(x[:, None], least.shape) for x in (starts, starts + lens))
    clear_end = _ends(least, sizes.keys)
    # Of the last row that is a query.
    last_rows = jnp.arange(1, least.shape[1] + 1, dtype=jnp.int32) * sizes.rows - 1
    most = jnp.minimum(starts + (last_rows // group + 1)[None], ends)
    # A table names the latest pages: those before are written over.
    first_seen = jnp.maximum(ends - walk.table_width * walk.page_size * stride, 0)
    clear_from = first_seen
    if sizes.window is not None:
        first_seen = jnp.maximum(first_seen, least - sizes.window)
        clear_from = jnp.maximum(first_seen, most - sizes.window)
    first_slot, end_slot = splitting.slots_between(first_seen, most, walk.page_size, stripe)
    first_block = first_slot // BLOCK_TOKENS
    num_blocks = jnp.where(least > 0, jnp.maximum(-(-end_slot // BLOCK_TOKENS) - first_block, 0), 0)
    work = (first_block, num_blocks, first_seen, ends, clear_from, clear_end)
    counts = [jnp.asarray(x, jnp.int32) for x in (arguments.page_offset, *(stripe or ()))]
    return jnp.stack(work, axis=-1).astype(jnp.int32), jnp.stack(counts)


def _attend_kernel(
    sizes: _Sizes,
    rows_ref,  # multiplied as keys are [seq, kv_head, row, head_dim]  GMEM
    keys_pool: Pool,  # GMEM
    values_pool: Pool,  # GMEM
    table_ref,  # int32 [seq, max_pages]                               GMEM
    limits_ref,  # int32 [seq, row]                                    GMEM
    sinks_ref,  # float32 [kv_head, row]                               GMEM
    work_ref,  # int32 [seq, tile, 6]                                  GMEM
    counts_ref,  # int32 [1], or [3] with a stripe                     GMEM
    out_ref,  # the query's dtype [seq, kv_head, row, head_dim]        GMEM
    log_sum_ref,  # float32 [seq, kv_head, row]                        GMEM
    query_ref,  # multiplied as keys are [group, row, head_dim]        SMEM
    keys: Stages,  # SMEM
    values: Stages,  # SMEM
    weights_ref,  # multiplied as values are [group, row, slot]        SMEM
    query_barriers,  # [group], passed when its query is there
    passed,  # [stage], passed when all groups are past a block
    told,  # passed when all groups have told what they had to
):
    seq, head, group = (lax.axis_index(name) for name in ("seq", "kv_head", "group"))
    # The last tiles walk farthest, and are begun first.
    tile = work_ref.shape[1] - 1 - lax.axis_index("tile")
    first_block, num_blocks, first_seen, end, clear_from, clear_end = (
        work_ref[seq, tile, i] for i in range(6)
    )
    page_offset = counts_ref[0]
    num_stages, walk = sizes.num_stages, sizes.walk
    # Blocks that a warp group lets the other be behind.
    lag = sizes.num_groups - 1
    block_rows = pl.ds(tile * sizes.rows + group * _ROWS, _ROWS)

    def apart(of_keys: Callable[[], None], of_values: Callable[[], None]) -> None:
        """Let one warp group do what is done for keys, and the other what is done for values."""
        if sizes.num_groups > 1:
            lax.cond(group == 0, of_keys, of_values)
        else:
            of_keys()
            of_values()

    def tell() -> None:
        """Wait until all warp groups have written what the others are to read."""
        if sizes.num_groups > 1:
            plgpu.barrier_arrive(told)
            plgpu.barrier_wait(told)

    def fetch(block: jax.Array, stage: jax.Array | int, entries: tuple[jax.Array, ...]) -> None:
        """Start the copies of a block's keys, or of its values."""
        num_slots = min(walk.page_size, BLOCK_TOKENS)

        def copy(pool: Pool, blocks: Stages, form: Form) -> None:
            for piece in walk.pieces(block, entries, page_offset, num_slots):
                copy_piece(pool, blocks, form, piece, num_slots, head, stage)

        apart(
            functools.partial(copy, keys_pool, keys, sizes.keys),
            functools.partial(copy, values_pool, values, sizes.values),
        )

    read_table = functools.partial(walk.read_table, table_ref, seq)
    ahead = []
    for stage in range(num_stages):
        entries = read_table(first_block + stage)
        ahead.append(walk.named(entries))
        pl.when(stage < num_blocks)(functools.partial(fetch, first_block + stage, stage, entries))
    plgpu.copy_gmem_to_smem(rows_ref.at[seq, head, block_rows], query_ref.at[group], query_barriers.at[group])
    limits = plgpu.load(limits_ref.at[seq, block_rows], layout=OF_ROWS, optimized=False)
    ends = _ends(limits, sizes.keys)
    sinks = plgpu.load(sinks_ref.at[head, block_rows], layout=OF_ROWS, optimized=False)
    plgpu.barrier_wait(query_barriers.at[group])

    def attend_block(index: jax.Array, carry: Any) -> Any:
        """Take a block of keys and values into the sums of an online softmax."""
        ahead, entries, peak, total, sums = carry
        block, stage = first_block + index, lax.rem(index, jnp.int32(num_stages))
        # Zero, though no compiler knows: it would keep addresses, and what lies there, in registers that
        # sums need.
        zero = block >> 31 if sizes.head_dim > _NARROW_DIM else 0
        stripe = Stripe(counts_ref[1 + zero], counts_ref[2 + zero]) if sizes.is_striped else None
        held = block, ahead[0], first_seen, end, stripe
        is_whole = walk.is_whole(*held)

        of_keys = numbers_of(sizes.keys, keys, stage)
        of_values = numbers_of(sizes.values, values, stage)

        def positions(layout: Any) -> jax.Array:
            return walk.live_positions(slots_of_block(BLOCK_TOKENS, layout), *held)

        def zero_the_dead() -> None:
            @pl.when(jnp.logical_not(is_whole))
            def _zero_the_dead() -> None:
                @pl.when(group == lag)
                def _zero() -> None:
                    zero_dead(of_values, positions(OF_ROWS) < NO_POSITION)
                    if not sizes.is_converted:
                        plgpu.commit_smem()

                if not sizes.is_converted:
                    tell()

        plgpu.barrier_wait(keys.barriers.at[stage])
        if sizes.is_converted:
            plgpu.barrier_wait(values.barriers.at[stage])
            write = functools.partial(write_numbers, stage=stage, is_interpreted=sizes.is_interpreted)
            apart(functools.partial(write, sizes.keys, keys), functools.partial(write, sizes.values, values))
            zero_the_dead()
            plgpu.commit_smem()
            tell()
        logits = product((query_ref.at[group + zero], of_keys.transpose((1, 0))))
        logits = _scaled(logits, keys, keys_pool, stage, head, sizes)
        scales = log_scales = None
        if sizes.values.scaling == "token":
            is_live = positions(OF_COLUMNS) < NO_POSITION
            scales = load_scales(values.scale.at[stage], is_live, OF_COLUMNS)
            if sizes.values.is_narrow:
                log_scales = jnp.log2(scales)
                logits += tall(log_scales, _ROWS)

        def masked(logits: jax.Array) -> jax.Array:
            of_slots = tall(positions(OF_COLUMNS), _ROWS)
            is_seen = of_slots < wide(ends, BLOCK_TOKENS)
            if sizes.window is not None:
                is_seen &= of_slots >= wide(limits - sizes.window, BLOCK_TOKENS)
            return jnp.where(is_seen, logits, -jnp.inf)

        is_clear = walk.is_whole(block, ahead[0], clear_from, clear_end, stripe)
        logits = lax.cond(is_clear, lambda logits: logits, masked, logits)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp2(logits - wide(shift, BLOCK_TOKENS))
        keep = jnp.exp2(peak - shift)
        scaled = unscaled = weights
        if log_scales is not None:
            unscaled = weights * tall(jnp.exp2(-log_scales), _ROWS)
        elif scales is not None:
            scaled = weights * tall(scales, _ROWS)
        total = total * keep + unscaled.sum(axis=1)
        weights_ref.at[group + zero][...] = scaled.astype(weights_ref.dtype)
        if not sizes.is_converted:
            plgpu.barrier_wait(values.barriers.at[stage])
            zero_the_dead()
        plgpu.commit_smem()

        # Into the place of a block that this warp group is past; the other is, too, or soon. Alone, it takes
        # this block's place, whose values are yet to be multiplied.
        def fetch_later() -> None:
            place = lax.rem(index - lag + num_stages, jnp.int32(num_stages))
            if lag:
                plgpu.barrier_wait(passed.at[place])
            fetch(block - lag + num_stages, place, entries)

        is_early, is_asked = lag > 0, (index >= lag) & (index - lag + num_stages < num_blocks)
        if is_early:
            pl.when(is_asked)(fetch_later)
        sums = plus_product(
            sums * wide(keep, sizes.head_dim),
            weights_ref.at[group + zero],
            of_values,
            in_place=not sizes.is_interpreted,
        )
        if not is_early:
            pl.when(is_asked)(fetch_later)
        if lag:
            # Where a block is to take this one's place.
            pl.when(index + num_stages < num_blocks)(lambda: plgpu.barrier_arrive(passed.at[stage]))
        if sizes.is_converted:
            tell()
        # The entries of the block after this one are on their way while it is attended.
        later = read_table(block - lag + num_stages + 1)
        return (*ahead[1:], walk.named(entries)), later, new_peak, total, sums

    carry = (
        tuple(ahead[: num_stages - lag]),
        read_table(first_block + num_stages - lag),
        sinks,
        jnp.where(sinks == -jnp.inf, 0.0, 1.0),
        full((_ROWS, sizes.head_dim), 0.0, plgpu.Layout.WGMMA),
    )
    _, _, peak, total, sums = lax.fori_loop(0, num_blocks, attend_block, carry)
    is_query = limits > 0
    total = jnp.where(is_query, total, 0.0)
    share = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    if sizes.values.scaling == "head":
        share = share * values_pool.scale[head]
    # Before they are rounded, to what float16 holds.
    share = share / sizes.values.unit
    out = jnp.where(wide(is_query, sizes.head_dim), sums * wide(share, sizes.head_dim), 0.0)
    out_ref.at[seq, head, block_rows][...] = out.astype(out_ref.dtype)
    log_sum_ref.at[seq, head, block_rows][...] = log_sum_of(peak, total)


def _ends(limits: jax.Array, keys: Form) -> jax.Array:
    """Return the first position that is not seen in the pages: of the own run, where runs are of slots."""
    return (limits - 1) & -keys.run_slots if keys.scaling == "slots" else limits


def _scaled(
    products: jax.Array, keys: Stages, pool: Pool, stage: jax.Array, head: jax.Array, sizes: _Sizes
) -> jax.Array:
    """Return logits in units of the logarithm to base 2."""
    factor = sizes.scale * LOG2_E
    if sizes.soft_cap is not None:
        factor *= 2 / sizes.soft_cap
    if sizes.keys.scaling == "token":
        scales = plgpu.load(keys.scale.at[stage], layout=OF_COLUMNS, optimized=False)
        logits = products * tall(scales * factor, _ROWS)
    else:
        logits = products * (pool.scale[head] * factor if sizes.keys.scaling == "head" else factor)
    if sizes.soft_cap is None:
        return logits
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's tanh has 11 bits, and a division takes registers.
    root = lax.rsqrt(1 + jnp.exp2(logits))
    return (1 - 2 * root * root) * (sizes.soft_cap * LOG2_E)
