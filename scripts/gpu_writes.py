"""Compares page writes by the GPU kernel, which encodes, with those that XLA makes.

A line for each codec and step: how many entries are others, as a share of the step's, and the largest
relative error of scales. Not interpreted, the microseconds of a layer's write by both follow, with rotation
and encoding.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from scripts.gpu_cases import WRITE_STEPS, all_writes

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
# Sums and shares that are rounded otherwise move scales by that much, and few of the step's entries past a
# border.
MAX_OTHERS, MAX_SCALE_ERROR = 1e-3, 1e-5
# Of a timed program, and how often it runs.
CALLS, REPEATS = 1024, 3


def make_step(
    codec: str, rows: tuple[int, int], num_layers: int
) -> tuple[Cache, TokenBatch, tuple[jax.Array, jax.Array]]:
    """Return a cache that holds numbers everywhere, a step of it, and its keys and values."""
    group = CacheGroup(num_layers, NUM_HEADS, HEAD_DIM, codec)
    spec = CacheSpec.create([group], page_size=PAGE_SIZE, max_chunk=rows[1], layout="plain")
    cache = Cache.dense(spec, num_sequences=rows[0], capacity=2 * rows[1] + PAGE_SIZE)
    (pool,) = cache.pools
    keys, values = jax.tree.map(lambda array: jnp.full_like(array, 3), (pool.keys, pool.values))
    cache = cache.replace(pools=(pool.replace(keys=keys, values=values),))
    cache, batch = cache.begin(jnp.full(rows[0], rows[1], jnp.int32), time=rows[1])
    shape = 2, *rows, NUM_HEADS, HEAD_DIM
    key, value = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return cache, batch, (key, value)


def compare(codec: str, rows: tuple[int, int], num_layers: int = 2) -> dict[str, Any]:
    """Write a step into the last layer by the kernel and by XLA; return what is other."""
    cache, batch, heads = make_step(codec, rows, num_layers)
    where = 0, num_layers - 1
    found, expected = (
        jax.jit(functools.partial(ops.append, implementation=name), static_argnums=1)(
            cache, where, batch, *heads
        ).pools[0]
        for name in ("pallas_gpu", "xla")
    )
    others, errors = [], []
    for own, other in ((found.keys, expected.keys), (found.values, expected.values)):
        # Wherever in the pool they are.
        others.append(np.sum(np.asarray(own.data) != np.asarray(other.data)) / heads[0].size)
        errors.append(np.max(np.abs(np.asarray(own.scale) / np.asarray(other.scale) - 1)))
    passed = max(others) <= MAX_OTHERS and max(errors) <= MAX_SCALE_ERROR
    return {"others": float(max(others)), "scale_error": float(max(errors)), "passed": bool(passed)}


def microseconds(codec: str, rows: tuple[int, int], implementation: ops.Implementation) -> float:
    """Return the time of a layer's write, of other heads every time, layer after layer."""
    cache, batch, heads = make_step(codec, rows, NUM_LAYERS)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(cache: Cache, batch: TokenBatch, heads: Any) -> Cache:
        def write(i: jax.Array, cache: Cache) -> Cache:
            own = (each * (1 + i).astype(each.dtype) for each in heads)
            return ops.append(cache, (0, i % NUM_LAYERS), batch, *own, implementation=implementation)

        return jax.lax.fori_loop(0, CALLS, write, cache)

    cache, times = jax.block_until_ready(program(cache, batch, heads)), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        cache = jax.block_until_ready(program(cache, batch, heads))
        times.append(time.perf_counter() - start)
    return min(times) / CALLS * 1e6


def lines(only: str, *, is_interpreted: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of what has `only` in its name; one whose kernel is wrong has no times."""
    for name, (step, codec) in all_writes().items():
        if only not in name:
            continue
        line = {"page_write": step, "codec": codec, **compare(codec, WRITE_STEPS[step])}
        if line["passed"] and not is_interpreted:
            line |= {
                f"{who}_us": microseconds(codec, WRITE_STEPS[step], who) for who in ("pallas_gpu", "xla")
            }
        yield line
