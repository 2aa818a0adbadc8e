"""Fewer KV heads: each is the mean of those that it stands for (Ainslie et al. 2023, section 2.1).

Knows parameters by name; reads no file.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jkv.convert.converted import Converted, relative_error
from jkv.models.model_config import ModelConfig

_PROJECTIONS = {"keys": "k_proj", "values": "v_proj"}


def pool_heads(config: ModelConfig, parameters: Mapping[str, jax.Array], num_kv_heads: int) -> Converted:
    """Return the model with so many KV heads: neighbours, whose query heads are neighbours, become one.

    Errors are of a layer's key and value projections, each head beside its group's mean.

    Args:
        config: the model's sizes.
        parameters: its weights, by dotted path.
        num_kv_heads: of the result; divides those of the model.

    Raises:
        ValueError: the KV heads form no such groups, are normed all at once, or there are latents instead.
    """
    _check(config, num_kv_heads)
    pooled = dict(parameters)
    errors: list[dict[str, float]] = [{} for _ in range(config.num_layers)]
    for layer, lost in enumerate(errors):
        for step, projection in _PROJECTIONS.items():
            for name in ("bias", "weight"):
                path = f"layers.{layer}.attention.{projection}.{name}"
                if path not in parameters:
                    continue
                given = np.asarray(parameters[path], np.float32)
                heads = given.reshape(num_kv_heads, -1, config.head_dim, *given.shape[1:])
                means = heads.mean(axis=1, keepdims=True)
                pooled[path] = jnp.asarray(means.reshape(-1, *given.shape[1:]), parameters[path].dtype)
                lost[step] = relative_error(means, heads)
    return Converted(replace(config, num_kv_heads=num_kv_heads), pooled, tuple(errors))


def _check(config: ModelConfig, num_kv_heads: int) -> None:
    if config.latent is not None:
        raise ValueError("pooling needs a model with KV heads, got one with latents; convert its original")
    if config.is_qk_norm_wide:
        raise ValueError("pooling needs keys that are normed head by head, got a norm over all heads at once")
    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
        raise ValueError(f"KV heads must divide the model's {config.num_kv_heads}, got {num_kv_heads}")
