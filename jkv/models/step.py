"""A model as a function on flat arrays, the form that decode loops take.

Walking an NNX module on every call costs more than a small step, so the walk is done once.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

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
