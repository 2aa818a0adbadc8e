"""Routing and the mixture of experts against their equations, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jkv.collectives import assert_collectives
from jkv.layers.mlp import Gating
from jkv.layers.moe import MoE, Routing, check_routing, choose_experts
from jkv.models.load import parameter_targets, set_parameters
from jkv.sharding import Sharding

from ..compare import assert_close

EMBED, MLP = 12, 8
GPT_OSS = Gating(slope=1.702, limit=0.5, up_offset=1.0)


def make_moe(routing: Routing, **options: Any) -> MoE:
    """Return a mixture whose biases and corrections count."""
    moe = MoE(EMBED, MLP, routing, rngs=nnx.Rngs(0), **options)
    for number, (path, parameter) in enumerate(nnx.to_flat_state(nnx.state(moe, nnx.Param))):
        if path[-1] in ("bias", "correction"):
            value = 0.5 * jax.random.normal(jax.random.key(number), parameter.shape, parameter.dtype)
            parameter[...] = value
    return moe


def make_tokens(num_seqs: int = 4, time: int = 5) -> jax.Array:
    return jax.random.normal(jax.random.key(9), (num_seqs, time, EMBED))


def gated(gating: Gating, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if gating.limit is not None:
        gate, up = np.minimum(gate, gating.limit), np.clip(up, -gating.limit, gating.limit)
    return gate / (1 + np.exp(-gating.slope * gate)) * (up + gating.up_offset)


def mixed_one_by_one(moe: MoE, x: jax.Array) -> np.ndarray:
    """Send each token through each of its experts alone, in float64."""
    experts, weights = (np.asarray(array) for array in jax.jit(moe.router)(x))
    maps = moe.experts
    out = np.zeros(x.shape, np.float64)

    def project(linear: Any, expert: int, row: np.ndarray) -> np.ndarray:
        product = row @ np.asarray(linear.weight[...], np.float64)[expert]
        return product if linear.bias is None else product + np.asarray(linear.bias[...])[expert]

    for place in np.ndindex(*x.shape[:2]):
        row = np.asarray(x, np.float64)[place]
        for expert, weight in zip(experts[place], weights[place], strict=True):
            hidden = gated(
                maps.gating, project(maps.gate_proj, expert, row), project(maps.up_proj, expert, row)
            )
            out[place] += weight * project(maps.down_proj, expert, hidden)
    return out if moe.shared is None else out + np.asarray(jax.jit(moe.shared)(x))


@pytest.mark.parametrize(
    ("routing", "options"),
    [
        (Routing(8, 2), {}),
        (Routing(8, 2, is_normalized=True, has_bias=True), {"has_bias": True, "gating": GPT_OSS}),
        (
            Routing(8, 3, "sigmoid", 4, 2, "top2", is_normalized=True, scale=2.5, has_correction=True),
            {"shared_dim": 16},
        ),
    ],
)
def test_a_token_is_the_weighted_sum_of_its_experts(routing: Routing, options: dict[str, Any]):
    moe, x = make_moe(routing, **options), make_tokens()
    assert_close(jax.jit(moe)(x), mixed_one_by_one(moe, x))


def choose(routing: Routing, logits: list[float], correction: list[float] | None = None):
    chosen = choose_experts(
        routing, jnp.array([[logits]]), None if correction is None else jnp.array(correction)
    )
    return chosen.experts[0, 0].tolist(), np.asarray(chosen.weights[0, 0])


LOGITS = [0.1, 2.0, -1.0, 1.0, 1.9, 0.0]


def test_softmax_weighs_by_the_share_of_all_experts():
    experts, weights = choose(Routing(6, 2, scale=3.0), LOGITS)
    assert experts == [1, 4]
    assert_close(weights, 3 * np.exp([2.0, 1.9]) / np.exp(LOGITS).sum())


def test_normalized_softmax_is_that_of_the_chosen():
    _, weights = choose(Routing(6, 3, is_normalized=True), LOGITS)
    assert_close(weights, np.exp([2.0, 1.9, 1.0]) / np.exp([2.0, 1.9, 1.0]).sum())


def test_a_correction_chooses_and_does_not_weigh():
    experts, weights = choose(
        Routing(6, 2, "sigmoid", has_correction=True), LOGITS, [0.0, -9.0, 9.0, 0.0, 0.0, 0.0]
    )
    assert experts == [2, 4]
    assert_close(weights, 1 / (1 + np.exp([1.0, -1.9])))


def test_experts_of_equal_scores_are_taken_in_order():
    assert choose(Routing(6, 3), [1.0] * 6)[0] == [0, 1, 2]


def test_a_group_counts_by_its_best_expert_or_by_its_best_two():
    # Groups of two: the best expert is in the first, the best pair is the last.
    logits = [2.0, -3.0, 0.0, 0.1, 1.8, 1.7]
    assert choose(Routing(6, 2, "sigmoid", 3, 1, "max"), logits)[0] == [0, 1]
    assert choose(Routing(6, 2, "sigmoid", 3, 1, "top2"), logits)[0] == [4, 5]
    assert choose(Routing(6, 3, "sigmoid", 3, 2, "max"), logits)[0] == [0, 4, 5]


def test_scores_that_are_all_zero_give_finite_weights():
    _, weights = choose(Routing(2, 1, "sigmoid", is_normalized=True), [-200.0, -200.0])
    assert weights.tolist() == [0.0]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(6, 0), "whole and at least 1, got num_active 0"),
        (Routing(6, 2, num_groups=4), "6 experts, 4 groups"),
        (Routing(6, 2, num_groups=3, num_active_groups=4), "3 groups, 4 in use"),
        (Routing(6, 3, num_groups=3), "use 1 to 2 experts, those in its groups, got 3"),
        (Routing(3, 1, num_groups=3, group_score="top2"), "best two must have two experts, got 3 in 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(routing: Routing, message: str):
    with pytest.raises(ValueError, match=message):
        check_routing(routing)


@pytest.mark.parametrize("name", ["score", "group_score"])
def test_a_score_of_no_known_name_is_refused(name: str):
    routing = Routing(6, 2)
    # Past the runner's own check of types, which users do not have.
    object.__setattr__(routing, name, "tanh")
    with pytest.raises(ValueError, match=rf"{name} must be one of \(.*\), got 'tanh'"):
        check_routing(routing)


def test_a_width_of_zero_is_refused():
    with pytest.raises(ValueError, match="whole and at least 1, got shared_dim 0"):
        make_moe(Routing(6, 2), shared_dim=0)


def make_sharding(axis_type: AxisType = AxisType.Auto, **rules: str) -> Sharding:
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "model"), axis_types=(axis_type,) * 3)
    return Sharding.create(mesh, rules)


@pytest.mark.parametrize(
    ("axis_type", "expert", "mlp"),
    [
        (AxisType.Auto, "expert", "model"),
        (AxisType.Explicit, "data", "model"),
        (AxisType.Explicit, "expert", "data"),
    ],
)
def test_experts_over_a_mesh_give_what_one_device_gives(axis_type: AxisType, expert: str, mlp: str):
    routing = Routing(8, 3, is_normalized=True, has_bias=True)
    options: dict[str, Any] = {"shared_dim": 16, "has_bias": True}
    single, x = make_moe(routing, **options), make_tokens()
    sharding = make_sharding(axis_type, seq="data", page="data", expert=expert, mlp=mlp)
    sharded = make_moe(routing, sharding=sharding, **options)
    targets = parameter_targets(sharded, sharding)
    flat = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(sharded, nnx.Param))
    }
    set_parameters(sharded, {name: jax.device_put(flat[name], targets[name].sharding) for name in targets})
    shards = sharded.experts.gate_proj.weight[...].addressable_shards
    assert {shard.data.shape for shard in shards} == {(4, EMBED, MLP // 2)}
    placed = jax.device_put(x, sharding.named("seq", None, None))
    program = jax.jit(sharded).lower(placed).compile()
    assert_close(program(placed), jax.jit(single)(x))
    # Shared experts are in the one sum.
    rows = x.shape[0] * x.shape[1] * 4
    sums = {"all-reduce": (1, rows // 2 * EMBED)}
    if "data" in (expert, mlp):
        sums |= {"all-gather": (3, rows * (EMBED + 2 * 3)), "reduce-scatter": (1, rows * EMBED)}
    assert_collectives(program, sums)


def test_tokens_travel_to_experts_that_are_split_as_sequences_are():
    """Tokens with their choices are gathered, sums are scattered; weights stay."""
    sharding = make_sharding(AxisType.Explicit, seq="data", page="data", expert="data")
    moe, x = make_moe(Routing(8, 3), sharding=sharding), make_tokens()
    placed = jax.device_put(x, sharding.named("seq", None, None))
    targets = parameter_targets(moe, sharding)
    flat = nnx.to_flat_state(nnx.state(moe, nnx.Param))
    names = {".".join(map(str, path)): leaf[...] for path, leaf in flat}
    set_parameters(moe, {name: jax.device_put(names[name], targets[name].sharding) for name in targets})
    num_tokens = x.shape[0] * x.shape[1]
    expected = {
        "all-gather": (3, num_tokens * 4 * (EMBED + 2 * 3)),
        "reduce-scatter": (1, num_tokens * 4 * EMBED),
    }
    assert_collectives(jax.jit(moe).lower(placed).compile(), expected)


def test_a_mixture_trains():
    moe, x = make_moe(Routing(4, 2, is_normalized=True), shared_dim=8), make_tokens()
    gradients = nnx.jit(nnx.grad(lambda moe: jnp.square(moe(x)).sum()))(moe)
    sizes = {path: float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(gradients)}
    assert all(0 < size < np.inf for size in sizes.values()), sizes
