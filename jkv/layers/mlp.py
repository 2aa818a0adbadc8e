"""The gated MLP (SwiGLU and its relatives). Knows nothing of what surrounds it."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jkv.layers.linear import Linear
from jkv.sharding import Sharding


@dataclass(frozen=True)
class Gating:
    """How a gated MLP's two projections become one; hashable.

    Attributes:
        activation: of the gate.
        slope: silu multiplies its input by this inside the sigmoid.
        limit: the gate is at most this, the other projection within plus and minus this.
        up_offset: added to the other projection.
    """

    activation: Literal["silu", "gelu_tanh"] = "silu"
    slope: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __call__(self, gate: Float[Array, "*rows mlp"], up: Float[Array, "*rows mlp"]) -> jax.Array:
        """Return `activation(gate) * (up + up_offset)`, both limited before."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        if self.activation == "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * (up + self.up_offset)
        return gate * jax.nn.sigmoid(self.slope * gate) * (up + self.up_offset)


SWIGLU = Gating()


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, SwiGLU), or gated in another way."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        gating: Gating = SWIGLU,
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
        self.gating = gating

    def __call__(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time embed"]:
        """Apply the MLP to each token."""
        return self.down_proj(self.gating(self.gate_proj(x), self.up_proj(x)))
