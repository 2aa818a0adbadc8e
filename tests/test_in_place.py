"""Loops over every form of the cache update it in place, and the check that says so catches what is not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.platform import COMPILER_OPTIONS
from jkv.in_place import _remade, assert_updates_in_place

ROWS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 2, 8, 128, 64
# Each pool array of entries is past 256 MB: below that XLA's CPU backend plans memory otherwise.
SMALL, LARGE = 2**19, 2**20


def make_cache(codec: str, capacity: int, layout: str = "dense") -> Cache:
    """Return the shapes of a cache of two layers."""
    keys, _, values = codec.partition("/")
    window = capacity - 64 if layout == "window" else None
    group = CacheGroup(2, NUM_HEADS, HEAD_DIM, keys, values or None, window=window)
    spec = CacheSpec.create([group], page_size=PAGE_SIZE, max_chunk=16)
    sizes = {"num_sequences": ROWS, "capacity": 2 * capacity if layout == "window" else capacity}
    if layout == "paged":
        make = functools.partial(Cache.paged, spec, **sizes, num_pages=[ROWS * capacity // PAGE_SIZE])
    else:
        make = functools.partial(Cache.dense, spec, **sizes)
    return jax.eval_shape(make)


def loop(cache: Cache, query: jax.Array, key: jax.Array) -> Cache:
    """Take 32 steps of two layers."""

    def step(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, query = carry
        cache, batch = cache.begin(jnp.ones(ROWS, jnp.int32), time=1)
        for layer in range(2):
            window = cache.spec.groups[0].window
            query, cache = ops.attend(query, key, key, cache, (0, layer), batch, scale=0.1, window=window)
        return cache, query

    return jax.lax.fori_loop(0, 32, step, (cache, query))[0]


HEADS = [
    jax.ShapeDtypeStruct((ROWS, 1, heads, HEAD_DIM), jnp.float32) for heads in (2 * NUM_HEADS, NUM_HEADS)
]


def check(function: Callable[..., Any], codec: str, layout: str = "dense") -> None:
    small, large = ((make_cache(codec, tokens // ROWS, layout), *HEADS) for tokens in (SMALL, LARGE))
    assert_updates_in_place(function, small, large, compiler_options=COMPILER_OPTIONS["cpu"])


@pytest.mark.gate
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "fp8_e4m3", "int4", "int8/int4"])
@pytest.mark.parametrize("layout", ["dense", "paged", "window"])
def test_a_loop_updates_every_form_of_the_cache_in_place(layout: str, codec: str):
    check(loop, codec, layout)


def reverse(cache: Cache, query: jax.Array, key: jax.Array) -> Cache:
    """Put the pages in another order, which no program can do in place."""
    (pool,) = cache.pools
    return cache.replace(pools=(pool.replace(keys=jax.tree.map(lambda array: array[::-1], pool.keys)),))


def drop(cache: Cache, query: jax.Array, key: jax.Array) -> jax.Array:
    """Return no cache."""
    return cache.pools[0].keys.data.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drop, r"all of the first argument must be aliased, .* got 0"),
        (reverse, r"temporaries must grow by at most 0\.01 bytes for each added byte, got 0\.[3-9]"),
    ],
)
def test_what_is_not_in_place_is_said(function: Callable[..., Any], message: str):
    with pytest.raises(AssertionError, match=message):
        check(function, "bf16")


def test_a_copy_that_costs_no_temporaries_is_found():
    """One that another buffer has room for."""
    program = """
        %copy.1 = f32[2,8]{1,0} copy(%p)
        %small = f32[2,4]{1,0} copy(%p)
        ROOT %convert = bf16[16]{0} convert(%q)
    """
    assert len(_remade(program, 16)) == 2
