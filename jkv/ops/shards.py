"""A call on one device or on a mesh, each device with its own sequences, heads and pages.

Knows logical axes; not what is computed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache, Pool, pool_axes
from jkv.cache.spec import CacheGroup
from jkv.ops.checks import Where
from jkv.ops.pools import with_pool
from jkv.sharding import Sharding


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: the attended values; zero for padding.
        cache: holds the new rows; None without one.
        log_sum: float32 log-sum-exp of the logits, sinks included, by which partial results are merged; -inf
            for padding.
    """

    out: Float[Array, "row time q_head value_dim"]
    cache: Cache | None
    log_sum: Float[Array, "row time q_head"]


def run(
    local: Any,
    heads: tuple[Any, ...],
    axes: tuple[tuple[str | None, ...], ...],
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    sharding: Sharding | None,
) -> Attended:
    """Call `local(heads, pool, batch, layer)`, on a mesh with what each device has of the logical axes."""
    group, layer = where
    pool, kind = cache.pools[group], cache.spec.groups[group]
    call = local if sharding is None else _over_mesh(local, axes, sharding, kind, pool, batch)
    heads = jax.tree.map(_refuse_gradient, heads)
    out, log_sum, pool = call(heads, pool, batch, jnp.asarray(layer, jnp.int32))
    return Attended(out, with_pool(cache, group, pool), log_sum)


def _over_mesh(
    local: Any,
    axes: tuple[tuple[str | None, ...], ...],
    sharding: Sharding,
    group: CacheGroup,
    pool: Pool,
    batch: TokenBatch,
) -> Any:
    """Wrap `local` so that each device sees its own sequences, heads and pages."""
    spec = sharding.spec
    rows = spec("seq")
    pool_specs = pool_axes(pool, group, spec)
    table = spec("seq", None)
    slots = tuple(table for _ in batch.slots)
    batch_specs = batch.replace(starts=rows, lens=rows, positions=table, is_valid=table, slots=slots)
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(tuple(spec(*names) for names in axes), pool_specs, batch_specs, spec()),
        out_specs=(spec("seq", None, "q_head", None), spec("seq", None, "q_head"), pool_specs),
        check_vma=False,
    )


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    return x


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError("a gradient through a cache is refused; call the layer without a cache to train it")
