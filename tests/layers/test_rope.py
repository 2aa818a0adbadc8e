"""The rotary embedding against published numbers and an independent rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.layers.rope import (
    RopeConfig,
    attention_scaling,
    inverse_frequencies,
    rotate,
    rotations,
    softmax_correction,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def make_rope(
    parameters: dict, dim: int = 128, theta: float = 500_000.0, max_position: int = 131_072
) -> RopeConfig:
    return RopeConfig.from_hf(parameters, dim=dim, theta=theta, max_position=max_position)


def make_deepseek_yarn(**mscales: float) -> RopeConfig:
    parameters = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **mscales}
    return make_rope(parameters, dim=64, theta=10_000.0)


def test_plain_frequencies_are_the_geometric_series():
    expected = [1 / 10_000 ** (i / 8) for i in (0, 2, 4, 6)]
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(dim=8)), expected, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaled = make_rope({"type": "linear", "factor": 4})
    plain = make_rope({})
    np.testing.assert_allclose(inverse_frequencies(scaled) * 4, inverse_frequencies(plain), rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between():
    plain = inverse_frequencies(make_rope({}))
    ratio = plain / inverse_frequencies(make_rope(LLAMA3))
    wavelengths = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 2048], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 8, rtol=1e-6)
    between = ratio[(wavelengths > 2048) & (wavelengths < 8192)]
    assert between.size > 0
    assert np.all((between > 1) & (between < 8))
    assert np.all(np.diff(between) > 0)


def test_a_frequency_table_gives_the_llama3_frequencies():
    plain = inverse_frequencies(make_rope({}))
    scaled = inverse_frequencies(make_rope(LLAMA3))
    table = RopeConfig(dim=128, theta=500_000.0, frequency_factors=tuple((plain / scaled).tolist()))
    np.testing.assert_allclose(inverse_frequencies(table), scaled, rtol=1e-6)


def test_a_frequency_table_of_another_size_is_refused():
    with pytest.raises(ValueError, match="needs 4 frequency factors, got 3"):
        inverse_frequencies(RopeConfig(dim=8, frequency_factors=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta": 0.0}, "a finite base above 0, got 0.0"),
        ({"theta": math.inf}, "a finite base above 0, got inf"),
        ({"scaling": "ntk"}, r"scaling must be one of \('none', .*\), got 'ntk'"),
    ],
)
def test_a_base_or_a_scaling_that_is_none_is_refused(changes: dict, message: str):
    config = RopeConfig(dim=8)
    # Past the runner's own check of types, which users do not have.
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(config)


def test_an_odd_number_of_rotated_entries_is_refused():
    with pytest.raises(ValueError, match="even, positive number of rotated entries, got 7"):
        inverse_frequencies(RopeConfig(dim=7))


@pytest.mark.parametrize(
    ("mscales", "cos_scale", "softmax_scale"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.590),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0, 1.874),
        ({}, 1.369, 1.0),
    ],
)
def test_yarn_scales_are_deepseeks(mscales: dict, cos_scale: float, softmax_scale: float):
    config = make_deepseek_yarn(**mscales)
    assert attention_scaling(config) == pytest.approx(cos_scale, abs=5e-4)
    assert softmax_correction(config) == pytest.approx(softmax_scale, abs=5e-4)
    cos, sin = rotations(config, jnp.array([0, 5], jnp.int32))
    np.testing.assert_allclose(cos[0], cos_scale, atol=5e-4)
    np.testing.assert_allclose(cos**2 + sin**2, cos_scale**2, atol=2e-3)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    ratio = inverse_frequencies(RopeConfig(dim=64)) / inverse_frequencies(make_deepseek_yarn())
    # Turns over 4,096 tokens: above beta_fast = 32 before pair 10, below beta_slow = 1 after pair 23.
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[24:], 40, rtol=1e-5)
    assert np.all(np.diff(ratio[10:24]) > 0)


def test_a_declared_attention_factor_wins():
    assert attention_scaling(make_deepseek_yarn(attention_factor=1.25)) == 1.25


def test_a_factor_of_a_name_that_transformers_passes_over_changes_nothing():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert make_rope({**yarn, "attn_factor": 0.8782488562869419}) == make_rope(yarn)


def test_rotation_turns_pair_i_with_i_plus_half_as_a_complex_number():
    config = RopeConfig(dim=8)
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    positions = jnp.array([[0, 1, 2], [7, 100, 3000]], jnp.int32)
    y = np.asarray(rotate(x, *rotations(config, positions)))
    turns = np.exp(
        1j * np.asarray(positions)[..., None, None] * inverse_frequencies(config).astype(np.float64)
    )
    expected = (np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])) * turns
    np.testing.assert_allclose(y[..., :4], expected.real, atol=1e-3)
    np.testing.assert_allclose(y[..., 4:], expected.imag, atol=1e-3)
    np.testing.assert_array_equal(y[0, 0], x[0, 0])


def test_entries_past_the_rotated_ones_pass_through_in_their_dtype():
    x = jax.random.normal(jax.random.key(1), (5, 2, 12), jnp.bfloat16)
    y = rotate(x, *rotations(RopeConfig(dim=8), jnp.arange(5, dtype=jnp.int32)))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])


def test_logits_depend_on_the_distance_alone():
    config = RopeConfig(dim=16)
    q, k = jax.random.normal(jax.random.key(2), (2, 1, 1, 16))

    def logit(q_position: int, k_position: int) -> float:
        turned = [
            rotate(x, *rotations(config, jnp.array([position], jnp.int32)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert logit(9, 4) == pytest.approx(logit(105, 100), rel=1e-4)
    assert logit(9, 4) != pytest.approx(logit(9, 0), rel=1e-2)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2}, "must be one of .* got 'dynamic'"),
        ({"rope_type": "yarn", "factor": 2, "alpha": 1}, r"'yarn' has unknown keys \['alpha'\]"),
        ({"rope_type": "linear"}, r"'linear' lacks \['factor'\]"),
        ({"rope_type": "yarn", "factor": None}, r"'yarn' lacks \['factor'\]"),
        ({**LLAMA3, "high_freq_factor": 1}, "low_freq_factor below high_freq_factor, got 1.0 and 1.0"),
    ],
)
def test_a_scaling_that_is_not_understood_is_refused(parameters: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_rope(parameters)


def test_yarn_without_an_original_context_takes_the_models():
    assert make_rope({"type": "yarn", "factor": 4}, max_position=32_768).original_max_position == 32_768
