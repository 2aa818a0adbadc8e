"""Rules over a mesh: what they give, and what they refuse."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jkv.sharding import Sharding

RULES = {"seq": "data", "page": "data", "q_head": "model", "kv_head": "model", "mlp": "model", "embed": None}


def make_sharding(axis_type: AxisType = AxisType.Auto, **changes: str | None) -> Sharding:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    return Sharding.create(mesh, RULES | changes)


def test_a_spec_has_the_mesh_axis_of_each_logical_axis():
    sharding = make_sharding()
    assert sharding.spec("page", "kv_head", None, None) == PartitionSpec("data", "model", None, None)
    assert sharding.spec("embed", "vocab") == PartitionSpec(None, None)
    assert sharding.spec(("embed", "mlp"), "seq") == PartitionSpec("model", "data")
    assert sharding.spec(("seq", "mlp"), None) == PartitionSpec(("data", "model"), None)
    assert sharding.named("seq").mesh is sharding.mesh


def test_sizes_are_those_of_the_mesh_axis():
    assert [make_sharding().size(axis) for axis in ("seq", "kv_head", "embed", "vocab")] == [4, 2, 1, 1]


def test_equal_shardings_hash_alike():
    assert make_sharding() == make_sharding()
    assert hash(make_sharding()) == hash(make_sharding())


def test_axis_types_are_known():
    assert make_sharding(AxisType.Explicit).is_explicit
    assert not make_sharding().is_explicit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_haed": "model"}, "got 'kv_haed'; did you mean 'kv_head'"),
        ({"mlp": "modle"}, r"of the mesh axes \('data', 'model'\), got 'modle'; did you mean 'model'\?"),
        ({"page": "model"}, "'page' and 'seq' must be equal, got 'model' and 'data'"),
        ({"q_head": None}, "'q_head' and 'kv_head' must be equal, got None and 'model'"),
        ({"context": "model"}, "'context' and 'q_head' must differ, got 'model' for both"),
        ({"embed": "model"}, "split alike, got 'model' for 'embed' and 'q_head' of query projection"),
        (
            {"seq": "model", "page": "model"},
            r"for 'seq' and 'q_head' of queries \('seq', 'time', 'q_head', 'head_dim'\); drop one",
        ),
        ({"context": "data"}, "'context' and 'seq' must differ, got 'data' for both"),
        (
            {"layer": "data"},
            r"head_dim, slot, latent, rope are never split, got a rule for \['layer'\]; drop it",
        ),
        ({"latent": "data"}, r"are never split, got a rule for \['latent'\]"),
    ],
)
def test_rules_that_cannot_hold_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_sharding(**changes)


def test_an_array_split_twice_over_one_axis_is_refused():
    with pytest.raises(ValueError, match="would use a mesh axis twice"):
        make_sharding().spec("q_head", "mlp")


def test_an_unknown_axis_of_an_array_is_refused_and_never_whole():
    with pytest.raises(ValueError, match=r"logical axes are seq, .*, got 'sek'; did you mean 'seq'\?"):
        make_sharding().named("sek", None)


def test_a_size_that_shards_do_not_divide_is_refused():
    make_sharding().check_divides("kv_head", 4)
    make_sharding().check_divides("embed", 7)
    with pytest.raises(ValueError, match="'kv_head' has 3 entries, which 2 shards of mesh axis 'model'"):
        make_sharding().check_divides("kv_head", 3)
