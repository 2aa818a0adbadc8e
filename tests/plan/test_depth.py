"""What shallow programs say of deep ones, beside the deep ones."""

from collections import Counter
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from jkv.collectives import Collective
from jkv.layers.moe import Routing
from jkv.models.model_config import MixtureConfig, ModelConfig
from jkv.plan.depth import Costs, LayerKind, at_full_depth, costs_of, layer_kinds, shallow_models
from jkv.plan.programs import PHASES, Phase, Workload, compile_phase
from jkv.sharding import Sharding

from ..tiny import make_config

HEADS = dict.fromkeys(("q_head", "kv_head", "mlp", "vocab"), "model")
MIXTURE = MixtureConfig(Routing(4, 2), mlp_dim=16, shared_dim=16, num_dense_layers=1)


def make_workload(config: ModelConfig, **changes: Any) -> Workload:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = Sharding.create(mesh, {"seq": "data", "page": "data", **HEADS})
    options = {"page_size": 16, "codec": "f32", "max_chunk": 16}
    sizes: dict[str, Any] = {"num_sequences": 4, "capacity": 64, "width": 8, "dtype": "float32"}
    sizes["param_dtype"] = "float32"
    return Workload(config, sharding, cache=options, **sizes | changes)


def make_model(**sizes: Any) -> ModelConfig:
    return make_config(**{"num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 64} | sizes)


def make_costs(size: int, *sent: Collective) -> Costs:
    return Costs(*(size,) * 5, float(size), float(size), Counter(sent))


def test_layers_are_counted_by_what_they_are():
    config = make_model(windows=(None, 8, 8, None, 8), mixture=MIXTURE)
    kinds = layer_kinds(config)
    assert kinds == {LayerKind(None, False): 1, LayerKind(8, True): 3, LayerKind(None, True): 1}
    one, deeper = shallow_models(config)
    assert (one.windows, one.mixture) == ((None, 8, None), MIXTURE)
    (two,) = deeper.values()
    assert two.windows == (None, 8, 8, None)


def test_sums_grow_with_the_layers_of_each_kind_and_temporaries_do_not():
    small, large = Collective("all-reduce", 8, 4), Collective("all-reduce", 64, 4)
    config = make_model(windows=(None, 8, 8, 8, None))
    one = make_costs(10, small, large)
    deeper = {
        LayerKind(None, False): make_costs(12, small, large, large),
        LayerKind(8, False): make_costs(15, small, large, large, large),
    }
    whole = at_full_depth(config, one, deeper)
    assert (whole.arguments, whole.flops) == (10 + 2 + 2 * 5,) * 2
    assert whole.temporaries == 15
    assert whole.collectives == {small: 1, large: 1 + 1 + 2 * 2}
    assert whole.total == 22 + 15 + 22


def check_against_full_depth(workload: Workload, phase: Phase) -> Costs:
    """Check what shallow programs say against the whole one, and return it."""
    one, deeper = shallow_models(workload.model)
    costs, *more = (
        costs_of(compile_phase(workload.with_model(model), phase)) for model in (one, *deeper.values())
    )
    found = at_full_depth(workload.model, costs, dict(zip(deeper, more, strict=True)))
    real = costs_of(compile_phase(workload, phase))
    assert found.collectives == real.collectives
    assert found.flops == pytest.approx(real.flops, rel=0.01)
    assert found.arguments == pytest.approx(real.arguments, rel=0.001)
    assert found.aliased == pytest.approx(real.aliased, rel=0.001)
    return found


def test_two_depths_say_what_a_program_of_all_layers_sends_and_computes():
    found = check_against_full_depth(make_workload(make_model()), "decode")
    # Two all-reduces a layer, and one of the embedding; of the sampler's the sizes are rows.
    rows = Collective("all-reduce", 2 * 64 * 4, 4, num_loops=1)
    assert found.collectives[rows] == 2 * 5 + 1


@pytest.mark.gate
@pytest.mark.parametrize("phase", PHASES)
def test_layers_of_several_kinds_are_told_apart(phase: Phase):
    config = make_model(num_layers=6, windows=(None, 16, 16, None, 16, None), mixture=MIXTURE)
    check_against_full_depth(make_workload(config), phase)
