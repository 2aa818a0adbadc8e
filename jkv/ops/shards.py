"""A call on one device or on a mesh, each device with its own sequences, heads, pages and stripe of them.

Knows logical axes; not what is computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache, Pool, pool_axes
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.ops.checks import Where
from jkv.ops.stripes import merge, only_own
from jkv.sharding import Sharding
from kernels_pallas.paged_attention import Stripe


def run(
    local: Any,
    heads: tuple[Any, ...],
    axes: tuple[tuple[str | None, ...], ...],
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    sharding: Sharding | None,
) -> tuple[Any, Any, Cache]:
    """Call `local(heads, pool, batch, layer, stripe)`, on a mesh with what each device has.

    Returns:
        The attended values, their log-sum-exps and the cache; None where `local` attends to nothing.
    """
    group, layer = where
    pool, kind = cache.pools[group], cache.spec.groups[group]
    call = functools.partial(local, stripe=None)
    if sharding is not None:
        call = _in_stripes(local, sharding, cache.spec) if sharding.size("context") > 1 else call
        call = _over_mesh(call, axes, sharding, kind, pool, batch)
    heads = jax.tree.map(_refuse_gradient, heads)
    if sharding is not None and sharding.is_explicit:
        pairs = zip(heads, axes, strict=True)
        heads = tuple(
            jax.tree.map(functools.partial(_split, sharding.named(*names)), one) for one, names in pairs
        )
    out, log_sum, pool = call(heads, pool, batch, jnp.asarray(layer, jnp.int32))
    pools = tuple(pool if i == group else other for i, other in enumerate(cache.pools))
    return out, log_sum, cache.replace(pools=pools)


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
    pool_specs = pool_axes(pool, group, spec)
    batch_specs = jax.tree.map(lambda array: spec("seq", *[None] * (array.ndim - 1)), batch)
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(tuple(spec(*names) for names in axes), pool_specs, batch_specs, spec()),
        out_specs=(spec("seq", None, "q_head", None), spec("seq", None, "q_head"), pool_specs),
        check_vma=False,
    )


def _split(placement: NamedSharding, array: jax.Array) -> jax.Array:
    """Return what every device has whole with the type that an explicit mesh asks for; nothing is sent."""
    is_whole = all(part is None for part in jax.typeof(array).sharding.spec)
    return jax.reshard(array, placement) if is_whole else array


def _in_stripes(local: Any, sharding: Sharding, spec: CacheSpec) -> Any:
    """Wrap `local` so that a device sees its own stripe of the pages, and merge what the stripes give."""
    axis = sharding.mesh_axis("context")
    assert axis is not None

    def call(heads: Any, pool: Pool, batch: TokenBatch, layer: Any) -> tuple[Any, Any, Pool]:
        stripe = Stripe(spec.num_stripes, jax.lax.axis_index(axis))
        own = only_own(pool, batch, stripe, page_size=spec.page_size)
        out, log_sum, written = local(heads, *own, layer, stripe=stripe)
        if out is not None:
            out, log_sum = merge(out, log_sum, axis)
        return out, log_sum, written.replace(page_table=pool.page_table)

    return call


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    return x


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError("a gradient through a cache is refused; call the layer without a cache to train it")
