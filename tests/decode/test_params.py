"""What a request may ask of the sampler."""

import math
import re

import pytest

from jkv.decode.params import SamplingParams


def test_the_defaults_are_legal():
    SamplingParams().check(vocab_size=1)


def test_limits_are_legal():
    SamplingParams(
        temperature=1e-20,
        top_k=10**6,
        top_p=1e-9,
        min_p=1e-20,
        repetition_penalty=1e20,
        presence_penalty=-1e20,
        frequency_penalty=1e20,
        logit_bias=((0, -math.inf), (1, -math.inf), (2, -math.inf), (3, 1e20)),
        seed=-(2**63),
        num_logprobs=4,
    ).check(vocab_size=4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be 0 or from 1e-20 to 1e+20, got -0.1"),
        ("temperature", math.nan, "temperature must be 0 or from 1e-20 to 1e+20, got nan"),
        ("temperature", math.inf, "temperature must be 0 or from 1e-20 to 1e+20, got inf"),
        ("temperature", 1e300, "temperature must be 0 or from 1e-20 to 1e+20, got 1e+300"),
        ("temperature", 10**400, "temperature must be 0 or from 1e-20 to 1e+20, got 1000"),
        ("temperature", 1e-300, "temperature must be 0 or from 1e-20 to 1e+20, got 1e-300"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("top_k", -1, "top_k must be at least 0, got -1; use 0 to keep all tokens"),
        ("top_k", 1.5, "top_k must be a whole number, got 1.5; use 0 to keep all tokens"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0; use 1 to keep all tokens"),
        ("top_p", 1.5, "top_p must be above 0"),
        ("top_p", math.nan, "top_p must be above 0"),
        ("min_p", 1.5, "min_p must be 0 or from 1e-20 to 1, got 1.5"),
        ("min_p", math.nan, "min_p must be 0 or from 1e-20 to 1, got nan"),
        ("min_p", 1e-50, "min_p must be 0 or from 1e-20 to 1, got 1e-50"),
        ("repetition_penalty", 0.0, "repetition_penalty must be from 1e-20 to 1e+20, got 0.0"),
        ("repetition_penalty", 1e-300, "repetition_penalty must be from 1e-20 to 1e+20, got 1e-300"),
        ("repetition_penalty", 1e300, "repetition_penalty must be from 1e-20 to 1e+20, got 1e+300"),
        ("presence_penalty", math.inf, "presence_penalty must be from -1e+20 to 1e+20, got inf"),
        ("presence_penalty", 1e39, "presence_penalty must be from -1e+20 to 1e+20, got 1e+39"),
        ("frequency_penalty", math.nan, "frequency_penalty must be from -1e+20 to 1e+20, got nan"),
        ("frequency_penalty", -1e300, "frequency_penalty must be from -1e+20 to 1e+20, got -1e+300"),
        ("logit_bias", ((4, 1.0),), "a token id in logit_bias must be from 0 to 3, got 4"),
        ("logit_bias", ((-1, 1.0),), "a token id in logit_bias must be from 0 to 3, got -1"),
        ("logit_bias", ((1.5, 1.0),), "a token id in logit_bias must be a whole number, got 1.5"),
        (
            "logit_bias",
            ((1, math.inf),),
            "a bias in logit_bias must be -inf or from -1e+20 to 1e+20, got inf",
        ),
        (
            "logit_bias",
            ((1, math.nan),),
            "a bias in logit_bias must be -inf or from -1e+20 to 1e+20, got nan",
        ),
        ("logit_bias", ((1, 1e39),), "got 1e+39; use -inf to ban a token"),
        ("logit_bias", ((1, "2"),), "a bias in logit_bias must be -inf or from -1e+20 to 1e+20, got '2'"),
        ("logit_bias", ((1, 2.0), (1, 3.0)), "logit_bias must be given once for each token, got [1, 1]"),
        ("logit_bias", {1: 2.0}, "logit_bias must be (token id, bias) pairs, got {1: 2.0}; write"),
        ("logit_bias", None, "logit_bias must be (token id, bias) pairs, got None"),
        (
            "logit_bias",
            tuple((token_id, -math.inf) for token_id in range(4)),
            "logit_bias must leave a token to choose, got -inf for all 4 of the vocabulary",
        ),
        (
            "seed",
            2**63,
            "seed must be from -9223372036854775808 to 9223372036854775807, got 9223372036854775808",
        ),
        ("seed", 0.5, "seed must be a whole number, got 0.5"),
        ("num_logprobs", 5, "num_logprobs must be from 0 to 4, got 5"),
        ("num_logprobs", 1.0, "num_logprobs must be a whole number, got 1.0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_value_out_of_range_is_refused(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**{field: value}).check(vocab_size=4)
