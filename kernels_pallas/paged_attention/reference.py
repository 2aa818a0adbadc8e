"""The definition of paged attention: gather everything, mask, softmax, in float32.

The oracle of every other implementation; clarity over speed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, Stripe
from kernels_pallas.slots import as_matrices, slots_of


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
    query, keys, values, table, starts, lens, offset, recent, stripe = arguments
    _, time, num_heads, _ = query.shape
    page_size = keys.page_size
    is_page = (table >= 0) & (table < num_pages)
    # Column c of the table names page c, c + width, ...: a slot holds the latest position that falls on it.
    stride, first = stripe or Stripe(1, 0)
    num_slots = table.shape[1] * page_size
    column, within = jnp.divmod(jnp.arange(num_slots)[None], page_size)
    slots = (column * stride + first) * page_size + within
    ends = (starts + lens)[:, None]
    key_positions = slots + (ends - 1 - slots) // (num_slots * stride) * (num_slots * stride)
    is_live = jnp.repeat(is_page, page_size, axis=1) & (key_positions >= 0) & (key_positions < ends)

    def tokens(pages: Pages) -> jax.Array:
        heads = heads_of(pages, jnp.where(is_page, table, 0) + offset)
        heads = jnp.where(is_live[..., None, None], heads, 0.0)
        return jnp.repeat(heads, num_heads // heads.shape[2], axis=2)

    query_positions = starts[:, None] + jnp.arange(time)[None]
    is_query = jnp.arange(time)[None] < lens[:, None]
    is_seen = is_query[:, :, None] & is_live[:, None]
    is_seen &= key_positions[:, None] <= query_positions[:, :, None]
    if window is not None:
        is_seen &= key_positions[:, None] > query_positions[:, :, None] - window
    logits = jnp.einsum(
        "bthd,bshd->bths", query.astype(jnp.float32), tokens(keys), precision=jax.lax.Precision.HIGHEST
    )
    if recent is not None and keys.run_slots is not None:
        own, is_own = _recent_logits(query, recent, starts, query_positions, key_positions, keys.run_slots)
        logits = jnp.where(is_own[:, :, None], own, logits)
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(is_seen[:, :, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None, :, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, jnp.where(is_query[:, :, None, None], sink, -jnp.inf)], axis=-1)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    shift = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
    weights = jnp.exp(logits - shift[..., None])[..., :num_slots]
    out = jnp.einsum("bths,bshd->bthd", weights, tokens(values), precision=jax.lax.Precision.HIGHEST)
    return out.astype(query.dtype), log_sum


def _recent_logits(
    query: Float[Array, "seq time q_head head_dim"],
    recent: Float[Array, "seq kv_head recent head_dim"],
    starts: Int[Array, " seq"],
    query_positions: Int[Array, "seq time"],
    key_positions: Int[Array, "seq slot"],
    span: int,
) -> tuple[jax.Array, jax.Array]:
    """Return logits with the keys as they were given, and where key and query are of one run."""
    place = key_positions - (starts - starts % span)[:, None]
    index = jnp.clip(place, 0, recent.shape[2] - 1)[:, None, :, None]
    given = jnp.take_along_axis(recent, index, axis=2).astype(jnp.float32)
    given = jnp.repeat(given, query.shape[2] // recent.shape[1], axis=1)
    logits = jnp.einsum(
        "bthd,bhsd->bths", query.astype(jnp.float32), given, precision=jax.lax.Precision.HIGHEST
    )
    return logits, query_positions[:, :, None] // span == key_positions[:, None] // span


def heads_of(pages: Pages, index: Int[Array, "seq max_pages"]) -> Float[Array, "seq token kv_head head_dim"]:
    """Return the float32 heads that the named pages stand for."""

    def take(array: jax.Array, shape: tuple[int, ...] | None) -> jax.Array:
        assert shape is not None
        return slots_of(as_matrices(array)[index], shape)

    heads = pages.read(take(pages.data, pages.data_shape)).astype(jnp.float32)
    if pages.zero is not None:
        assert pages.scale is not None
        scale, zero = (
            take(array, pages.sizes.scales).astype(jnp.float32) for array in (pages.scale, pages.zero)
        )
        axis = -1 if pages.run_slots is None else -2
        span = heads.shape[axis] // scale.shape[axis]
        heads = heads * jnp.repeat(scale, span, axis=axis) + jnp.repeat(zero, span, axis=axis)
    elif pages.scale is not None:
        is_of_head = pages.scale.ndim == 1
        scale = pages.scale[None, None, :, None] if is_of_head else take(pages.scale, pages.sizes.scales)
        heads = heads * scale[..., None]
    heads = jnp.moveaxis(heads, 2, 3)  # [seq, max_pages, slot, kv_head, head_dim]
    return heads.reshape(heads.shape[0], -1, *heads.shape[3:])
