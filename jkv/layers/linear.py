"""Dense projections, embeddings and norms that carry logical axis names.

Knows no cache and no attention.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jkv.layers.dense import dense
from jkv.sharding import Sharding


class Linear(nnx.Module):
    """`x @ weight.T + bias`, the weight stored `[out, in]` as checkpoints do.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        axes: logical names of the input and the output.
        has_bias: adds a bias.
        dtype: dtype of the product; inputs and weight are cast to it.
        param_dtype: dtype of the stored parameters.
        sharding: places the output where an axis that the product sums over is split.
        rngs: draws the weight (LeCun normal); the bias starts at zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        has_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(
            draw(rngs.params(), (out_features, in_features), param_dtype), logical_axes=(axes[1], axes[0])
        )
        self.bias = nnx.data(None)
        if has_bias:
            self.bias = nnx.Param(jnp.zeros(out_features, param_dtype), logical_axes=(axes[1],))
        self.axes = axes
        self.dtype = dtype
        self.sharding = sharding

    def __call__(self, x: Float[Array, "seq time features"]) -> Float[Array, "seq time out"]:
        """Project the last axis."""
        placement = output_placement(self.sharding, "seq", None, self.axes[1])
        y = dense(x.astype(self.dtype), self.weight[...], placement, is_split=self.sharding is not None)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)[None, None]
        return y


class Embedding(nnx.Module):
    """A table of token vectors, `[vocab, embed]`, that can serve as the output head too."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        draw = nnx.initializers.normal(embed_dim**-0.5)
        value = draw(rngs.params(), (vocab_size, embed_dim), param_dtype)
        self.embedding = nnx.Param(value, logical_axes=("vocab", "embed"))
        self.dtype = dtype
        self.sharding = sharding

    def __call__(self, tokens: Int[Array, "seq time"]) -> Float[Array, "seq time embed"]:
        """Look tokens up; ids are checked on the host, before they reach the device."""
        placement = output_placement(self.sharding, "seq", None, "embed")
        return self.embedding[...].at[tokens].get(out_sharding=placement).astype(self.dtype)

    def attend(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time vocab"]:
        """Return float32 logits of `x` against every token's vector."""
        placement = output_placement(self.sharding, "seq", None, "vocab")
        x = x.astype(self.dtype)
        return dense(x, self.embedding[...], placement, jnp.float32, is_split=self.sharding is not None)


class RMSNorm(nnx.Module):
    """Divides by the last axis's root mean square, in float32, then scales (Zhang et al. 2019)."""

    def __init__(
        self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32, axis: str = "embed"
    ):
        self.scale = nnx.Param(jnp.ones(features, param_dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        """Normalize; returns `x`'s dtype."""
        wide = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * root * scale).astype(x.dtype)


def output_placement(sharding: Sharding | None, *axes: str | None) -> NamedSharding | None:
    """Return the placement that a product needs on a mesh with Explicit axes; None elsewhere."""
    return sharding.named(*axes) if sharding is not None and sharding.is_explicit else None
