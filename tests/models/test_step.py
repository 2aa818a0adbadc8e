"""A model as a function on flat arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.models.step import split_model


class Doubler(nnx.Module):
    """A user's module, with parameters in a list."""

    def __init__(self):
        self.weights = nnx.List([nnx.Param(jnp.full(3, float(value))) for value in (1, 2)])

    def __call__(self, tokens, cache, batch):
        return tokens * self.weights[0][...] + self.weights[1][...], cache


def test_a_split_model_computes_what_the_module_does():
    step, weights = split_model(Doubler())
    tokens = jnp.arange(3.0)
    np.testing.assert_array_equal(step(weights, tokens, None, None)[0], Doubler()(tokens, None, None)[0])


def test_weights_are_flat_arrays_and_arguments_of_the_program():
    step, weights = split_model(Doubler())
    assert isinstance(weights, tuple)
    jaxpr = jax.make_jaxpr(lambda weights: step(weights, jnp.arange(3.0), None, None)[0])(weights)
    assert len(jaxpr.jaxpr.invars) == len(weights) == 2
    changed = tuple(3 * leaf for leaf in weights)
    np.testing.assert_array_equal(step(changed, jnp.ones(3), None, None)[0], 9.0)


def test_the_module_keeps_its_own_parameters():
    model = Doubler()
    step, weights = split_model(model)
    step(tuple(3 * leaf for leaf in weights), jnp.ones(3), None, None)
    np.testing.assert_array_equal(model.weights[0][...], 1.0)
