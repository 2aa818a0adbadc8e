"""The gated MLP (SwiGLU and its relatives). Knows nothing of what surrounds it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jkv.layers.dense import dense
from jkv.layers.linear import Linear
from jkv.layers.sums import SplitSum
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

# Weight and bias of each of several projections.
Arrays = list[tuple[Any, Any]]


def of_each(linears: Sequence[Any], function: Callable[[nnx.Param], Any]) -> Arrays:
    """Return what the function gives for the weight of each projection, and for its bias or None."""
    return [
        (function(linear.weight), None if linear.bias is None else function(linear.bias))
        for linear in linears
    ]


def whole_along_embed(parameter: nnx.Param, sharding: Sharding) -> PartitionSpec:
    """Return how a parameter enters a sum over devices: whole along `embed`, however it is stored."""
    axes = parameter.get_metadata("logical_axes")
    return sharding.spec(*(None if axis == "embed" else axis for axis in axes))


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
        self.dtype = dtype
        self.sum = SplitSum(sharding, ("mlp",))

    def __call__(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time embed"]:
        """Apply the MLP to each token; where its width is split as sequences are, tokens travel."""
        if self.sum.travels_over is None:
            return self.down_proj(self.gating(self.gate_proj(x), self.up_proj(x)))
        sharding = self.sum.sharding
        assert sharding is not None, "tokens travel over a mesh"
        rows = sharding.spec("seq", None, None)

        def local(x: jax.Array, arrays: Arrays) -> jax.Array:
            (gathered,) = self.sum.gather(x)
            return self.sum.scatter(self.partial(gathered, arrays))

        in_specs = (rows, self.of_each(lambda parameter: whole_along_embed(parameter, sharding)))
        mapped = jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
        return mapped(x, self.of_each(lambda parameter: parameter[...]))

    def of_each(self, function: Callable[[nnx.Param], Any]) -> Arrays:
        """Return what the function gives for the weight and bias of gate, up and down projection."""
        return of_each((self.gate_proj, self.up_proj, self.down_proj), function)

    def partial(self, x: Float[Array, "seq time embed"], arrays: Arrays) -> Float[Array, "seq time embed"]:
        """Return what this device's part of the width adds to the sum, inside `shard_map`.

        Args:
            x: tokens.
            arrays: the device's parts of what `of_each` gives.
        """

        def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
            y = dense(x, weight)
            return y if bias is None else y + bias.astype(self.dtype)[None, None]

        gate, up, (down, bias) = arrays
        x = x.astype(self.dtype)
        hidden = self.gating(project(x, *gate), project(x, *up))
        return project(hidden, down, None if bias is None else jnp.where(self.sum.part("mlp") == 0, bias, 0))
