"""Prompts cut into padded steps, and capacities rounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.decode.batch import check_prompts, chunks, round_capacity

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


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt is needed"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 100]], r"prompt 0 has token id 100, outside the vocabulary \[0, 100\)"),
        ([[-1]], "prompt 0 has token id -1"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompts: list, message: str):
    with pytest.raises(ValueError, match=message):
        check_prompts(prompts, vocab_size=100)
