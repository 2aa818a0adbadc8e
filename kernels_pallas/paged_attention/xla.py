"""Paged attention in plain JAX that reads only the pages in use.

An online softmax walks the sequences' pages in blocks of `Tiling.block_tokens`; the number of blocks is a
traced value, so cost follows the longest live sequence and not the capacity. One block of keys and values is
gathered at a time, head by head, without a transpose.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.paged_attention.contract import PagedArguments, Tiling


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
    query, key_pool, value_pool, table, starts, lens, offset = arguments
    num_seqs, time, num_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = key_pool.shape
    group = num_heads // num_kv_heads
    block_pages = max(1, min((tiling or Tiling()).block_tokens // page_size, table.shape[1]))
    block = block_pages * page_size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)), constant_values=-1)

    # [seq, kv_head, time * group, head_dim]: the queries of one KV head are rows of one product.
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).swapaxes(1, 2)
    rows = (rows * scale).reshape(num_seqs, num_kv_heads, time * group, head_dim).astype(key_pool.dtype)
    ends = starts + lens
    steps = jnp.arange(time, dtype=jnp.int32)
    positions = jnp.where(steps[None] < lens[:, None], starts[:, None] + steps[None], -1)
    positions = jnp.repeat(positions, group, axis=1)  # [seq, time * group]; -1 sees nothing

    def gather(pool: jax.Array, pages: jax.Array) -> jax.Array:
        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        # Materialized, or XLA's CPU backend computes it anew for every entry that it gathers.
        index = jax.lax.optimization_barrier(pages[:, None, :] * num_kv_heads + heads)
        flat = pool.reshape(-1, page_size, head_dim)
        return flat.at[index].get(mode="promise_in_bounds").reshape(num_seqs, num_kv_heads, block, head_dim)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, sums = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * block_pages, block_pages, axis=1)
        is_page = (pages >= 0) & (pages < num_pages)
        pages = jnp.where(is_page, pages, 0) + offset
        slots = i * block + jnp.arange(block, dtype=jnp.int32)
        is_live = jnp.repeat(is_page, page_size, axis=1) & (slots[None] < ends[:, None])
        is_seen = is_live[:, None] & (slots[None, None] <= positions[:, :, None])
        if window is not None:
            is_seen &= slots[None, None] > positions[:, :, None] - window
        logits = jnp.einsum(
            "bkrd,bksd->bkrs", rows, gather(key_pool, pages), preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(is_seen[:, None], logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(-1))
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp(logits - shift[..., None])
        keep = jnp.exp(peak - shift)
        # A dead slot may hold NaN, and 0 * NaN is NaN: its value must not reach the product.
        values = jnp.where(is_live[:, None, :, None], gather(value_pool, pages), 0)
        update = jnp.einsum(
            "bkrs,bksd->bkrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return new_peak, total * keep + weights.sum(-1), sums * keep[..., None] + update

    shape = (num_seqs, num_kv_heads, time * group)
    peak = jnp.full(shape, -jnp.inf, jnp.float32)
    total = jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, time))[None]
        peak = jnp.where((positions >= 0)[:, None], sink, -jnp.inf)
        total = jnp.where((positions >= 0)[:, None], 1.0, 0.0) * jnp.ones_like(sink)
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(lens > 0, jnp.maximum(starts - window + 1, 0), jnp.iinfo(jnp.int32).max)
        first = jax.lax.div(jnp.min(oldest), jnp.int32(block))
    num_blocks = jax.lax.div(jnp.max(jnp.where(lens > 0, ends, 0)) + jnp.int32(block - 1), jnp.int32(block))
    carry = (peak, total, jnp.zeros((*shape, head_dim), jnp.float32))
    peak, total, sums = jax.lax.fori_loop(first, num_blocks, step, carry)
    out = sums / jnp.where(total == 0, 1.0, total)[..., None]
    log_sum = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1.0, total)))
    regroup = functools.partial(_regroup, num_seqs=num_seqs, time=time, num_heads=num_heads)
    return regroup(out).astype(query.dtype), regroup(log_sum)


def _regroup(x: jax.Array, *, num_seqs: int, time: int, num_heads: int) -> jax.Array:
    """Turn `[seq, kv_head, time * group, ...]` back into `[seq, time, q_head, ...]`."""
    num_kv_heads = x.shape[1]
    split = x.reshape(num_seqs, num_kv_heads, time, num_heads // num_kv_heads, *x.shape[3:])
    return split.swapaxes(1, 2).reshape(num_seqs, time, num_heads, *x.shape[3:])
