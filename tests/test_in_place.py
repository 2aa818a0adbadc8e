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
from jkv.in_place import (
    _makers,
    added_temporaries,
    assert_programs_update_in_place,
    assert_updates_in_place,
    made_anew,
)

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


def loop(cache: Cache, query: jax.Array) -> tuple[Cache, jax.Array]:
    """Take 32 steps of two layers; their rows depend on what was attended, as in a model."""

    def step(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, query = carry
        cache, batch = cache.begin(jnp.ones(ROWS, jnp.int32), time=1)
        for layer in range(2):
            window = cache.spec.groups[0].window
            rows = query[:, :, :NUM_HEADS]
            query, cache = ops.attend(query, rows, rows, cache, (0, layer), batch, scale=0.1, window=window)
        return cache, query

    return jax.lax.fori_loop(0, 32, step, (cache, query))


QUERY = jax.ShapeDtypeStruct((ROWS, 1, 2 * NUM_HEADS, HEAD_DIM), jnp.float32)


def check(function: Callable[..., Any], codec: str, layout: str = "dense") -> None:
    small, large = ((make_cache(codec, tokens // ROWS, layout), QUERY) for tokens in (SMALL, LARGE))
    assert_updates_in_place(function, small, large, compiler_options=COMPILER_OPTIONS["cpu"])


@pytest.mark.gate
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "fp8_e4m3", "int4", "int8/int4_token"])
@pytest.mark.parametrize("layout", ["dense", "paged", "window"])
def test_a_loop_updates_every_form_of_the_cache_in_place(layout: str, codec: str):
    check(loop, codec, layout)


def reverse(cache: Cache, query: jax.Array) -> Cache:
    """Put the pages in another order, which no program can do in place."""
    (pool,) = cache.pools
    return cache.replace(pools=(pool.replace(keys=jax.tree.map(lambda array: array[::-1], pool.keys)),))


def drop(cache: Cache, query: jax.Array) -> jax.Array:
    """Return no cache."""
    return cache.pools[0].keys.data.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drop, r"all that is donated must be aliased, .* bytes, got 0"),
        (reverse, r"temporaries must grow by at most 0\.01 bytes for each added byte, got 0\.[3-9]"),
    ],
)
def test_what_is_not_in_place_is_said(function: Callable[..., Any], message: str):
    with pytest.raises(AssertionError, match=message):
        check(function, "bf16")


def compile_both(function: Callable[..., Any], **options: Any) -> list[jax.stages.Compiled]:
    """Compile a function of one array for two sizes of it."""
    shapes = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (128, 256)]
    return [jax.jit(function, **options).lower(shape).compile() for shape in shapes]


MAKERS: dict[str, Callable[[jax.Array], Any]] = {
    "copy": lambda x: (x.at[0].set(1), x),
    "convert": lambda x: (x, x.astype(jnp.bfloat16)),
    "transpose": lambda x: (x, x.T),
    "bitcast-convert": lambda x: (x, jax.lax.bitcast_convert_type(x, jnp.int32)),
}


@pytest.mark.parametrize("operation", MAKERS)
def test_each_way_to_make_the_cache_anew_is_found(operation: str):
    found = made_anew(*compile_both(MAKERS[operation], donate_argnums=0))
    assert any(f" {operation}(" in line for line in found), found


def test_what_no_program_of_the_cpu_does_is_found_too():
    """Asynchronous copies make tuples; a reshape is a copy where tiles change."""
    program = """
        %copy-start.1 = (f32[2,8]{1,0:T(2,128)S(1)}, f32[2,8]{1,0}, u32[]{:S(2)}) copy-start(%p)
        %small = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[]) copy-start(%p)
        ROOT %reshape = s4[16]{0:T(1024)(8,1)} reshape(%q), metadata={op_name="reshape"}
        %kept = f32[2,8]{1,0} add(%p, %p), metadata={op_name=" copy("}
    """
    assert [line.split()[0] for line in _makers(program, 16)] == ["%copy-start.1", "ROOT"]


def test_an_output_that_is_not_aliased_counts():
    assert added_temporaries(*compile_both(lambda x: (x + 1, x + 2), donate_argnums=0)) == 1


def test_a_program_that_is_donated_nothing_is_refused():
    with pytest.raises(ValueError, match="must be donated more bytes than the smaller one, got 0 and 0"):
        assert_programs_update_in_place(*compile_both(MAKERS["copy"]))
