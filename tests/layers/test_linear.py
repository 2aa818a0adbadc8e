"""Projections, embeddings and norms against plain products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.layers.linear import Embedding, Linear, RMSNorm

from ..compare import assert_close


def make_linear(**options) -> Linear:
    return Linear(12, 20, axes=("embed", "mlp"), rngs=nnx.Rngs(0), **options)


def make_input(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def test_a_projection_is_a_product_with_its_weights_rows_as_outputs():
    linear, x = make_linear(has_bias=True), make_input(2, 3, 12)
    linear.bias[...] = make_input(20)
    weight = np.asarray(linear.weight[...], np.float64)
    assert weight.shape == (20, 12)
    assert_close(linear(x), np.asarray(x, np.float64) @ weight.T + np.asarray(linear.bias[...]))


def test_the_product_has_the_dtype_of_activations_and_the_weight_its_own():
    linear = make_linear(dtype=jnp.bfloat16)
    assert linear(make_input(1, 1, 12)).dtype == jnp.bfloat16
    assert linear.weight.dtype == jnp.float32


def test_parameters_carry_their_logical_axes():
    linear = make_linear(has_bias=True)
    assert linear.weight.get_metadata("logical_axes") == ("mlp", "embed")
    assert linear.bias.get_metadata("logical_axes") == ("mlp",)


def test_an_embedding_looks_up_and_scores():
    embedding = Embedding(7, 12, rngs=nnx.Rngs(0))
    table, x = embedding.embedding[...], make_input(2, 3, 12)
    tokens = jnp.array([[0, 6, 3], [3, 3, 1]], jnp.int32)
    np.testing.assert_array_equal(embedding(tokens), np.asarray(table)[tokens])
    assert_close(embedding.attend(x), np.asarray(x, np.float64) @ np.asarray(table, np.float64).T)


def test_scores_of_a_low_precision_embedding_are_float32():
    embedding = Embedding(7, 12, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert embedding.attend(make_input(1, 1, 12)).dtype == jnp.float32


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_a_norm_divides_by_the_root_mean_square(size: float):
    norm, x = RMSNorm(12, eps=1e-6), size * make_input(2, 3, 12)
    norm.scale[...] = make_input(12)
    wide = np.asarray(x, np.float64)
    root = np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert_close(norm(x), wide / root * np.asarray(norm.scale[...]))


def test_a_norm_of_low_precision_sums_in_float32():
    norm, x = RMSNorm(4096), make_input(1, 1, 4096).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean() + 1e-6)
    rounded = jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32)
    assert norm(x).dtype == jnp.bfloat16
    # A bfloat16 mean would be wrong by whole units in the last place: most entries would differ.
    assert float((norm(x).astype(jnp.float32) == rounded).mean()) > 0.99
