"""What a conversion costs a model on a text, through both caches.

Knows models; no conversion.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Int

from jkv.decode.compare import Comparison, compare
from jkv.decode.generate import Decoding
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.load import abstract_decoder, set_parameters
from jkv.models.model_config import ModelConfig
from jkv.models.step import split_model

_PAGE_SIZE = 64
_CHUNK = 64


def make_decoder(config: ModelConfig, parameters: Mapping[str, jax.Array]) -> Decoder:
    """Return the decoder with these parameters, by dotted path."""
    model = abstract_decoder(config)
    set_parameters(model, dict(parameters))
    return model


def compare_models(base: Decoder, other: Decoder, tokens: Int[np.ndarray, "row time"]) -> Comparison:
    """Run rows of tokens through both models, each with its cache."""
    first, second = (
        Decoding(*split_model(model), cache_spec(model.config, page_size=_PAGE_SIZE), model.config.vocab_size)
        for model in (base, other)
    )
    (comparison,) = compare(first, [second], tokens, chunk=_CHUNK)
    return comparison
