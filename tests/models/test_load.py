"""What is said before a model's weights are read."""

from pathlib import Path

import pytest

from jkv.models.load import load_model
from jkv.models.weights.model import StoredModel

GOLDEN = Path(__file__).parents[1] / "golden"


def test_experts_that_do_not_pack_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StoredModel, "load", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match="int8 weights must have no experts"):
        load_model(GOLDEN / "mixtral_moe", weight_codec="int8")
