"""Paged attention in plain JAX that reads only the pages in use.

An online softmax walks each sequence's pages in blocks of `Tiling.block_tokens`, from the first block that
its window reaches; the number of blocks is a traced value, so cost follows the longest live sequence and not
the capacity. One block of keys and values is gathered at a time, head by head, without a transpose, and stays
as it is stored: scales multiply queries, logits and probabilities. Where keys are scaled by runs of slots,
the walk begins with the sums over each query's own run, whose keys lie beside the pages as they were given.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, Stripe, Tiling, check_rows
from kernels_pallas.slots import as_matrices, slots_of

Rows = Float[Array, "seq kv_head row head_dim"]

# Float32 operands are multiplied as they are: by default TPUs round them to bfloat16, a whole pool at a time.
products = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


class Sums(NamedTuple):
    """An online softmax over the keys met so far.

    Attributes:
        peak: largest logit.
        total: sum of the exponentials of logits less `peak`.
        values: the values, weighted by these.
    """

    peak: Float[Array, "seq kv_head row"]
    total: Float[Array, "seq kv_head row"]
    values: Float[Array, "seq kv_head row value_dim"]


class Walk(NamedTuple):
    """How far each sequence's blocks of pages reach, and what of them each query row sees.

    Attributes:
        table: the layer's page table.
        page_offset: the pool's page that is page 0 of the layer.
        stripe: the pages that the table names, by which pages and blocks are counted here.
        first_page: first page of each sequence's first block.
        num_blocks: blocks of the longest walk.
        positions: of each query row; -1 sees nothing.
        limits: the first position that a query row does not see in the pages.
        begins: first position of each sequence that the table still names.
        ends: tokens that each sequence holds.
        num_pages: pages of the layer.
        page_size: slots of a page.
        block_pages: pages of a block.
        window: latest positions that a query sees; None is all.
    """

    table: Int[Array, "seq max_pages"]
    page_offset: Int[Array, ""] | int
    stripe: Stripe
    first_page: Int[Array, " seq"]
    num_blocks: Int[Array, ""]
    positions: Int[Array, "seq row"]
    limits: Int[Array, "seq row"]
    begins: Int[Array, " seq"]
    ends: Int[Array, " seq"]
    num_pages: int
    page_size: int
    block_pages: int
    window: int | None


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
        ValueError: rows are not the sequences', or there are none.
    """
    check_rows(arguments)
    query, keys, values = arguments[:3]
    num_seqs, time, num_heads, head_dim = query.shape
    num_kv_heads, page_size = keys.data.shape[1], keys.page_size
    group = num_heads // num_kv_heads
    walk = plan_walk(
        arguments.page_table,
        arguments.starts,
        arguments.lens,
        arguments.page_offset,
        arguments.stripe,
        row_tokens=(time, group),
        num_pages=num_pages,
        page_size=page_size,
        run_slots=keys.run_slots,
        window=window,
        tiling=tiling or Tiling(),
    )
    rows = head_rows(query * scale, num_kv_heads)

    def read(pages: Int[Array, "seq page"]) -> tuple[jax.Array, Pages]:
        return logits_of(rows, gather(keys, pages), soft_cap), gather(values, pages)

    sums = no_sums((num_seqs, num_kv_heads, time * group), head_dim)
    if arguments.recent is not None:
        sums = _own_runs(arguments, rows, walk.positions, num_pages, window=window, soft_cap=soft_cap)
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, time))[None]
        sums = _add_sink(sums, jnp.where((walk.positions >= 0)[:, None], sink, -jnp.inf))
    out, log_sum = finish(follow(walk, sums, read), time)
    return out.astype(query.dtype), log_sum


def attend_to_own_runs(
    arguments: PagedArguments, *, num_pages: int, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Return what each query attends to in its own run, whose keys are `recent`, and its log-sum-exp."""
    _, time, num_heads, _ = arguments.query.shape
    num_kv_heads = arguments.keys.data.shape[1]
    rows = head_rows(arguments.query.astype(jnp.float32) * scale, num_kv_heads)
    positions = _positions(arguments.starts, arguments.lens, time, num_heads // num_kv_heads)
    sums = _own_runs(arguments, rows, positions, num_pages, window=window, soft_cap=soft_cap)
    return finish(sums, time)


def plan_walk(
    table: Int[Array, "seq max_pages"],
    starts: Int[Array, " seq"],
    lens: Int[Array, " seq"],
    page_offset: Int[Array, ""] | int,
    stripe: Stripe | None,
    *,
    row_tokens: tuple[int, int],
    num_pages: int,
    page_size: int,
    run_slots: int | None = None,
    window: int | None,
    tiling: Tiling,
) -> Walk:
    """Plan the walk; blocks begin at multiples of their size, so that sums do not depend on the step.

    Args:
        table: see `PagedArguments`, as the next four.
        starts: see there.
        lens: see there.
        page_offset: see there.
        stripe: see there.
        row_tokens: tokens of a step, and query rows of each.
        num_pages: pages that one layer owns in the pool.
        page_size: slots of a page.
        run_slots: slots of a run, where a query's own run is not read from the pages.
        window: latest positions that a query sees, its own included.
        tiling: how the walk is cut.
    """
    time, group = row_tokens
    block_pages = max(1, min(tiling.block_tokens // page_size, table.shape[1]))
    stripe = stripe or Stripe(1, 0)
    ends = starts + lens
    begins = _first_kept(table, stripe, ends, page_size)
    first = begins if window is None else jnp.maximum(begins, starts - window + 1)
    first = stripe.pages_before(jax.lax.div(first, jnp.int32(page_size)))
    first = jax.lax.div(first, jnp.int32(block_pages))
    last = stripe.pages_before(jax.lax.div(ends + jnp.int32(page_size - 1), jnp.int32(page_size)))
    last = jax.lax.div(last + jnp.int32(block_pages - 1), jnp.int32(block_pages))
    positions = _positions(starts, lens, time, group)
    limits = positions + 1 if run_slots is None else positions - positions % run_slots
    return Walk(
        table=table,
        page_offset=page_offset,
        stripe=stripe,
        first_page=first * block_pages,
        num_blocks=jnp.max(jnp.where(lens > 0, last - first, 0)),
        positions=positions,
        limits=limits,
        begins=begins,
        ends=ends,
        num_pages=num_pages,
        page_size=page_size,
        block_pages=block_pages,
        window=window,
    )


def _positions(
    starts: Int[Array, " seq"], lens: Int[Array, " seq"], time: int, group: int
) -> Int[Array, "seq row"]:
    """Return the position of each query row; -1 of padding."""
    steps = jnp.arange(time, dtype=jnp.int32)[None]
    return jnp.repeat(jnp.where(steps < lens[:, None], starts[:, None] + steps, -1), group, axis=1)


def _first_kept(
    table: Int[Array, "seq max_pages"], stripe: Stripe, ends: Int[Array, " seq"], page_size: int
) -> Int[Array, " seq"]:
    """Return the first position that tables name: what is further back has been written over."""
    return jnp.maximum(ends - table.shape[1] * stripe.stride * page_size, 0)


def follow(walk: Walk, sums: Sums, read: Callable[[Int[Array, "seq page"]], tuple[jax.Array, Pages]]) -> Sums:
    """Take every block of the walk into the sums.

    Args:
        walk: which pages are read, and who sees them.
        sums: what is there before.
        read: gives a block's logits `[seq, kv_head, row, slot]` and values from the places of its pages.
    """
    block_pages, page_size = walk.block_pages, walk.page_size

    def step(i: jax.Array, sums: Sums) -> Sums:
        logical = walk.first_page[:, None] + i * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None]
        pages, is_page = _layer_pages(walk.table, logical, walk.num_pages, walk.page_offset)
        places = (logical * walk.stripe.stride + walk.stripe.offset)[..., None] * page_size
        places = (places + jnp.arange(page_size, dtype=jnp.int32)[None, None]).reshape(logical.shape[0], -1)
        is_live = jnp.repeat(is_page, page_size, axis=1)
        is_live &= (places >= walk.begins[:, None]) & (places < walk.ends[:, None])
        is_seen = is_live[:, None] & (places[:, None] < walk.limits[:, :, None])
        if walk.window is not None:
            is_seen &= places[:, None] > walk.positions[:, :, None] - walk.window
        logits, values = read(pages)
        return _add(sums, logits, is_seen, values, is_live)

    return jax.lax.fori_loop(jnp.int32(0), walk.num_blocks, step, sums)


def finish(
    sums: Sums, time: int
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
    """Return the attended values and the log-sum-exp, heads of a token together again."""
    peak, total, out = sums
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    log_sum = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1.0, total)))
    return _regroup(out, time), _regroup(log_sum, time)


def head_rows(query: Float[Array, "seq time q_head head_dim"], num_kv_heads: int) -> Rows:
    """Return queries as rows `time * group` of their KV head, so that each head is one product."""
    num_seqs, time, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).swapaxes(1, 2)
    return rows.reshape(num_seqs, num_kv_heads, time * group, head_dim)


def no_sums(rows: tuple[int, ...], value_dim: int) -> Sums:
    """Return the sums of `[seq, kv_head, row]` that have met no key."""
    return Sums(
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )


def _add(
    sums: Sums,
    logits: Float[Array, "seq kv_head row block"],
    is_seen: Bool[Array, "seq row block"],
    values: Pages,
    is_live: Bool[Array, "seq block"],
) -> Sums:
    """Take a block of keys and values into the sums."""
    logits = jnp.where(is_seen[:, None], logits, -jnp.inf)
    peak = jnp.maximum(sums.peak, logits.max(-1))
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(logits - shift[..., None])
    keep = jnp.exp(sums.peak - shift)
    update = _weighted_sum(weights, values, is_live)
    return Sums(peak, sums.total * keep + weights.sum(-1), sums.values * keep[..., None] + update)


def _add_sink(sums: Sums, sink: Float[Array, "seq kv_head row"]) -> Sums:
    """Take a logit without a value into the sums; -inf is none."""
    peak = jnp.maximum(sums.peak, sink)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    keep = jnp.exp(sums.peak - shift)
    return Sums(peak, sums.total * keep + jnp.exp(sink - shift), sums.values * keep[..., None])


def _own_runs(
    arguments: PagedArguments,
    rows: Rows,
    positions: Int[Array, "seq row"],
    num_pages: int,
    *,
    window: int | None,
    soft_cap: float | None,
) -> Sums:
    """Return each query's sums over its own run, whose keys are `recent`.

    Queries are cut into pieces of at most a run, each of which reaches into two runs: pieces are sequences of
    their own here.
    """
    recent, span = arguments.recent, arguments.keys.run_slots
    assert recent is not None
    assert span is not None
    num_seqs, num_heads, num_rows, head_dim = rows.shape
    time = arguments.query.shape[1]
    group, piece = num_rows // time, min(time, span)
    num_pieces = -(-time // piece)
    num_runs = recent.shape[2] // span
    begins = (arguments.starts - arguments.starts % span)[:, None]
    begins += span * jnp.arange(num_runs, dtype=jnp.int32)[None]
    page_size, stripe = arguments.values.page_size, arguments.stripe or Stripe(1, 0)
    page = jax.lax.div(begins, jnp.int32(page_size))
    logical = stripe.pages_before(page)
    pages, is_page = _layer_pages(arguments.page_table, logical, num_pages, arguments.page_offset)
    is_page &= logical * stripe.stride + stripe.offset == page
    within = jax.lax.div(begins % page_size, jnp.int32(span))

    def reach(array: jax.Array, axis: int = 2) -> jax.Array:
        """Turn `[seq, run, ...]` into what pieces reach: the first axes become one, runs go along `axis`."""
        own = array[:, :num_pieces]
        if num_runs > num_pieces:
            own = jnp.concatenate([own, array[:, 1:]], axis=axis)
        return own.reshape(-1, *own.shape[2:])

    def pieces(array: jax.Array, axis: int) -> jax.Array:
        """Cut the rows of an array into pieces, padded with what sees nothing."""
        padded = num_pieces * piece * group - num_rows
        widths = [(0, padded if i == axis else 0) for i in range(array.ndim)]
        array = jnp.pad(array, widths, constant_values=-1 if array.dtype == jnp.int32 else 0)
        shape = (*array.shape[:axis], num_pieces, piece * group, *array.shape[axis + 1 :])
        return jnp.moveaxis(array.reshape(shape), axis, 1).reshape(
            -1, *shape[1:axis], piece * group, *shape[axis + 2 :]
        )

    keys = recent.reshape(num_seqs, num_heads, num_runs, span, head_dim).swapaxes(1, 2)
    places = begins[:, :, None] + jnp.arange(span, dtype=jnp.int32)[None, None]
    ends = arguments.starts + arguments.lens
    kept = _first_kept(arguments.page_table, stripe, ends, page_size)
    is_live = is_page[..., None] & (places >= kept[:, None, None]) & (places < ends[:, None, None])
    is_live, places = reach(is_live), reach(places)
    values = gather(arguments.values, reach(pages[..., None]), reach(within[..., None]), span)
    own = pieces(positions, 1)
    is_seen = is_live[:, None] & (places[:, None] <= own[..., None])
    is_seen &= places[:, None] // span == own[..., None] // span
    if window is not None:
        is_seen &= places[:, None] > own[..., None] - window
    logits = logits_of(pieces(rows, 2), Pages(reach(keys, axis=3).astype(rows.dtype)), soft_cap)
    sums = _add(no_sums(logits.shape[:3], head_dim), logits, is_seen, values, is_live)

    def whole(array: jax.Array) -> jax.Array:
        """Put the pieces of each sequence together again."""
        by_piece = array.reshape(num_seqs, num_pieces, num_heads, piece * group, *array.shape[3:])
        joined = by_piece.swapaxes(1, 2).reshape(num_seqs, num_heads, -1, *array.shape[3:])
        return joined[:, :, :num_rows]

    return jax.tree.map(whole, sums)


def _layer_pages(
    table: Int[Array, "seq max_pages"],
    logical: Int[Array, "seq page"],
    num_pages: int,
    offset: jax.Array | int,
) -> tuple[Int[Array, "seq page"], Bool[Array, "seq page"]]:
    """Return where a sequence's pages lie in the pool, and which there are; counted in their stripe."""
    column = jax.lax.rem(logical, jnp.int32(table.shape[1]))
    pages = jnp.take_along_axis(table, column, axis=1)
    is_page = (pages >= 0) & (pages < num_pages)
    return jnp.where(is_page, pages, 0) + offset, is_page


def gather(
    stored: Pages,
    pages: Int[Array, "seq page"],
    within: Int[Array, "seq page"] | None = None,
    span: int = 1,
) -> Pages:
    """Return pages of each sequence as `[seq, kv_head, slot, ...]`; the scale of a head is `[kv_head]`.

    Args:
        stored: where they are taken from.
        pages: places in the pool.
        within: the run of `span` slots that is taken of each page; None takes all.
        span: slots of a run; needs an entry of its own for every slot.
    """
    num_kv_heads = stored.data.shape[1]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    # Materialized, or XLA's CPU backend computes it anew for every entry that it gathers.
    index = jax.lax.optimization_barrier(pages[:, None, :] * num_kv_heads + heads)

    def take(array: jax.Array | None, shape: tuple[int, ...] | None) -> jax.Array | None:
        if array is None or shape is None:
            return array
        matrices = as_matrices(array)
        matrices = matrices.reshape(-1, *matrices.shape[2:])
        taken = slots_of(matrices.at[index].get(mode="promise_in_bounds"), shape)
        if within is not None:
            # Of pages that are here: XLA's TPU backend copies a pool of which parts of pages are gathered.
            runs = taken.reshape(*index.shape, -1, span, *shape[1:])
            place = within.reshape(within.shape[0], 1, -1, *[1] * (runs.ndim - 3))
            taken = jnp.take_along_axis(runs, place, axis=3, mode="promise_in_bounds")
        return taken.reshape(*index.shape[:2], -1, *shape[1:])

    scale, zero = (take(array, stored.sizes.scales) for array in (stored.scale, stored.zero))
    data = take(stored.data, stored.data_shape)
    assert data is not None
    return Pages(data, scale, zero, stored.entry)


def logits_of(
    rows: Rows, keys: Pages, soft_cap: float | None = None
) -> Float[Array, "seq kv_head row block"]:
    """Return the products of query rows and a block of keys, capped."""
    logits = _products_of_entries(rows, keys)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _products_of_entries(rows: Rows, keys: Pages) -> Float[Array, "seq kv_head row block"]:
    if keys.scale is None:
        data = keys.data
        return products("bkrd,bksd->bkrs", rows.astype(data.dtype), data)
    data = _entries(keys, rows.dtype)
    if keys.scale.ndim == 1:
        rows = (rows * keys.scale[None, :, None, None]).astype(rows.dtype)
    if keys.zero is None:
        logits = products("bkrd,bksd->bkrs", rows, data)
        return logits if keys.scale.ndim == 1 else logits * keys.scale[:, :, None]
    if keys.run_slots is not None:
        return _logits_of_runs(rows, data, keys.scale, keys.zero)
    scale, zero = keys.scale.astype(jnp.float32), keys.zero.astype(rows.dtype)
    num_runs = scale.shape[-1]
    runs = rows.reshape(*rows.shape[:-1], num_runs, -1)
    data = data.reshape(*data.shape[:-1], num_runs, -1)
    parts = products("bkrgc,bksgc->bkgrs", runs, data)
    logits = (parts * scale.transpose(0, 1, 3, 2)[:, :, :, None]).sum(2)
    shift = runs.astype(jnp.float32).sum(-1).astype(rows.dtype)
    return logits + products("bkrg,bksg->bkrs", shift, zero)


def _logits_of_runs(rows: Rows, data: Array, scale: Array, zero: Array) -> Array:
    """Return the logits where each channel has a scale and a zero point for a run of slots."""
    num_seqs, num_heads, num_slots, head_dim = data.shape
    runs = data.reshape(num_seqs, num_heads, scale.shape[2], -1, head_dim)
    scaled = (rows[:, :, None] * scale.astype(jnp.float32)[:, :, :, None]).astype(rows.dtype)
    parts = products("bkgrd,bkgsd->bkrgs", scaled, runs)
    shift = products("bkrd,bkgd->bkrg", rows, zero.astype(rows.dtype))
    return (parts + shift[..., None]).reshape(*rows.shape[:3], num_slots)


def _weighted_sum(
    weights: Float[Array, "seq kv_head row block"], values: Pages, is_live: Bool[Array, "seq block"]
) -> Float[Array, "seq kv_head row head_dim"]:
    """Return the products of probabilities and a block of values.

    A dead slot may hold NaN, and 0 * NaN is NaN: nothing of it may reach the product.
    """
    live = is_live[:, None, :, None]
    if values.zero is not None:
        assert values.scale is not None
        return _weighted_runs(weights, values, live)
    data = values.read(values.data)
    if jnp.issubdtype(data.dtype, jnp.floating):
        data = jnp.where(live, data, jnp.zeros((), data.dtype))
    if values.scale is not None:
        if values.scale.ndim == 3:
            weights = weights * jnp.where(is_live[:, None], values.scale, 0)[:, :, None]
        data = data.astype(jnp.float32)
    out = products("bkrs,bksd->bkrd", weights.astype(data.dtype), data)
    if values.scale is not None and values.scale.ndim == 1:
        return out * values.scale[None, :, None, None]
    return out


def _weighted_runs(
    weights: Float[Array, "seq kv_head row block"], values: Pages, live: Bool[Array, "seq 1 block 1"]
) -> Float[Array, "seq kv_head row head_dim"]:
    assert values.scale is not None
    assert values.zero is not None
    scale, zero = (jnp.where(live, array, 0).astype(jnp.float32) for array in (values.scale, values.zero))
    data = _entries(values, jnp.float32)
    data = data.reshape(*data.shape[:-1], scale.shape[-1], -1)
    scaled = weights[:, :, None] * scale.transpose(0, 1, 3, 2)[:, :, :, None]
    sums = products("bkgrs,bksgc->bkrgc", scaled, data)
    return (sums + products("bkrs,bksg->bkrg", weights, zero)[..., None]).reshape(*weights.shape[:3], -1)


def _entries(stored: Pages, dtype: DTypeLike) -> Array:
    """Return the stored entries as numbers of `dtype`, which holds all of them exactly."""
    return stored.read(stored.data).astype(dtype)


def _regroup(x: jax.Array, time: int) -> jax.Array:
    """Turn `[seq, kv_head, time * group, ...]` back into `[seq, time, q_head, ...]`."""
    num_seqs, num_kv_heads, num_rows, *entry = x.shape
    split = x.reshape(num_seqs, num_kv_heads, time, num_rows // time, *entry)
    return split.swapaxes(1, 2).reshape(num_seqs, time, -1, *entry)
