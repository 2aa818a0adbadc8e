"""What a call of attention, or of a write, must agree on with the cache.

Knows sizes; every refusal names them.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache, check_shards
from jkv.cache.spec import CacheGroup
from jkv.sharding import Sharding

Where = tuple[int, Int[Array, ""] | int]


def check_options(
    query: Any, scale: Any, window: int | None = None, soft_cap: float | None = None, sinks: Any = None
) -> None:
    """Refuse options that are out of their range; a traced scale is taken on trust."""
    if query.ndim != 4 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            "queries must be numbers with a fraction in [row, time, q_head, head_dim], "
            f"got {query.dtype}{list(query.shape)}"
        )
    if not isinstance(scale, Tracer) and not np.isfinite(scale).all():
        raise ValueError(f"scale must be finite, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be above 0 and finite, got {soft_cap}; None is none")
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(f"sinks must be one a query head, {query.shape[2:3]}, got {sinks.shape}")


def check_own(query: Any, key: Any, value: Any) -> None:
    """Refuse keys and values that are not those of the queries' tokens, where there is no cache."""
    shapes = [array.shape for array in (query, key, value)]
    places = {shape[:2] for shape in shapes}
    if {len(shape) for shape in shapes} != {4} or len(places) > 1 or key.shape[2] != value.shape[2]:
        raise ValueError(
            "without a cache queries, keys and values must be of the same rows and tokens, keys and values "
            f"of as many heads, got {', '.join(map(str, shapes))}"
        )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"keys must have the queries' head_dim, {query.shape[3]}, got {key.shape[3]}")


def check_place(
    cache: Cache,
    where: Where | None,
    batch: TokenBatch | None,
    window: int | None,
    sharding: Sharding | None,
    *rows: Any,
) -> tuple[Where, TokenBatch]:
    """Refuse a place or rows that the step has not, and a window that reaches past what its group keeps."""
    if where is None or batch is None:
        raise ValueError("attention with a cache needs `where` and the `batch` that `cache.begin` returned")
    check_step(cache, batch, sharding, *rows)
    spec = find_group(cache, where)
    if spec.window is not None and (window is None or window > spec.window):
        raise ValueError(
            f"the cache group keeps the latest {spec.window} tokens, so a window of at most that is needed, "
            f"got {window}"
        )
    return where, batch


def check_step(cache: Cache, batch: TokenBatch, sharding: Sharding | None, *rows: Any) -> None:
    """Refuse a step that the cache's shards cannot take, and rows that are not the step's."""
    check_shards(cache, sharding)
    for array in rows:
        if array is not None and array.shape[:2] != batch.positions.shape:
            raise ValueError(
                f"the step's rows and their tokens are {batch.positions.shape}, got an array of {array.shape}"
            )
    if batch.sequences is not None and sharding is not None and sharding.size("seq") > 1:
        raise ValueError(
            f"a ragged step is one row of all sequences, got a mesh that splits them {sharding.size('seq')} "
            "ways; open the step with `cache.begin`"
        )


def find_group(cache: Cache, where: Where) -> CacheGroup:
    """Return the group of a place that the cache has; refuse others, but for traced layers."""
    group, layer = where
    if not 0 <= group < len(cache.pools):
        raise ValueError(f"cache group must be in [0, {len(cache.pools)}), got {group}")
    spec = cache.spec.groups[group]
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < spec.num_layers:
        raise ValueError(f"layer must be in [0, {spec.num_layers}) of cache group {group}, got {layer}")
    return spec


def check_heads(spec: CacheGroup, key: Any, value: Any) -> None:
    """Refuse rows that are not the group's heads."""
    names = ("latents", "rotated parts") if spec.kind == "latent" else ("keys", "values")
    for name, rows, dim in zip(names, (key, value), spec.dims, strict=True):
        sizes = (spec.num_kv_heads, dim)
        if rows is not None and rows.shape[2:] != sizes:
            raise ValueError(
                f"{name} must have the cache's KV heads and head_dim, {sizes}, got {rows.shape[2:]}"
            )
