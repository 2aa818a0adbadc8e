"""Caches whose unowned slots hold what must never be read."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Cache


def poison(cache: Cache, value: float = jnp.nan) -> Cache:
    """Return an empty cache with `value` in every slot; the largest number where entries are integers."""

    def fill(array: jax.Array) -> jax.Array:
        is_integer = jnp.issubdtype(array.dtype, jnp.integer)
        filling = jnp.iinfo(array.dtype).max if is_integer else value
        if isinstance(array, jax.core.Tracer):
            return jnp.full_like(array, filling)
        # By NumPy: for JAX each shape would be a program. Committed to its device only if it was: a step is
        # compiled once for arrays that are and once for those that are not.
        place = array.sharding if array.committed else None
        return jax.device_put(np.full(array.shape, filling, array.dtype), place)

    pools = tuple(
        pool.replace(
            **{name: jax.tree.map(fill, getattr(pool, name)) for name in ("keys", "values", "recent")}
        )
        for pool in cache.pools
    )
    return cache.replace(pools=pools)
