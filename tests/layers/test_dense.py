"""The product's forms agree, whichever a backend takes for a number of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.decode.platform import COMPILER_OPTIONS
from jkv.layers.dense import dense

from ..compare import assert_close


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 5), (127, 1), (2, 64)], ids=str)
def test_a_product_is_the_same_for_any_number_of_rows(rows: tuple[int, int]):
    x = jax.random.normal(jax.random.key(0), (*rows, 24))
    weight = jax.random.normal(jax.random.key(1), (40, 24))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert_close(jax.jit(dense)(x, weight), expected)


def test_a_product_of_bfloat16_can_stay_float32():
    x, weight = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    assert dense(x, weight, dtype=jnp.float32).dtype == jnp.float32
    assert dense(x, weight).dtype == jnp.bfloat16


@pytest.mark.parametrize("width", [4, 8, 72, 576, 1536, 11008])
def test_one_row_of_a_narrow_weight_is_summed_in_float32(width: int):
    x = jax.random.normal(jax.random.key(0), (1, 1, width)).astype(jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (40, width)).astype(jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert_close(jax.jit(lambda x, w: dense(x, w, dtype=jnp.float32))(x, weight), expected)
    # Activations keep their precision where the weight alone is narrow.
    wide = jax.random.normal(jax.random.key(2), (1, 1, width))
    expected = np.asarray(wide, np.float64) @ np.asarray(weight, np.float64).T
    assert_close(jax.jit(dense)(wide, weight), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 4, 256])
def test_a_loop_holds_no_wide_copies_of_narrow_weights(rows: int, dtype: str):
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 6

    def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tanh(dense(x, weight))

    def loop(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda _, x: functools.reduce(layer, weights, x), x)

    lowered = jax.jit(loop).lower(jax.ShapeDtypeStruct((rows, 1, 512), dtype), weights)
    memory = lowered.compile(compiler_options=COMPILER_OPTIONS["cpu"]).memory_analysis()
    # Of one weight at a time, beside the activations.
    assert memory.temp_size_in_bytes < 2 * weights[0].size * 4
