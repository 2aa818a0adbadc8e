"""A model as a function on flat arrays, the form that decode loops take.

Walking an NNX module on every call costs more than a small step, so the walk is done once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Compiled

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache

Weights = tuple[jax.Array | jax.ShapeDtypeStruct, ...]
StepFunction = Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]]


def split_model(model: nnx.Module) -> tuple[StepFunction, Weights]:
    """Split any NNX model called as `model(tokens, cache, batch) -> (logits, cache)`.

    Returns:
        The function `(weights, tokens, cache, batch) -> (logits, cache)` and its weights as flat arrays.
        With None for cache and batch it scores tokens without one. Keep the function: programs are compiled
        once for each.
    """
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)

    def step(
        weights: Weights, tokens: jax.Array, cache: Cache | None, batch: TokenBatch | None
    ) -> tuple[jax.Array, Cache | None]:
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))(tokens, cache, batch)

    return step, tuple(leaves)


def compile_step(model: nnx.Module, inputs: jax.Array | jax.ShapeDtypeStruct, cache: Cache) -> Compiled:
    """Compile a step in which each sequence gets new tokens, the cache donated, for assertions to look at.

    Args:
        model: called as `model(inputs, cache, batch) -> (outputs, cache)`; its parameters may be shapes.
        inputs: of the model, `[seq, time, ...]`; shapes with a placement will do.
        cache: of the sequences, or its shapes.
    """
    step, weights = split_model(model)
    time = inputs.shape[1]

    def run(cache: Cache, weights: Weights, inputs: jax.Array) -> tuple[jax.Array, Cache | None]:
        cache, batch = cache.begin(jnp.full_like(cache.lengths, time), time=time)
        return step(weights, inputs, cache, batch)

    return jax.jit(run, donate_argnums=0).lower(cache, weights, inputs).compile()
