"""What the cache's codecs cost the bundled model, through the real cache."""

from pathlib import Path

import numpy as np
import pytest

from jkv.decode.compare import compare
from jkv.decode.generate import Decoding
from jkv.models.decoder import cache_spec
from jkv.models.load import load_model

REFERENCE = Path(__file__).parent.parent / "golden" / "smollm2" / "reference.npz"
# Mean divergence at most, in nats, and share of same likeliest tokens at least, over 2,048 tokens of prose.
GOALS = {
    "int8": (0.001, 0.98),
    "fp8_e4m3": (0.006, 0.95),
    "int8/int4": (0.007, 0.945),
    "int4": (0.021, 0.925),
}


@pytest.mark.gate
@pytest.mark.model
def test_codecs_keep_the_model_s_distributions():
    with np.load(REFERENCE) as arrays:
        tokens = arrays["text_ids"][None, :2048]
    model = load_model("smollm2-135m")

    def decoding(codec: str) -> Decoding:
        keys, _, values = codec.partition("/")
        spec = cache_spec(model.config, page_size=32, codec=keys, value_codec=values or None)
        return Decoding(model.step, model.weights, spec, model.config.vocab_size)

    results = compare(decoding("f32"), [decoding(codec) for codec in GOALS], tokens, chunk=256)
    for codec, result in zip(GOALS, results, strict=True):
        divergence, same_top = GOALS[codec]
        assert result.mean_divergence <= divergence, codec
        assert result.same_top_share >= same_top, codec
        # A ratio's standard error is up to half a percent here: a loose bound.
        assert abs(result.perplexity_ratio - 1) < 0.03, codec
