"""The decode loop as a program: what it updates in place, what crosses jit, what it compiles."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jkv.cache.cache import Cache
from jkv.decode.loop import RUNNING, DecodeState, decode, prefill
from jkv.decode.params import SamplingParams
from jkv.decode.sampling import Sampler
from jkv.in_place import assert_programs_update_in_place
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.model_config import ModelConfig
from jkv.models.step import split_model
from jkv.ops import choice
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


def make_model(config: ModelConfig = CONFIG):
    """Return a new step function and weights far smaller than the caches."""
    return split_model(Decoder(config, rngs=nnx.Rngs(0)))


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


def compile_loop(rows: int, num_tokens: int, config: ModelConfig = CONFIG):
    """Compile the loop of a model whose cache holds `num_tokens` over all rows."""
    step, weights = make_model(config)
    return decode.lower(step, weights, make_state(rows, num_tokens // rows), 1).compile()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_loop_updates_its_cache_in_place(rows: int):
    assert_programs_update_in_place(compile_loop(rows, SMALL_TOKENS), compile_loop(rows, LARGE_TOKENS))


def test_the_gate_finds_a_write_that_takes_a_layer_out_and_puts_it_back(monkeypatch: pytest.MonkeyPatch):
    def write_layer(pool, rows, slots, *, page_offset, page_size):
        num_pages = pool.shape[0] // CONFIG.num_layers
        layer = jax.lax.dynamic_slice_in_dim(pool, page_offset, num_pages)
        layer = page_write.xla(layer, rows, slots, page_offset=0, page_size=page_size)
        return jax.lax.dynamic_update_slice_in_dim(pool, layer, page_offset, axis=0)

    monkeypatch.setattr(choice, "page_write", SimpleNamespace(xla=write_layer))
    # What was traced for a layer is kept: this write goes into one that no other test has.
    config = replace(CONFIG, norm_eps=1e-5)
    small, large = (compile_loop(2, num_tokens, config) for num_tokens in (SMALL_TOKENS, LARGE_TOKENS))
    with pytest.raises(AssertionError, match="temporaries must grow by at most"):
        assert_programs_update_in_place(small, large)


def test_only_arrays_cross_into_the_loop():
    step, weights = make_model()
    assert isinstance(weights, tuple)
    assert all(isinstance(leaf, jax.Array) for leaf in weights)
    lowered = decode.lower(step, weights, make_state(2, 64), 1)
    arrays = jax.tree.leaves((weights, make_state(2, 64)))
    assert len(jax.tree.leaves(lowered.args_info)) == len(arrays) + 1


def test_a_chunk_updates_its_cache_in_place():
    step, weights = make_model()
    tokens, lens = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    logits = jax.ShapeDtypeStruct((2, CONFIG.vocab_size), jnp.float32)
    small, large = (
        prefill.lower(step, weights, make_state(2, num_tokens // 2).cache, tokens, lens, logits).compile()
        for num_tokens in (SMALL_TOKENS, LARGE_TOKENS)
    )
    assert_programs_update_in_place(small, large)
