"""Scores of given tokens, and what is refused."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.generate import Decoding
from jkv.decode.score import score

from ..compare import assert_close

VOCAB_SIZE = 8


def count_up(weights, tokens, cache, batch):
    """Be a model that expects each token to be followed by the next id."""
    return 3 * jax.nn.one_hot(tokens + 1, VOCAB_SIZE), cache


def make_decoding(**options) -> Decoding:
    spec = CacheSpec.create([CacheGroup(1, 1, 2)], page_size=4)
    return dataclasses.replace(Decoding(count_up, (), spec, VOCAB_SIZE), **options)


TOKENS = np.array([[1, 2, 3, 5, 6], [4, 3, 2, 3, 4]])


@pytest.mark.parametrize("kind", [np.array, jnp.array, np.ndarray.tolist])
@pytest.mark.parametrize("chunk", [1, 2, 256])
def test_a_score_is_that_of_the_models_logits(kind, chunk: int):
    result = score(make_decoding(), kind(TOKENS), chunk=chunk, keep_logits=True)
    expected = 3.0 * np.eye(VOCAB_SIZE, dtype=np.float32)[TOKENS + 1]
    assert_close(result.logits, expected)
    losses = -jax.nn.log_softmax(expected)[np.arange(2)[:, None], np.arange(4), TOKENS[:, 1:]]
    assert_close(result.nll, losses)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "at least one prompt is needed, got none"),
        (np.zeros((2, 0), int), {}, "prompt 0 is empty; give at least one token"),
        ([[1]], {}, "a score needs at least 2 tokens a row, got 1 rows of 1"),
        ([[1, 2], [1, 2, 3]], {}, "a score needs rows of one length, got lengths from 2 to 3"),
        ([[1, VOCAB_SIZE]], {}, "prompt 0 has token id 8, outside the vocabulary [0, 8)"),
        (np.ones((1, 4)), {}, "prompt 0 must be a list of whole token ids, got array([1., 1., 1., 1.])"),
        ([1, 2, 3], {}, "prompt 0 must be a list of whole token ids, got 1;"),
        ("text", {}, "prompt 0 must be a list of whole token ids, got 't';"),
        (TOKENS, {"chunk": 0}, "chunk must be at least 1 token, got 0"),
        (TOKENS, {"chunk": -4}, "chunk must be at least 1 token, got -4"),
        (TOKENS, {"chunk": 2.5}, "chunk must be a whole number, got 2.5"),
    ],
)
def test_a_score_that_makes_no_sense_is_refused(tokens: Any, options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        score(make_decoding(), tokens, **options)


@pytest.mark.parametrize("vocab_size", [7, 9])
def test_a_vocabulary_of_another_size_than_the_logits_is_refused(vocab_size: int):
    message = rf"must end in vocab_size, here \[2, 5, {vocab_size}\], got \[2, 5, 8\]"
    with pytest.raises(ValueError, match=message):
        score(make_decoding(vocab_size=vocab_size), TOKENS)


def test_a_decoding_that_makes_no_sense_scores_nothing():
    with pytest.raises(ValueError, match="capacity must be at least 1 token, got 0"):
        score(make_decoding(capacity=0), TOKENS)
