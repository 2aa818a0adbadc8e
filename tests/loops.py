"""A loop of steps over every form of the cache, as shapes: what compilers are asked to update in place."""

import functools

import jax
import jax.numpy as jnp

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import choose_layout
from jkv.cache.spec import CacheGroup, CacheSpec

ROWS, NUM_LAYERS, NUM_HEADS = 2, 2, 8
CODECS = ("f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int8/int4_token", "int8_static")
LAYOUTS = ("dense", "paged", "window")
# Bytes of a cache. Pools of entries are past 256 MB: below that XLA's CPU backend plans memory otherwise. The
# larger cache's scales are as large as a TPU's VMEM, 128 MB, in which XLA keeps smaller arrays.
SMALL, LARGE = 2**32, 2**33


def make_arguments(
    codec: str,
    layout: str,
    nbytes: int,
    *,
    page_size: int = 64,
    head_dim: int = 128,
    num_rows: int = ROWS,
    time: int = 1,
    platform: str = "cpu",
) -> tuple[Cache, jax.ShapeDtypeStruct]:
    """Return the shapes of a loop's arguments: a cache of about `nbytes`, and the first queries.

    Args:
        codec: of keys, and of values after a slash.
        layout: one of `LAYOUTS`.
        nbytes: of the cache, padding included.
        page_size: tokens of a page.
        head_dim: entries of a head.
        num_rows: sequences.
        time: new tokens of each in a step.
        platform: of the device, whose pool layout the cache gets.
    """
    keys, _, values = codec.partition("/")
    group = CacheGroup(NUM_LAYERS, NUM_HEADS, head_dim, keys, values or None)
    form = {
        "page_size": page_size,
        "max_chunk": max(page_size, time),
        "layout": choose_layout("auto", platform),
    }
    num_pages = nbytes // (CacheSpec.create([group], **form).padded_bytes_per_page * num_rows)
    capacity = num_pages * page_size
    sizes = {"num_sequences": num_rows, "capacity": capacity}
    if layout == "window":
        # A ring: a window that is narrower than the capacity by far.
        group = CacheGroup(
            NUM_LAYERS, NUM_HEADS, head_dim, keys, values or None, window=capacity - form["max_chunk"]
        )
        sizes["capacity"] = 2 * capacity
    spec = CacheSpec.create([group], **form)

    def make() -> Cache:
        scales = [
            tuple(
                jnp.ones((NUM_LAYERS, NUM_HEADS)) if one.scaling == "static" else None for one in group.codecs
            )
        ]
        if layout == "paged":
            return Cache.paged(spec, **sizes, num_pages=[num_rows * num_pages], scales=scales)
        return Cache.dense(spec, **sizes, scales=scales)

    query = jax.ShapeDtypeStruct((num_rows, time, 2 * NUM_HEADS, head_dim), jnp.float32)
    return jax.eval_shape(make), query


def loop(
    cache: Cache, query: jax.Array, implementation: ops.Implementation = "auto"
) -> tuple[Cache, jax.Array]:
    """Take 32 steps of all layers; their rows depend on what was attended, as in a model."""

    def step(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, query = carry
        time = query.shape[1]
        cache, batch = cache.begin(jnp.full_like(cache.lengths, time), time=time)
        window = cache.spec.groups[0].window
        attend = functools.partial(ops.attend, scale=0.1, window=window, implementation=implementation)
        for layer in range(NUM_LAYERS):
            rows = query[:, :, :NUM_HEADS]
            query, cache, _ = attend(query, rows, rows, cache, (0, layer), batch)
        return cache, query

    return jax.lax.fori_loop(0, 32, step, (cache, query))
