"""Dense projections, embeddings and norms that carry logical axis names.

Knows no cache and no attention.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jkv.sharding import Sharding


class Linear(nnx.Module):
    """`x @ kernel + bias`, kernel stored `[in, out]`.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        axes: logical names of the kernel's two dimensions.
        has_bias: adds a bias.
        dtype: dtype of the product; inputs and kernel are cast to it.
        param_dtype: dtype of the stored parameters.
        sharding: places the output where an axis that the product sums over is split.
        rngs: draws the kernel (LeCun normal); the bias starts at zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        has_bias: bool = False,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        shape = (in_features, out_features)
        draw = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(draw(rngs.params(), shape, param_dtype), logical_axes=axes)
        self.bias = nnx.data(None)
        if has_bias:
            self.bias = nnx.Param(jnp.zeros(out_features, param_dtype), logical_axes=(axes[1],))
        self.axes = axes
        self.dtype = dtype
        self.sharding = sharding

    def __call__(self, x: Float[Array, "seq time features"]) -> Float[Array, "seq time out"]:
        """Project the last axis."""
        y = jax.lax.dot_general(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            (((2,), (0,)), ((), ())),
            out_sharding=output_spec(self.sharding, "seq", None, self.axes[1]),
        )
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
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
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
        spec = output_spec(self.sharding, "seq", None, "embed")
        return self.embedding[...].at[tokens].get(out_sharding=spec).astype(self.dtype)

    def attend(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time vocab"]:
        """Return float32 logits of `x` against every token's vector."""
        return jax.lax.dot_general(
            x.astype(self.dtype),
            self.embedding[...].astype(self.dtype),
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            out_sharding=output_spec(self.sharding, "seq", None, "vocab"),
        )


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over the last axis, in float32, then scales (Zhang et al. 2019)."""

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: jnp.dtype = jnp.float32, axis: str = "embed"):
        self.scale = nnx.Param(jnp.ones(features, param_dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        """Normalize; returns `x`'s dtype."""
        wide = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * root * scale).astype(x.dtype)


def output_spec(sharding: Sharding | None, *axes: str | None) -> PartitionSpec | None:
    """Return the placement that a product needs on a mesh with Explicit axes; None elsewhere."""
    return sharding.spec(*axes) if sharding is not None and sharding.is_explicit else None
