"""The product's forms agree, whichever a backend takes for a number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
