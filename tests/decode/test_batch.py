"""Prompts cut into padded steps, and capacities rounded."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.decode.batch import chunks, read_prompts, round_capacity

PROMPTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=40), min_size=1, max_size=4)


@given(PROMPTS, st.sampled_from([(4,), (1, 8), (2, 4, 16)]))
def test_chunks_joined_are_the_prompts(prompts: list[list[int]], buckets: tuple[int, ...]):
    joined = [[] for _ in prompts]
    for chunk in chunks(prompts, buckets):
        assert chunk.tokens.shape[1] in buckets
        for row, tokens, length in zip(joined, chunk.tokens, chunk.lens, strict=True):
            row += tokens[:length].tolist()
            assert not tokens[length:].any()
    assert joined == prompts


def test_the_rest_of_a_prompt_takes_the_narrowest_bucket_that_holds_it():
    widths = [chunk.tokens.shape[1] for chunk in chunks([[1] * 37], (4, 8, 16))]
    assert widths == [16, 16, 8]


def test_a_short_prompt_idles_in_later_chunks():
    lens = [chunk.lens.tolist() for chunk in chunks([[1] * 3, [1] * 20], (16,))]
    assert lens == [[3, 16], [0, 4]]


def test_a_capacity_is_a_power_of_two_of_pages_that_holds_the_tokens():
    assert [round_capacity(tokens, 16) for tokens in (1, 16, 17, 33, 64, 65)] == [16, 16, 32, 64, 64, 128]
    assert round_capacity(5, 3) == 6


@pytest.mark.parametrize("kind", [list, tuple, np.array, jnp.array, iter])
def test_prompts_may_be_lists_or_arrays(kind: Callable):
    rows = read_prompts(kind([[1, 2], [3, 4]]), vocab_size=100)
    assert rows == [[1, 2], [3, 4]]
    assert all(type(token) is int for row in rows for token in row)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt is needed"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 100]], "prompt 0 has token id 100, outside the vocabulary [0, 100)"),
        ([[-1]], "prompt 0 has token id -1"),
        ([[1], [0.5, 1.7]], "prompt 1 must be a list of whole token ids, got [0.5, 1.7]"),
        (np.ones((2, 3)), "prompt 0 must be a list of whole token ids, got array([1., 1., 1.])"),
        (np.ones((2, 3, 4), int), "prompt 0 must be a list of whole token ids, got array([[1"),
        ([0, 1, 2], "prompt 0 must be a list of whole token ids, got 0;"),
        ("abc", "prompt 0 must be a list of whole token ids, got 'a';"),
        (["abc"], "prompt 0 must be a list of whole token ids, got 'abc';"),
        ([None], "prompt 0 must be a list of whole token ids, got None;"),
        (7, "prompts must be lists of token ids, as [[1, 2], [3]], got 7"),
        (None, "prompts must be lists of token ids, as [[1, 2], [3]], got None"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompts: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_prompts(prompts, vocab_size=100)
