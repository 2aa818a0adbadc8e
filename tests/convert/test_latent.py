"""KV heads made latents: exactly at full width, better the wider, and by what a text needs."""

import numpy as np
import pytest

from jkv.convert.latent import to_latent
from jkv.convert.measure import compare_models, make_decoder
from jkv.convert.moments import input_moments
from jkv.layers.latent import LatentDims
from jkv.layers.rope import RopeConfig, attention_scaling, inverse_frequencies

from ..compare import assert_close
from ..tiny import make_config
from .test_pooling import draw_parameters

YARN = RopeConfig(dim=8, scaling="yarn", factor=4.0, original_max_position=16, theta=100.0)
CONFIG = make_config(embed_dim=32, num_heads=6, num_kv_heads=3, rope=YARN)
TOKENS = np.random.default_rng(1).integers(0, 32, (2, 24)).astype(np.int32)
LAYER = "layers.0.attention."


@pytest.fixture(scope="module")
def parameters():
    return draw_parameters(CONFIG)


@pytest.fixture(scope="module")
def original(parameters):
    return make_decoder(CONFIG, parameters)


@pytest.fixture(scope="module")
def moments(original):
    return input_moments(original, TOKENS)


def test_all_entries_rotated_and_a_latent_of_full_rank_change_nothing(parameters, original):
    converted = to_latent(CONFIG, parameters, latent=32, rope=24)
    assert all(error < 1e-6 for error in converted.errors[0].values())
    comparison = compare_models(original, make_decoder(converted.config, converted.parameters), TOKENS)
    assert_close(comparison.nll, comparison.base_nll)


def test_entries_that_stay_rotated_keep_their_frequencies(parameters):
    config = to_latent(CONFIG, parameters, latent=4, rope=10).config
    assert config.latent == LatentDims(4, 10, 8, 8, has_norm=False)
    assert config.attention_scale == pytest.approx(8**-0.5 * attention_scaling(YARN) ** 2)
    kept, given = inverse_frequencies(config.rope), inverse_frequencies(YARN)
    assert all(np.isclose(frequency, given, rtol=1e-6).any() for frequency in kept)


def test_moments_are_of_what_the_projections_are_given(parameters, moments):
    rows = np.asarray(parameters["embed.embedding"], np.float64)[TOKENS.ravel()]
    rows /= np.sqrt((rows**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    rows *= np.asarray(parameters["layers.0.attention_norm.scale"])
    assert_close(moments[0], rows.T @ rows / len(rows))


def test_an_error_is_that_of_the_projection_on_the_text(parameters, moments):
    converted = to_latent(CONFIG, parameters, latent=12, rope=24, moments=moments)
    sizes, directions = np.linalg.eigh(moments[0])
    inputs = np.sqrt(sizes.clip(0))[:, None] * directions.T
    wanted = inputs @ np.asarray(parameters[f"{LAYER}v_proj.weight"]).T
    down = np.asarray(converted.parameters[f"{LAYER}kv_down.weight"][:12])
    up = np.asarray(converted.parameters[f"{LAYER}value_up"][::2]).reshape(24, 12)
    lost = np.linalg.norm(inputs @ down.T @ up.T - wanted) / np.linalg.norm(wanted)
    assert converted.errors[0]["values"] == pytest.approx(lost, rel=1e-4)
    assert 0.01 < lost < 0.9


def test_wider_latents_and_more_rotated_entries_lose_less(parameters, moments):
    def lost(latent: int, rope: int) -> dict[str, float]:
        return to_latent(CONFIG, parameters, latent=latent, rope=rope, moments=moments).errors[0]

    narrow, wide, turning = lost(8, 16), lost(16, 16), lost(16, 8)
    assert wide["keys"] < narrow["keys"]
    assert wide["values"] < narrow["values"]
    assert wide["rotation"] < turning["rotation"]


def test_a_text_s_directions_lose_less_on_it_than_all_directions(parameters, moments):
    values = np.asarray(parameters[f"{LAYER}v_proj.weight"], np.float64)

    def lost(moments) -> float:
        converted = to_latent(CONFIG, parameters, latent=12, rope=24, moments=moments).parameters
        down, up = converted[f"{LAYER}kv_down.weight"][:12], converted[f"{LAYER}value_up"][::2]
        rest = values - np.asarray(up).reshape(24, 12) @ np.asarray(down)
        return np.trace(rest @ text @ rest.T)

    text = moments[0]
    assert lost(moments) < 0.9 * lost(None)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"rope": 7}, "rotated entries must be even and from 2 to the KV heads' 24, got 7"),
        ({}, {"rope": 26}, "to the KV heads' 24, got 26"),
        ({}, {"latent": 33}, "a latent must have 1 to 32 entries"),
        ({}, {"span": 1}, "span must be at least 2 distances, got 1"),
        ({"has_qk_norm": True, "has_sinks": True}, {}, "without norms over its heads and sinks"),
        ({"rope": RopeConfig(dim=4)}, {}, "rotates its heads' 8 entries at .* always the same, got 4"),
    ],
)
def test_what_does_not_become_latents_is_refused(changes, sizes, message):
    config = make_config(embed_dim=32, num_heads=6, num_kv_heads=3, **changes)
    with pytest.raises(ValueError, match=message):
        to_latent(config, {}, **{"latent": 8, "rope": 4} | sizes)
