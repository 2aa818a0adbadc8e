"""Where a model's weights are to lie, and what is said before they are read."""

from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jkv.layers.attention import GQAttention
from jkv.layers.quantized import WeightCodec
from jkv.models.load import abstract_model, load_model, parameter_targets
from jkv.models.weights.model import StoredModel
from jkv.sharding import Sharding

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("model", "codec", "message"),
    [
        ("mixtral_moe", "int8", "int8 weights must have no experts"),
        ("llama", "int4", "int4 weights need inputs in multiples of 64, got 96; use float32 or"),
    ],
)
def test_what_does_not_pack_is_refused_before_it_is_read(
    model: str, codec: WeightCodec, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StoredModel, "load", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=message):
        load_model(GOLDEN / model, weight_codec=codec)


class Block(nnx.Module):
    """A user's own: attention of jkv beside layers of Flax."""

    def __init__(self, sharding: Sharding):
        rngs, split = nnx.Rngs(0), nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
        self.embed = nnx.Embed(32, 64, rngs=rngs)
        self.attention = GQAttention(64, 8, num_kv_heads=4, sharding=sharding, rngs=rngs)
        self.up = nnx.Linear(64, 128, use_bias=False, kernel_init=split, rngs=rngs)


def test_layers_that_are_not_jkvs_lie_as_flax_says_or_whole():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = Sharding.create(mesh, {"q_head": "model", "kv_head": "model"})
    with jax.set_mesh(mesh):
        targets = parameter_targets(abstract_model(lambda: Block(sharding), sharding), sharding)
    specs = {name: target.sharding.spec for name, target in targets.items() if "attention" not in name}
    assert specs == {"embed.embedding": PartitionSpec(), "up.kernel": PartitionSpec(None, "model")}
    assert targets["attention.q_proj.weight"].sharding.spec == PartitionSpec("model", None)
