"""Ordinary causal attention among tokens, without a cache.

Plain JAX that differentiates; knows no pages.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def causal_attention(
    query: Float[Array, "seq time q_head head_dim"],
    key: Float[Array, "seq time kv_head head_dim"],
    value: Float[Array, "seq time kv_head value_dim"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
    """Attend causally among the tokens given, differentiably, in float32; no cache.

    Returns:
        The attended values, and the log-sum-exp of the logits, sinks included.

    Raises:
        ValueError: the query heads are not a multiple of the KV heads.
    """
    num_seqs, time, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {num_heads} and {num_kv_heads}")
    group = num_heads // num_kv_heads
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).astype(jnp.float32)
    products = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    logits = products("btkgd,bskd->bkgts", rows, key.astype(jnp.float32)) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    past = jnp.arange(time)[:, None] - jnp.arange(time)[None]
    is_seen = past >= 0 if window is None else (past >= 0) & (past < window)
    logits = jnp.where(is_seen[None, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :time]
    out = products("bkgts,bskd->btkgd", weights, value.astype(jnp.float32))
    log_sum = jax.nn.logsumexp(logits, axis=-1).transpose(0, 3, 1, 2).reshape(query.shape[:3])
    return out.reshape(*query.shape[:3], -1).astype(query.dtype), log_sum
