"""The decoder: which rows get logits, what its switches add, and its cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jkv.cache.cache import Cache
from jkv.models.decoder import Block, Decoder, cache_places, cache_spec
from jkv.models.step import split_model

from ..compare import assert_close
from ..poison import poison
from ..tiny import make_config

CONFIG = make_config(num_layers=2, mlp_dim=24, windows=(None, 4))
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 0, 0]], jnp.int32)
LENS = jnp.array([6, 4], jnp.int32)


def make_model(**changes) -> Decoder:
    return Decoder(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def cached_logits(model: Decoder, outputs: str) -> jax.Array:
    spec = cache_spec(model.config, page_size=4, codec="f32")
    cache = poison(Cache.dense(spec, num_sequences=2, capacity=8))
    step, weights = split_model(model)

    @jax.jit
    def run(weights, cache):
        cache, batch = cache.begin(LENS, time=6, outputs=outputs)
        return step(weights, TOKENS, cache, batch)[0]

    return run(weights, cache)


def test_the_last_rows_logits_are_those_of_all_rows():
    model = make_model()
    last, every = cached_logits(model, "last"), cached_logits(model, "all")
    assert every.shape == (2, 6, 32)
    assert_close(last, jnp.stack([every[0, 5], every[1, 3]]))


def test_a_ragged_steps_logits_are_those_of_a_padded_one():
    model = make_model()
    cache = poison(Cache.dense(cache_spec(model.config, page_size=4), num_sequences=2, capacity=8))
    step, weights = split_model(model)

    @functools.partial(jax.jit, static_argnames="outputs")
    def run(weights, cache, outputs):
        cache, batch = cache.begin_ragged(LENS, num_tokens=12, outputs=outputs)
        tokens = jnp.concatenate([TOKENS[0], TOKENS[1, :4], jnp.zeros(2, jnp.int32)])[None]
        return step(weights, tokens, cache, batch)[0]

    assert_close(run(weights, cache, "last"), cached_logits(model, "last"))
    every = cached_logits(model, "all")
    assert_close(run(weights, cache, "all")[0, :10], jnp.concatenate([every[0], every[1, :4]]))


def test_padding_of_a_row_gives_finite_logits():
    assert jnp.isfinite(cached_logits(make_model(), "all")).all()


def test_layers_of_one_kind_are_traced_once(monkeypatch: pytest.MonkeyPatch):
    traced, run = [], Block.__call__
    monkeypatch.setattr(
        Block, "__call__", lambda self, *args, **named: traced.append(self) or run(self, *args, **named)
    )
    # Sizes that no other test has: what was traced is kept.
    model = make_model(num_layers=4, windows=(None, 4, None, None), mlp_dim=56)
    jax.eval_shape(model, TOKENS)
    assert len(traced) == 2


def test_a_model_runs_by_itself_and_in_a_program_that_closes_over_it():
    model = make_model()
    step, weights = split_model(model)
    expected, _ = jax.jit(step)(weights, TOKENS, None, None)
    assert_close(model(TOKENS)[0], expected)
    assert_close(jax.jit(lambda tokens: model(tokens)[0])(TOKENS), expected)


@pytest.mark.parametrize(
    ("switch", "names"),
    [
        ({"has_qk_norm": True}, {"q_norm.scale", "k_norm.scale"}),
        ({"has_qkv_bias": True}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        ({"has_output_bias": True}, {"o_proj.bias"}),
        ({"has_mlp_bias": True}, {"gate_proj.bias", "up_proj.bias", "down_proj.bias"}),
        ({"has_sinks": True}, {"attention.sinks"}),
        ({"has_post_norms": True}, {"attention_post_norm.scale", "mlp_post_norm.scale"}),
    ],
)
def test_a_switch_adds_its_parameters_and_no_others(switch: dict, names: set[str]):
    def parameters(model: Decoder) -> set[str]:
        return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    added = parameters(make_model(**switch)) - parameters(make_model())
    assert {".".join(name.split(".")[-2:]) for name in added} == names


def test_a_tied_head_is_the_embedding():
    model = make_model(is_tied=True)
    assert model.lm_head is None
    assert_close(model(TOKENS)[0], model.embed.attend(model.norm(run_layers(model))), tolerance=1e-6)


def run_layers(model: Decoder) -> jax.Array:
    x = model.embed(TOKENS)
    for layer in model.layers:
        x, _ = layer(x)
    return x


def test_layers_of_one_window_share_a_cache_group():
    config = make_config(num_layers=5, windows=(4, None, 4, 8, None))
    assert cache_places(config) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]
    spec = cache_spec(config, page_size=4, codec="int8", value_codec="int4", window_codec="bf16", max_chunk=2)
    shown = [(group.num_layers, group.window, group.codec, group.value_codec) for group in spec.groups]
    assert shown == [(2, 4, "bf16", None), (2, None, "int8", "int4"), (1, 8, "bf16", None)]
    assert {(group.num_kv_heads, group.head_dim) for group in spec.groups} == {(1, 8)}
    assert [spec.pages_for(100, group) for group in range(3)] == [2, 25, 3]


def test_a_cache_without_a_longest_step_keeps_every_token():
    assert [group.window for group in cache_spec(CONFIG, page_size=4).groups] == [None, None]
