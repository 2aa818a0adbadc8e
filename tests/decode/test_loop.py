"""The decode loop as a program: what it updates in place, what crosses jit, what it compiles."""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jkv import ops
from jkv.cache.cache import Cache
from jkv.decode.loop import RUNNING, DecodeState, decode, prefill
from jkv.decode.params import SamplingParams
from jkv.decode.sampling import Sampler
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model
from kernels_pallas import page_write

from ..tiny import make_config

CONFIG = make_config(
    vocab_size=64,
    num_layers=2,
    embed_dim=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=64,
    max_length=2**20,
)
SPEC = cache_spec(CONFIG, page_size=16, codec="f32")
# The key pool of the smaller one is 384 MB: past 256 MB XLA's CPU backend plans memory as for a real cache.
SMALL_TOKENS, LARGE_TOKENS = 49_152, 98_304


def make_model():
    """Return a new step function and weights far smaller than the caches."""
    return split_model(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def make_state(rows: int, capacity: int) -> DecodeState:
    """Return the shapes of a state; nothing is allocated."""

    def make() -> DecodeState:
        params = [SamplingParams()] * rows
        prompts = [[1]] * rows
        return DecodeState(
            cache=Cache.dense(SPEC, num_sequences=rows, capacity=capacity),
            sampler=Sampler.create(params, vocab_size=CONFIG.vocab_size, prompts=prompts, base_seed=0),
            token=jnp.zeros(rows, jnp.int32),
            num_new=jnp.zeros(rows, jnp.int32),
            finish=jnp.full(rows, RUNNING, jnp.int32),
            limits=jnp.full(rows, 8, jnp.int32),
            stop_ids=jnp.full(1, -1, jnp.int32),
            new_tokens=jnp.zeros((rows, 16), jnp.int32),
            logprobs=jnp.zeros((rows, 16), jnp.float32),
            top_tokens=jnp.zeros((rows, 16, 0), jnp.int32),
            top_logprobs=jnp.zeros((rows, 16, 0), jnp.float32),
        )

    return jax.eval_shape(make)


def compile_loop(rows: int, num_tokens: int, loop=decode):
    """Compile the loop of a model whose cache holds `num_tokens` over all rows."""
    step, weights = make_model()
    return loop.lower(step, weights, make_state(rows, num_tokens // rows), 1).compile()


def copies_of_pools(compiled, num_tokens: int) -> list[str]:
    """Return the instructions that copy or transpose an array as large as a key pool."""
    entries = CONFIG.num_layers * num_tokens * CONFIG.num_kv_heads * CONFIG.head_dim
    found = []
    for line in compiled.as_text().splitlines():
        made = re.search(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", line)
        if made and math.prod(map(int, made[1].split(","))) >= entries:
            found.append(line.strip())
    return found


def added_temporaries(small, large) -> float:
    """Return the temporary bytes that each added byte of cache costs."""
    added = (LARGE_TOKENS - SMALL_TOKENS) * SPEC.bytes_per_token
    return (large.memory_analysis().temp_size_in_bytes - small.memory_analysis().temp_size_in_bytes) / added


@pytest.mark.parametrize("rows", [1, 2])
def test_a_loop_updates_its_cache_in_place(rows: int):
    small, large = compile_loop(rows, SMALL_TOKENS), compile_loop(rows, LARGE_TOKENS)
    assert large.memory_analysis().alias_size_in_bytes >= LARGE_TOKENS * SPEC.bytes_per_token
    assert added_temporaries(small, large) <= 0.01
    assert copies_of_pools(large, LARGE_TOKENS) == []


def test_the_gate_finds_a_loop_that_is_not_donated():
    loop = jax.jit(decode.__wrapped__, static_argnames="step")
    large = compile_loop(2, LARGE_TOKENS, loop)
    assert large.memory_analysis().alias_size_in_bytes < LARGE_TOKENS * SPEC.bytes_per_token
    assert copies_of_pools(large, LARGE_TOKENS) != []


def test_the_gate_finds_a_write_that_takes_a_layer_out_and_puts_it_back(monkeypatch: pytest.MonkeyPatch):
    def write_layer(pool, rows, slots, *, page_offset):
        num_pages = pool.shape[0] // CONFIG.num_layers
        layer = jax.lax.dynamic_slice_in_dim(pool, page_offset, num_pages)
        layer = page_write.xla(layer, rows, slots, page_offset=0)
        return jax.lax.dynamic_update_slice_in_dim(pool, layer, page_offset, axis=0)

    monkeypatch.setattr(ops, "page_write", SimpleNamespace(xla=write_layer))
    assert added_temporaries(compile_loop(2, SMALL_TOKENS), compile_loop(2, LARGE_TOKENS)) > 0.01


def test_only_arrays_cross_into_the_loop():
    step, weights = make_model()
    assert isinstance(weights, tuple)
    assert all(isinstance(leaf, jax.Array) for leaf in weights)
    lowered = decode.lower(step, weights, make_state(2, 64), 1)
    arrays = jax.tree.leaves((weights, make_state(2, 64)))
    assert len(jax.tree.leaves(lowered.args_info)) == len(arrays) + 1


def test_a_chunk_updates_its_cache_in_place():
    step, weights = make_model()
    cache = make_state(2, LARGE_TOKENS // 2).cache
    tokens, lens = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    logits = jax.ShapeDtypeStruct((2, CONFIG.vocab_size), jnp.float32)
    compiled = prefill.lower(step, weights, cache, tokens, lens, logits).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= LARGE_TOKENS * SPEC.bytes_per_token
    assert copies_of_pools(compiled, LARGE_TOKENS) == []
