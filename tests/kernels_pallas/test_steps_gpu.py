"""Steps through the door of attention with the GPU kernels, interpreted, over caches in every codec."""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.encoding import to_bfloat16
from jkv.cache.spec import CacheGroup, CacheSpec
from kernels_pallas.paged_attention import Tiling, pallas_gpu, pallas_gpu_prefill

from ..compare import assert_close, relative_errors
from ..gpu_kernels import interpret
from ..poison import poison
from .faults import put_fault

pytestmark = pytest.mark.gate

TILING = Tiling(split_tokens=64, num_programs=2, is_interpreted=True)
CASES = {
    "bf16": CacheGroup(2, 2, 64, "bf16"),
    "int8": CacheGroup(2, 2, 64, "int8"),
    "fp8_e4m3": CacheGroup(2, 2, 64, "fp8_e4m3"),
    "fp8_e5m2": CacheGroup(2, 2, 80, "fp8_e5m2"),
    "int4": CacheGroup(2, 2, 128, "int4"),
    "int4_token": CacheGroup(2, 2, 128, "int4_token"),
    "int8/int4_token": CacheGroup(2, 2, 128, "int8", "int4_token"),
    "latent bf16": CacheGroup(2, 1, 128, "bf16", kind="latent", rope_dim=64),
    "latent int8": CacheGroup(2, 1, 128, "int8", kind="latent", rope_dim=64),
    "latent fp8_e4m3": CacheGroup(2, 1, 128, "fp8_e4m3", kind="latent", rope_dim=64),
}
NUM_HEADS = 4


def random(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    drawn = (jax.random.normal(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes))
    return [to_bfloat16(each).astype(jnp.bfloat16) for each in drawn]


@pytest.mark.parametrize("name", CASES)
def test_steps_through_the_door_are_those_of_the_definition(name: str):
    compare_steps(name)


@pytest.mark.parametrize("where", [pallas_gpu, pallas_gpu_prefill])
def test_pages_of_another_layer_are_found(where: ModuleType, monkeypatch):
    """Of the step's long part and of its others."""
    index = "[1]" if where is pallas_gpu else "[0]"
    put_fault((where, f"page_offset = counts_ref{index}", "page_offset = jnp.int32(0)"), monkeypatch)
    with pytest.raises(AssertionError, match="relative error"):
        compare_steps("bf16")


def compare_steps(name: str) -> None:
    """A prefill, then a ragged step of a decode beside a chunk."""
    group = CASES[name]
    spec = CacheSpec.create([group], page_size=32)

    def attend(cache: Cache, batch: TokenBatch, rows: tuple[int, int], key: jax.Array, dtype, **options):
        if group.kind == "latent":
            latent, rope = group.dims
            shapes = (*rows, NUM_HEADS, latent), (*rows, NUM_HEADS, rope), (*rows, latent), (*rows, rope)
            query, rope_query, *entries = random(key, *shapes)
            queries = query.astype(dtype), rope_query.astype(dtype)
            return ops.attend_latent(*queries, *entries, cache, (0, 1), batch, scale=0.1, **options)
        query, *entries = random(key, *((*rows, count, group.head_dim) for count in (NUM_HEADS, 2, 2)))
        return ops.attend(query.astype(dtype), *entries, cache, (0, 1), batch, scale=0.1, **options)

    @functools.partial(jax.jit, static_argnames=("implementation", "dtype", "tiling"))
    def run_steps(*, dtype=jnp.bfloat16, **options) -> list[jax.Array]:
        cache, outs = poison(Cache.dense(spec, num_sequences=2, capacity=64)), []
        for step, lens in enumerate(([30, 0], [1, 20])):
            if step == 0:
                cache, batch = cache.begin(jnp.array(lens, jnp.int32), time=max(lens))
            else:
                cache, batch = cache.begin_ragged(jnp.array(lens, jnp.int32), num_tokens=32)
            rows = ((2, max(lens)), (1, 32))[step]
            out, cache, _ = attend(cache, batch, rows, jax.random.key(step), dtype, **options)
            outs.append(out)
        return outs

    # Long steps of heads are one kernel, all else two: what attends, and what merges. Each step is written by
    # one where that encodes it.
    num_kernels = 4 if group.kind == "latent" else 3
    if group.kind == "gqa" and all(codec.scaling == "token" for codec in group.codecs):
        num_kernels += 2
    call = functools.partial(run_steps, implementation="pallas_gpu", tiling=TILING)
    found = interpret(call, num_kernels=num_kernels)
    expected = run_steps(implementation="reference")
    exact = run_steps(implementation="reference", dtype=jnp.float32)
    for out, rounded, right in zip(found, expected, exact, strict=True):
        assert_close(out, right, 2 * max(relative_errors(rounded, right)))
