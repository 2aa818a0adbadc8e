"""Caches whose unowned slots hold what must never be read."""

import jax.numpy as jnp

from jkv.cache.cache import Cache


def poison(cache: Cache, value: float = jnp.nan) -> Cache:
    """Return an empty cache with `value` in every slot."""
    pools = tuple(
        pool.replace(keys=jnp.full_like(pool.keys, value), values=jnp.full_like(pool.values, value))
        for pool in cache.pools
    )
    return cache.replace(pools=pools)
