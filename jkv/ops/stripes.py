"""One sequence's pages over several devices: what a device has of them, and how partial results are merged.

Knows a table's columns and log-sum-exps; inside `shard_map`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Pool
from kernels_pallas.paged_attention import Stripe


def only_own(pool: Pool, batch: TokenBatch, stripe: Stripe, *, page_size: int) -> tuple[Pool, TokenBatch]:
    """Return the pool and the step without the pages and slots of other stripes, so that none is written."""
    columns = jnp.arange(pool.page_table.shape[1], dtype=jnp.int32)[None]
    table = jnp.where(columns % stripe.stride == stripe.offset, pool.page_table, -1)
    is_own = jax.lax.div(batch.positions, jnp.int32(page_size)) % stripe.stride == stripe.offset
    slots = tuple(jnp.where(is_own, places, -1) for places in batch.slots)
    return pool.replace(page_table=table), batch.replace(slots=slots)


def own_columns(table: Int[Array, "seq max_pages"], stripe: Stripe | None) -> Int[Array, "seq own_pages"]:
    """Return the columns of a stripe's pages; without stripes all."""
    if stripe is None:
        return table
    rounds = table.reshape(table.shape[0], -1, stripe.stride)
    return jax.lax.dynamic_index_in_dim(rounds, stripe.offset, axis=2, keepdims=False)


def own_sinks(sinks: Float[Array, " q_head"] | None, stripe: Stripe | None) -> Float[Array, " q_head"] | None:
    """Return the sinks on the first stripe, and on others what adds nothing."""
    if sinks is None or stripe is None:
        return sinks
    return jnp.where(stripe.offset == 0, sinks, -jnp.inf)


def merge(
    out: Float[Array, "row time q_head value_dim"], log_sum: Float[Array, "row time q_head"], axis: str
) -> tuple[Float[Array, "row time q_head value_dim"], Float[Array, "row time q_head"]]:
    """Merge what the devices of a mesh axis have attended to by themselves, in float32; exact.

    Only partial outputs and log-sum-exps travel: one maximum and one sum over the axis.
    """
    peak = jax.lax.pmax(log_sum, axis)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp(log_sum - peak)[..., None]
    sums = jax.lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], axis=-1), axis)
    total = sums[..., -1]
    divisor = jnp.where(total == 0, 1.0, total)
    merged = (sums[..., :-1] / divisor[..., None]).astype(out.dtype)
    return merged, jnp.where(total == 0, -jnp.inf, peak + jnp.log(divisor))
