"""The gated MLP (SwiGLU). Knows nothing of what surrounds it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jkv.layers.linear import Linear
from jkv.sharding import Sharding


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, SwiGLU)."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        has_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        if sharding is not None:
            sharding.check_divides("mlp", mlp_dim)
        options = {"has_bias": has_bias, "dtype": dtype, "param_dtype": param_dtype, "sharding": sharding}
        self.gate_proj = Linear(embed_dim, mlp_dim, axes=("embed", "mlp"), rngs=rngs, **options)
        self.up_proj = Linear(embed_dim, mlp_dim, axes=("embed", "mlp"), rngs=rngs, **options)
        self.down_proj = Linear(mlp_dim, embed_dim, axes=("mlp", "embed"), rngs=rngs, **options)

    def __call__(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time embed"]:
        """Apply the MLP to each token."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
