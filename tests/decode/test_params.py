"""What a request may ask of the sampler."""

import math

import pytest

from jkv.decode.params import SamplingParams


def test_the_defaults_are_legal():
    SamplingParams().check(vocab_size=1)


def test_limits_are_legal():
    SamplingParams(
        temperature=1e-6,
        top_k=10**6,
        top_p=1e-9,
        min_p=1.0,
        logit_bias=((0, -math.inf), (3, 100.0)),
        seed=-(2**63),
        num_logprobs=4,
    ).check(vocab_size=4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be at least 0 and finite, got -0.1"),
        ("temperature", math.nan, "temperature must be at least 0 and finite, got nan"),
        ("temperature", math.inf, "temperature must be at least 0 and finite, got inf"),
        ("top_k", -1, "top_k must be at least 0, got -1; use 0 to keep all tokens"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0; use 1 to keep all tokens"),
        ("top_p", 1.5, "top_p must be above 0"),
        ("top_p", math.nan, "top_p must be above 0"),
        ("min_p", 1.5, "min_p must be from 0 to 1, got 1.5"),
        ("min_p", math.nan, "min_p must be from 0 to 1, got nan"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0 and finite, got 0.0"),
        ("presence_penalty", math.inf, "presence_penalty must be finite, got inf"),
        ("frequency_penalty", math.nan, "frequency_penalty must be finite, got nan"),
        (
            "logit_bias",
            ((4, 1.0),),
            "a token id in logit_bias must be at least 0 and below the vocabulary's 4",
        ),
        ("logit_bias", ((-1, 1.0),), "a token id in logit_bias must be at least 0"),
        ("logit_bias", ((1, math.inf),), "a bias in logit_bias must be below infinity, got inf"),
        ("logit_bias", ((1, math.nan),), "a bias in logit_bias must be below infinity, got nan"),
        ("logit_bias", ((1, 2.0), (1, 3.0)), r"logit_bias must be given once for each token, got \[1, 1\]"),
        ("seed", 2**63, "seed must be a signed 64-bit integer"),
        ("num_logprobs", 5, "num_logprobs must be from 0 to the vocabulary's 4, got 5"),
    ],
)
def test_a_value_out_of_range_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value}).check(vocab_size=4)
