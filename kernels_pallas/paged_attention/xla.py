"""Paged attention in plain JAX that reads only the pages in use.

An online softmax walks each sequence's pages in blocks of `Tiling.block_tokens`, from the first block that
its window reaches; the number of blocks is a traced value, so cost follows the longest live sequence and not
the capacity. One block of keys and values is gathered at a time, head by head, without a transpose, and stays
as it is stored: scales multiply queries, logits and probabilities.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, Tiling

Rows = Float[Array, "seq kv_head row head_dim"]


class _Walk(NamedTuple):
    """How far each sequence's blocks reach.

    Attributes:
        table: the layer's page table.
        first_page: first page of each sequence's first block.
        num_blocks: blocks of the longest walk.
        positions: of each query row; -1 sees nothing.
        ends: tokens that each sequence holds.
    """

    table: Int[Array, "seq max_pages"]
    first_page: Int[Array, " seq"]
    num_blocks: Int[Array, ""]
    positions: Int[Array, "seq row"]
    ends: Int[Array, " seq"]


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
    """Compute what `reference.paged_attention` defines; logits, softmax and sums are float32."""
    query, keys, values, table, _, _, offset = arguments
    num_seqs, time, num_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = keys.data.shape
    group = num_heads // num_kv_heads
    block_pages = max(1, min((tiling or Tiling()).block_tokens // page_size, table.shape[1]))
    block = block_pages * page_size
    walk = _plan(arguments, block_pages, group, window)

    # [seq, kv_head, time * group, head_dim]: the queries of one KV head are rows of one product.
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = (rows * scale).reshape(num_seqs, num_kv_heads, time * group, head_dim)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, sums = carry
        logical = walk.first_page[:, None] + i * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None]
        column = jax.lax.rem(logical, jnp.int32(walk.table.shape[1]))
        pages = jnp.take_along_axis(walk.table, column, axis=1)
        is_page = (pages >= 0) & (pages < num_pages)
        pages = jnp.where(is_page, pages, 0) + offset
        places = logical[:, :1] * page_size + jnp.arange(block, dtype=jnp.int32)[None]
        is_live = jnp.repeat(is_page, page_size, axis=1) & (places < walk.ends[:, None])
        is_seen = is_live[:, None] & (places[:, None] <= walk.positions[:, :, None])
        if window is not None:
            is_seen &= places[:, None] > walk.positions[:, :, None] - window
        logits = _logits(rows, _gather(keys, pages))
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(is_seen[:, None], logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(-1))
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp(logits - shift[..., None])
        keep = jnp.exp(peak - shift)
        update = _weighted_sum(weights, _gather(values, pages), is_live)
        return new_peak, total * keep + weights.sum(-1), sums * keep[..., None] + update

    shape = (num_seqs, num_kv_heads, time * group)
    peak = jnp.full(shape, -jnp.inf, jnp.float32)
    total = jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, time))[None]
        peak = jnp.where((walk.positions >= 0)[:, None], sink, -jnp.inf)
        total = jnp.where((walk.positions >= 0)[:, None], 1.0, 0.0) * jnp.ones_like(sink)
    carry = (peak, total, jnp.zeros((*shape, head_dim), jnp.float32))
    peak, total, sums = jax.lax.fori_loop(jnp.int32(0), walk.num_blocks, step, carry)
    out = sums / jnp.where(total == 0, 1.0, total)[..., None]
    log_sum = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1.0, total)))
    regroup = functools.partial(_regroup, num_seqs=num_seqs, time=time, num_heads=num_heads)
    return regroup(out).astype(query.dtype), regroup(log_sum)


def _plan(arguments: PagedArguments, block_pages: int, group: int, window: int | None) -> _Walk:
    """Plan the walk; blocks begin at multiples of their size, so that sums do not depend on the step."""
    query, keys, _, table, starts, lens, _ = arguments
    block = block_pages * keys.data.shape[2]
    ends = starts + lens
    steps = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(steps < lens[:, None], starts[:, None] + steps, -1)
    first = jnp.zeros_like(starts)
    if window is not None:
        first = jax.lax.div(jnp.maximum(starts - window + 1, 0), jnp.int32(block))
    last = jax.lax.div(ends + jnp.int32(block - 1), jnp.int32(block))
    return _Walk(
        table=table,
        first_page=first * block_pages,
        num_blocks=jnp.max(jnp.where(lens > 0, last - first, 0)),
        positions=jnp.repeat(positions, group, axis=1),
        ends=ends,
    )


def _gather(stored: Pages, pages: Int[Array, "seq block_page"]) -> Pages:
    """Return a block of each sequence as `[seq, kv_head, block, ...]`; the scale of a head is `[kv_head]`."""
    _, num_kv_heads, page_size, _ = stored.data.shape
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    # Materialized, or XLA's CPU backend computes it anew for every entry that it gathers.
    index = jax.lax.optimization_barrier(pages[:, None, :] * num_kv_heads + heads)

    def take(array: jax.Array) -> jax.Array:
        if array.ndim == 1:
            return array
        entry = array.shape[3:]
        flat = array.reshape(-1, page_size, *entry)
        taken = flat.at[index].get(mode="promise_in_bounds")
        return taken.reshape(*index.shape[:2], index.shape[2] * page_size, *entry)

    return jax.tree.map(take, stored)


def _logits(rows: Rows, keys: Pages) -> Float[Array, "seq kv_head row block"]:
    """Return the products of query rows and a block of keys."""
    if keys.scale is None:
        data = keys.data
        return jnp.einsum(
            "bkrd,bksd->bkrs", rows.astype(data.dtype), data, preferred_element_type=jnp.float32
        )
    data = _entries(keys, rows.dtype)
    if keys.scale.ndim == 1:
        rows = (rows * keys.scale[None, :, None, None]).astype(rows.dtype)
    if keys.zero is None:
        logits = jnp.einsum("bkrd,bksd->bkrs", rows, data, preferred_element_type=jnp.float32)
        return logits if keys.scale.ndim == 1 else logits * keys.scale[:, :, None]
    scale, zero = keys.scale.astype(jnp.float32), keys.zero.astype(rows.dtype)
    num_runs = scale.shape[-1]
    runs = rows.reshape(*rows.shape[:-1], num_runs, -1)
    data = data.reshape(*data.shape[:-1], num_runs, -1)
    parts = jnp.einsum("bkrgc,bksgc->bkgrs", runs, data, preferred_element_type=jnp.float32)
    logits = (parts * scale.transpose(0, 1, 3, 2)[:, :, :, None]).sum(2)
    shift = runs.astype(jnp.float32).sum(-1).astype(rows.dtype)
    return logits + jnp.einsum("bkrg,bksg->bkrs", shift, zero, preferred_element_type=jnp.float32)


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
    out = jnp.einsum("bkrs,bksd->bkrd", weights.astype(data.dtype), data, preferred_element_type=jnp.float32)
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
    sums = jnp.einsum("bkgrs,bksgc->bkrgc", scaled, data)
    return (sums + jnp.einsum("bkrs,bksg->bkrg", weights, zero)[..., None]).reshape(*weights.shape[:3], -1)


def _entries(stored: Pages, dtype: DTypeLike) -> Array:
    """Return the stored entries as numbers of `dtype`, which holds all of them exactly."""
    return stored.read(stored.data).astype(dtype)


def _regroup(x: jax.Array, *, num_seqs: int, time: int, num_heads: int) -> jax.Array:
    """Turn `[seq, kv_head, time * group, ...]` back into `[seq, time, q_head, ...]`."""
    num_kv_heads = x.shape[1]
    split = x.reshape(num_seqs, num_kv_heads, time, num_heads // num_kv_heads, *x.shape[3:])
    return split.swapaxes(1, 2).reshape(num_seqs, time, num_heads, *x.shape[3:])
