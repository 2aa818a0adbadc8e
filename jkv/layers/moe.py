"""A mixture of experts: each token goes through a few gated MLPs of many (Shazeer et al. 2017).

Knows nothing of models: routing is data.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jkv.layers.checks import check_sizes
from jkv.layers.grouped import grouped_dense
from jkv.layers.linear import output_placement
from jkv.layers.mlp import SWIGLU, Arrays, GatedMLP, Gating, of_each, whole_along_embed
from jkv.layers.sums import SplitSum
from jkv.sharding import Sharding

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True)
class Routing:
    """How a token finds its experts; hashable.

    Attributes:
        num_experts: experts of a layer.
        num_active: experts that a token goes through, those of its highest scores.
        score: of a logit: softmax over all experts, or the sigmoid of each alone.
        num_groups: equal runs of experts, of which a token uses a few (DeepSeek-V2, section 2.2.2).
        num_active_groups: groups that a token's experts may be in.
        group_score: a group's score: its best expert's (DeepSeek-V2), or the sum of its best two (V3).
        is_normalized: the chosen scores are divided by their sum, which makes softmax that of the chosen.
        scale: multiplies the chosen scores.
        has_bias: a bias on the logits.
        has_correction: a bias on the scores by which experts are chosen, but not on those that weigh them
            (DeepSeek-V3, eq. 16).
    """

    num_experts: int
    num_active: int
    score: Score = "softmax"
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: GroupScore = "max"
    is_normalized: bool = False
    scale: float = 1.0
    has_bias: bool = False
    has_correction: bool = False


def check_routing(routing: Routing) -> None:
    """Raise a ValueError that names what is unknown, or sizes that do not fit each other."""
    for name, known in (("score", get_args(Score)), ("group_score", get_args(GroupScore))):
        if getattr(routing, name) not in known:
            raise ValueError(f"{name} must be one of {known}, got {getattr(routing, name)!r}")
    counts = ("num_experts", "num_active", "num_groups", "num_active_groups")
    check_sizes(**{name: getattr(routing, name) for name in counts})
    experts, groups = routing.num_experts, routing.num_groups
    if experts % groups or routing.num_active_groups > groups:
        raise ValueError(
            f"groups must divide the experts and hold those in use, got {experts} experts, {groups} groups, "
            f"{routing.num_active_groups} in use"
        )
    reachable = experts // groups * routing.num_active_groups
    if routing.num_active > reachable:
        raise ValueError(
            f"a token must use 1 to {reachable} experts, those in its groups, got {routing.num_active}"
        )
    if routing.group_score == "top2" and groups > 1 and experts // groups < 2:
        raise ValueError(
            f"a group scored by its best two must have two experts, got {experts} in {groups} groups"
        )


class Chosen(NamedTuple):
    """The experts of each token, best first, and what their outputs are multiplied by (float32)."""

    experts: Int[Array, "seq time active"]
    weights: Float[Array, "seq time active"]


class Router(nnx.Module):
    """Chooses each token's experts, in float32: a rounded score may name another expert."""

    def __init__(
        self,
        embed_dim: int,
        routing: Routing,
        *,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_routing(routing)
        draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        shape = (routing.num_experts, embed_dim)
        # Every device chooses among all experts, however they are split.
        self.weight = nnx.Param(draw(rngs.params(), shape, param_dtype), logical_axes=(None, "embed"))
        self.bias = nnx.data(None)
        self.correction = nnx.data(None)
        if routing.has_bias:
            self.bias = nnx.Param(jnp.zeros(routing.num_experts, param_dtype), logical_axes=(None,))
        if routing.has_correction:
            # Steps of training change it by less than bfloat16 holds.
            self.correction = nnx.Param(jnp.zeros(routing.num_experts, jnp.float32), logical_axes=(None,))
        self.routing = routing
        self.sharding = sharding

    def __call__(self, x: Float[Array, "seq time embed"]) -> Chosen:
        """Return each token's experts and their weights."""
        logits = jnp.einsum(
            "ste,ne->stn",
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
            out_sharding=output_placement(self.sharding, "seq", None, None),
        )
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)[None, None]
        correction = None if self.correction is None else self.correction[...]
        choose = functools.partial(choose_experts, self.routing)
        if self.sharding is not None:
            # Each device its own tokens: XLA gathers what it takes the largest of.
            rows = self.sharding.spec("seq", None, None)
            choose = jax.shard_map(
                choose,
                mesh=self.sharding.mesh,
                in_specs=(rows, self.sharding.spec(None)),
                out_specs=rows,
                check_vma=False,
            )
        return choose(logits, correction)


def choose_experts(
    routing: Routing,
    logits: Float[Array, "seq time expert"],
    correction: Float[Array, " expert"] | None = None,
) -> Chosen:
    """Return the experts of the highest scores; of equal ones, the first."""
    is_softmax = routing.score == "softmax"
    scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction[None, None]
    if routing.num_active_groups < routing.num_groups:
        choice = _within_best_groups(routing, choice)
    _, experts = jax.lax.top_k(choice, routing.num_active)
    is_chosen = jax.nn.one_hot(experts, routing.num_experts, dtype=bool)
    weights = jnp.where(is_chosen, scores[..., None, :], 0).sum(-1)
    if routing.is_normalized:
        # Sigmoids may all be zero.
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
    return Chosen(experts, weights * routing.scale)


def _within_best_groups(routing: Routing, choice: jax.Array) -> jax.Array:
    """Return the scores, those of groups that the token does not use at -inf."""
    groups = choice.reshape(*choice.shape[:-1], routing.num_groups, -1)
    best, _ = jax.lax.top_k(groups, 1 if routing.group_score == "max" else 2)
    _, used = jax.lax.top_k(best.sum(-1), routing.num_active_groups)
    is_used = jax.nn.one_hot(used, routing.num_groups, dtype=bool).any(-2)
    return jnp.where(is_used[..., None], groups, -jnp.inf).reshape(choice.shape)


class GroupedLinear(nnx.Module):
    """A linear map for each expert, its weight `[expert, in, out]`."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        has_bias: bool,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        shape = (num_experts, in_features, out_features)
        self.weight = nnx.Param(draw(rngs.params(), shape, param_dtype), logical_axes=("expert", *axes))
        self.bias = nnx.data(None)
        if has_bias:
            self.bias = nnx.Param(
                jnp.zeros((num_experts, out_features), param_dtype), logical_axes=("expert", axes[1])
            )


class Experts(nnx.Module):
    """The gated MLPs; arguments as `MoE`."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        num_experts: int,
        *,
        gating: Gating,
        has_bias: bool,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        sharding: Sharding | None,
        rngs: nnx.Rngs,
    ):
        if sharding is not None:
            sharding.check_divides("expert", num_experts)
            sharding.check_divides("mlp", mlp_dim)
        options: dict[str, Any] = {"has_bias": has_bias, "param_dtype": param_dtype, "rngs": rngs}
        self.gate_proj = GroupedLinear(num_experts, embed_dim, mlp_dim, axes=("embed", "mlp"), **options)
        self.up_proj = GroupedLinear(num_experts, embed_dim, mlp_dim, axes=("embed", "mlp"), **options)
        self.down_proj = GroupedLinear(num_experts, mlp_dim, embed_dim, axes=("mlp", "embed"), **options)
        self.gating = gating
        self.dtype = dtype
        self.sharding = sharding
        self.sum = SplitSum(sharding, ("expert", "mlp"))

    def __call__(
        self, x: Float[Array, "seq time embed"], chosen: Chosen, shared: GatedMLP | None = None
    ) -> Float[Array, "seq time embed"]:
        """Return the weighted sum of each token's experts, and of an MLP that every token goes through."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)

        def of_all(function: Callable[[nnx.Param], Any]) -> tuple[Arrays, Arrays | None]:
            return of_each(linears, function), None if shared is None else shared.of_each(function)

        mix = functools.partial(self._mix, shared)
        x, arrays = x.astype(self.dtype), of_all(lambda parameter: parameter[...])
        sharding = self.sharding
        if sharding is None:
            return mix(x, *chosen, *arrays)
        rows = sharding.spec("seq", None, None)
        return jax.shard_map(
            mix,
            mesh=sharding.mesh,
            in_specs=(rows, rows, rows, *of_all(lambda parameter: whole_along_embed(parameter, sharding))),
            out_specs=rows,
            check_vma=False,
        )(x, *chosen, *arrays)

    def _mix(
        self,
        shared: GatedMLP | None,
        x: Float[Array, "seq time embed"],
        experts: Int[Array, "seq time active"],
        weights: Float[Array, "seq time active"],
        arrays: Arrays,
        shared_arrays: Arrays | None,
    ) -> Float[Array, "seq time embed"]:
        """Sum over one device's experts and its part of the shared MLP, and over devices once for both."""
        own = x
        x, experts, weights = self.sum.gather(x, experts, weights)
        out = self._routed(x, experts, weights, arrays)
        if shared is None or shared_arrays is None:
            return self.sum.add_up(self.sum.scatter(out))
        # The shared width is split as the experts' is: where tokens travel to it, before their sums return.
        if self.sum.travels("mlp"):
            return self.sum.add_up(self.sum.scatter(out + self._once(shared.partial(x, shared_arrays))))
        return self.sum.add_up(self.sum.scatter(out) + self._once(shared.partial(own, shared_arrays)))

    def _once(self, part: jax.Array) -> jax.Array:
        """Return a part that the devices of the experts' axis all have, on the first of them alone."""
        is_alike = self.sum.mesh_axis("expert") is not None and not self.sum.travels("expert")
        return jnp.where(self.sum.part("expert") == 0, part, 0) if is_alike else part

    def _routed(
        self,
        x: Float[Array, "seq time embed"],
        experts: Int[Array, "seq time active"],
        weights: Float[Array, "seq time active"],
        arrays: Arrays,
    ) -> Float[Array, "seq time embed"]:
        """Sum over one device's experts; rows of others are sorted to the end and count as zero."""
        gate, up, (down, down_bias) = arrays
        num_here, num_active = down.shape[0], experts.shape[-1]
        found = experts.reshape(-1) - self.sum.part("expert") * num_here
        is_here = (found >= 0) & (found < num_here)
        found = jnp.where(is_here, found, num_here)
        order = jnp.argsort(found)
        sizes = jax.nn.one_hot(found, num_here, dtype=jnp.int32).sum(0)

        def project(rows: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
            product = grouped_dense(rows, weight, sizes)
            return product if bias is None else product + bias[found[order]].astype(self.dtype)

        if down_bias is not None:
            # Devices that each have a part of the width add their products up, and the bias once.
            down_bias = jnp.where(self.sum.part("mlp") == 0, down_bias, 0)
        rows = x.reshape(-1, x.shape[-1])[order // num_active]
        out = project(self.gating(project(rows, *gate), project(rows, *up)), down, down_bias)
        out = out[jnp.argsort(order)].astype(jnp.float32) * weights.reshape(-1, 1)
        return jnp.where(is_here[:, None], out, 0).reshape(*experts.shape, -1).sum(-2).astype(self.dtype)


class MoE(nnx.Module):
    """A mixture of gated MLPs in place of one; called as `GatedMLP`.

    Args:
        embed_dim: width of input and output.
        mlp_dim: width of one expert.
        routing: how tokens find their experts.
        shared_dim: width of a gated MLP that every token goes through too; None is none.
        gating: of the experts and the shared MLP.
        has_bias: biases in the experts and the shared MLP.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        sharding: splits experts and their widths over a mesh; None is one device.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is below 1, those of the routing do not fit, or the mesh does not divide the
            experts or their width.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        routing: Routing,
        *,
        shared_dim: int | None = None,
        gating: Gating = SWIGLU,
        has_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(embed_dim=embed_dim, mlp_dim=mlp_dim, shared_dim=shared_dim)
        placed: dict[str, Any] = {"param_dtype": param_dtype, "sharding": sharding, "rngs": rngs}
        options: dict[str, Any] = {"gating": gating, "has_bias": has_bias, "dtype": dtype, **placed}
        self.router = Router(embed_dim, routing, **placed)
        self.experts = Experts(embed_dim, mlp_dim, routing.num_experts, **options)
        self.shared = nnx.data(None)
        if shared_dim is not None:
            self.shared = GatedMLP(embed_dim, shared_dim, **options)

    def __call__(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time embed"]:
        """Send each token through its experts."""
        return self.experts(x, self.router(x), self.shared)
