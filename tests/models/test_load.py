"""What is said before a model's weights are read."""

from pathlib import Path

import pytest

from jkv.layers.quantized import WeightCodec
from jkv.models.load import load_model
from jkv.models.weights.model import StoredModel

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
