"""What attention is given on a text: the second moments of each layer's inputs.

Knows decoders; no conversion.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from jkv.models.decoder import Decoder


class _Watched(nnx.Module):
    """Attention that sums the outer products of its inputs."""

    def __init__(self, attention: nnx.Module, embed_dim: int):
        self.attention = attention
        self.moment = nnx.Variable(jnp.zeros((embed_dim, embed_dim), jnp.float32))

    def __call__(self, x: jax.Array, *arguments: Any, **options: Any) -> Any:
        rows = x.astype(jnp.float32)
        self.moment[...] += jnp.einsum("bti,btj->ij", rows, rows)
        return self.attention(x, *arguments, **options)


@nnx.jit
def _run(model: Any, tokens: jax.Array) -> None:
    model(tokens)


def input_moments(
    model: Decoder, tokens: Int[np.ndarray, "row time"]
) -> list[Float[np.ndarray, "embed embed"]]:
    """Return the mean outer product of what each layer's projections are given, row after row of tokens."""
    watched: Any = nnx.clone(model)
    for layer in watched.layers:
        layer.attention = _Watched(layer.attention, model.config.embed_dim)
    for row in tokens:
        _run(watched, jnp.asarray(row[None]))
    return [np.asarray(layer.attention.moment[...], np.float64) / tokens.size for layer in watched.layers]
