"""A step of a loop costs what the tokens written cost, whatever the capacity."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.platform import COMPILER_OPTIONS

from .loops import LAYOUTS, loop, make_arguments

SMALL, LARGE = 128, 8192
# Of two sequences in float32.
TOKEN_BYTES = 2**16


def growth(implementation: ops.Implementation, layout: str) -> float:
    """Return by how much a loop over a large cache has more operations, a block of a walk counted once."""
    counts = []
    for capacity in (SMALL, LARGE):
        arguments = make_arguments("f32", layout, capacity * TOKEN_BYTES)
        assert arguments[0].pools[0].page_table.shape[1] * 64 >= capacity
        function = functools.partial(loop, implementation=implementation)
        jitted = jax.jit(function, donate_argnums=0, compiler_options=COMPILER_OPTIONS["cpu"])
        counts.append(jitted.lower(*arguments).compile().cost_analysis()["flops"])
    return counts[1] / counts[0]


@pytest.mark.gate
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_a_large_cache_costs_what_one_of_a_small_cache_does(layout: str):
    assert growth("xla", layout) < 1.01


@pytest.mark.gate
def test_what_reads_all_of_the_capacity_is_found():
    assert growth("reference", "dense") > 0.9 * LARGE / SMALL


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(64, 1), (129, 2)])
def test_a_step_reads_the_blocks_of_the_tokens_written(
    num_tokens: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
):
    xla = importlib.import_module("kernels_pallas.paged_attention.xla")
    read, gather = [], xla.gather

    def counted(pages: Any, places: jax.Array) -> Any:
        jax.debug.callback(lambda: read.append(places.shape))
        return gather(pages, places)

    monkeypatch.setattr(xla, "gather", counted)
    spec = CacheSpec.create([CacheGroup(num_layers=1, num_kv_heads=1, head_dim=4)], page_size=64)
    rows = jnp.ones((1, num_tokens, 1, 4))
    for capacity in (256, LARGE):
        cache = Cache.dense(spec, num_sequences=1, capacity=capacity)
        cache, batch = cache.begin(jnp.array([num_tokens], jnp.int32), time=num_tokens)
        ops.attend(rows, rows, rows, cache, (0, 0), batch, scale=1.0, implementation="xla")
        jax.effects_barrier()
        # Of each block of 128 tokens its keys and its values.
        assert read == [(1, 2)] * 2 * num_blocks
        read.clear()
