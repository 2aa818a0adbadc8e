"""KV heads made one: of copies without loss, of others by their mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.convert.pooling import pool_heads
from jkv.models.load import abstract_decoder, parameter_targets
from jkv.models.model_config import ModelConfig, with_kv_copies

from ..compare import assert_close
from ..tiny import make_config

CONFIG = make_config(num_heads=6, num_kv_heads=3, has_qkv_bias=True)


def draw_parameters(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    generator = np.random.default_rng(seed)
    return {
        name: jnp.asarray(generator.standard_normal(target.shape, np.float32) / 4)
        for name, target in parameter_targets(abstract_decoder(config)).items()
    }


def test_heads_that_are_copies_are_pooled_without_loss():
    parameters = draw_parameters(CONFIG)
    config = with_kv_copies(CONFIG, 2)
    copied = {
        name: array
        if "k_proj" not in name and "v_proj" not in name
        else array.reshape(3, 1, 8, *array.shape[1:]).repeat(2, axis=1).reshape(48, *array.shape[1:])
        for name, array in parameters.items()
    }
    pooled = pool_heads(config, copied, 3)
    assert pooled.config.num_kv_heads == 3
    assert all(errors == {"keys": 0, "values": 0} for errors in pooled.errors)
    for name, array in parameters.items():
        np.testing.assert_array_equal(pooled.parameters[name], array)


def test_a_pooled_head_is_the_mean_of_its_group_and_its_error_is_the_distance():
    parameters = draw_parameters(CONFIG)
    pooled = pool_heads(CONFIG, parameters, 1)
    for name, step in (("k_proj", "keys"), ("v_proj", "values")):
        heads = np.asarray(parameters[f"layers.0.attention.{name}.weight"]).reshape(3, 8, 16)
        got = pooled.parameters[f"layers.0.attention.{name}.weight"]
        assert_close(got, heads.mean(axis=0))
        lost = np.linalg.norm(heads - np.asarray(got)) / np.linalg.norm(heads)
        assert pooled.errors[0][step] == pytest.approx(lost, rel=1e-5)
        bias = np.asarray(parameters[f"layers.0.attention.{name}.bias"]).reshape(3, 8)
        assert_close(pooled.parameters[f"layers.0.attention.{name}.bias"], bias.mean(axis=0))


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "message"),
    [
        ({}, 2, "KV heads must divide the model's 3, got 2"),
        ({}, 0, "KV heads must divide the model's 3, got 0"),
        ({"is_qk_norm_wide": True}, 1, "got a norm over all heads at once"),
    ],
)
def test_what_does_not_pool_is_refused(changes, num_kv_heads, message):
    config = make_config(num_heads=6, num_kv_heads=3, **changes)
    with pytest.raises(ValueError, match=message):
        pool_heads(config, {}, num_kv_heads)
