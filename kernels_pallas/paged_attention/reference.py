"""The definition of paged attention: gather everything, mask, softmax, in float32.

The oracle of every other implementation; clarity over speed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.paged_attention.contract import PagedArguments


def paged_attention(
    arguments: PagedArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Attend from each new token to the tokens of its own sequence at or before its position.

    Args:
        arguments: pools, table and query; see `PagedArguments`.
        num_pages: pages that one layer owns in the pool.
        scale: multiplies the logits.
        window: latest positions that a query sees, its own included.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: a logit for each query head that takes probability and adds no value.

    Returns:
        The output in the query's dtype, and the float32 log-sum-exp of the logits. Rows past a sequence's
        `lens` are zero, with a log-sum-exp of -inf.
    """
    query, key_pool, value_pool, table, starts, lens, offset = arguments
    num_seqs, time, num_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = key_pool.shape
    max_tokens = table.shape[1] * page_size
    is_page = (table >= 0) & (table < num_pages)
    pages = jnp.where(is_page, table, 0) + offset

    def tokens(pool: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(pool[pages], 2, 3)  # [seq, max_pages, slot, kv_head, head_dim]
        rows = rows.reshape(num_seqs, max_tokens, num_kv_heads, head_dim).astype(jnp.float32)
        is_live = jnp.repeat(is_page, page_size, axis=1) & (
            jnp.arange(max_tokens)[None] < (starts + lens)[:, None]
        )
        rows = jnp.where(is_live[..., None, None], rows, 0.0)
        return jnp.repeat(rows, num_heads // num_kv_heads, axis=2)

    query_positions = starts[:, None] + jnp.arange(time)[None]
    is_query = jnp.arange(time)[None] < lens[:, None]
    key_positions = jnp.arange(max_tokens)[None, None]
    is_seen = is_query[:, :, None] & (key_positions <= query_positions[:, :, None])
    is_seen &= jnp.repeat(is_page, page_size, axis=1)[:, None]
    if window is not None:
        is_seen &= key_positions > query_positions[:, :, None] - window
    logits = jnp.einsum(
        "bthd,bshd->bths", query.astype(jnp.float32), tokens(key_pool), precision=jax.lax.Precision.HIGHEST
    )
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(is_seen[:, :, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None, :, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, jnp.where(is_query[:, :, None, None], sink, -jnp.inf)], axis=-1)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    shift = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
    weights = jnp.exp(logits - shift[..., None])[..., :max_tokens]
    out = jnp.einsum("bths,bshd->bthd", weights, tokens(value_pool), precision=jax.lax.Precision.HIGHEST)
    return out.astype(query.dtype), log_sum
