"""Generation: rows that do not affect each other, ends, limits, and what is refused."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode import generate as module
from jkv.decode.generate import Decoding, Stream, begin, generate
from jkv.decode.loop import decode, prefill
from jkv.decode.params import SamplingParams
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model

from ..compare import assert_close
from ..poison import poison
from ..tiny import make_config

VOCAB_SIZE = 32
CONFIG = make_config(vocab_size=VOCAB_SIZE)
PROMPTS = [[3], [9, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8]]


@functools.cache
def make_model():
    return split_model(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def make_decoding(**options) -> Decoding:
    """Decode a tiny random model: its tokens depend on all earlier ones."""
    spec = cache_spec(CONFIG, page_size=4, codec="f32")
    return Decoding(*make_model(), spec, VOCAB_SIZE, **{"buckets": (4,), "capacity": 32} | options)


def count_up(weights, tokens, cache, batch):
    """Be a model that follows each token with the next id."""
    last = jnp.take_along_axis(tokens, batch.last[:, None], axis=1)[:, 0]
    return jax.nn.one_hot(last + 1, VOCAB_SIZE), cache


def make_counting(**options) -> Decoding:
    spec = CacheSpec.create([CacheGroup(1, 1, 2)], page_size=4)
    return Decoding(count_up, (), spec, VOCAB_SIZE, **options)


def tokens_of(generations) -> list[list[int]]:
    return [list(row.tokens) for row in generations]


def test_rows_end_by_themselves():
    decoding = make_counting(stop_ids=(10,))
    state = begin(decoding, [[1, 8], [5], [11]], max_new_tokens=8)
    state = decode(decoding.step, decoding.weights, state, 8)
    rows = module.results(state)
    assert tokens_of(rows) == [[9, 10], [6, 7, 8, 9, 10], [*range(12, 20)]]
    assert [row.finish_reason for row in rows] == ["stop", "stop", "length"]
    assert not np.asarray(state.new_tokens)[0, 2:].any()
    assert not np.asarray(state.new_tokens)[1, 5:].any()
    # The prompt and every new token that was an input: all but the last.
    assert state.cache.lengths.tolist() == [2 + 1, 1 + 4, 1 + 7]


def test_a_prompt_that_is_followed_by_a_stop_token_ends_at_once():
    (row,) = generate(make_counting(stop_ids=(10,)), [[9]], max_new_tokens=8)
    assert (row.tokens, row.finish_reason) == ((10,), "stop")


def test_rows_of_different_lengths_equal_each_alone():
    together = generate(make_decoding(), PROMPTS, max_new_tokens=12)
    for prompt, row in zip(PROMPTS, together, strict=True):
        (alone,) = generate(make_decoding(), [prompt], max_new_tokens=12)
        assert alone.tokens == row.tokens
        assert_close([alone.logprobs], [row.logprobs])


def test_greedy_tokens_equal_those_without_a_cache():
    step, weights = make_model()
    sequence = list(PROMPTS[1])
    score = jax.jit(step)
    for _ in range(6):
        # One program: what follows a token does not change its logits.
        padded = np.array([sequence + [0] * (16 - len(sequence))], np.int32)
        sequence.append(int(score(weights, padded, None, None)[0][0, len(sequence) - 1].argmax()))
    assert tokens_of(generate(make_decoding(), [PROMPTS[1]], max_new_tokens=6)) == [sequence[9:]]


@pytest.mark.parametrize("capacity", [16, 17, 64])
def test_a_capacity_changes_no_token(capacity: int):
    (usual,) = generate(make_decoding(), [PROMPTS[2]], max_new_tokens=12)
    (row,) = generate(make_decoding(capacity=capacity), [PROMPTS[2]], max_new_tokens=12)
    assert row.tokens == usual.tokens
    assert_close([row.logprobs], [usual.logprobs])


@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_what_unused_slots_hold_changes_no_bit(value: float, monkeypatch: pytest.MonkeyPatch):
    clean = generate(make_decoding(), PROMPTS, max_new_tokens=12)
    made = module.make_cache
    monkeypatch.setattr(module, "make_cache", lambda *arguments: poison(made(*arguments), value))
    assert generate(make_decoding(), PROMPTS, max_new_tokens=12) == clean


def test_a_seeded_row_keeps_its_tokens_in_any_company():
    seeded = SamplingParams(temperature=0.8, seed=42)
    other = SamplingParams(temperature=0.8)
    prompt = PROMPTS[2]
    companies = [
        ([prompt], [seeded], [0]),
        ([prompt, PROMPTS[1]], [seeded, other], [0]),
        ([PROMPTS[1], prompt], [other, seeded], [1]),
        ([prompt, prompt], [seeded, seeded], [0, 1]),
    ]
    found = set()
    for seed, (prompts, sampling, rows) in enumerate(companies):
        generations = generate(make_decoding(), prompts, max_new_tokens=16, sampling=sampling, seed=seed)
        found |= {generations[row].tokens for row in rows}
    assert len(found) == 1
    unlike = generate(make_decoding(), [prompt], max_new_tokens=16, sampling=SamplingParams(temperature=0.8))
    assert unlike[0].tokens not in found


def test_a_stream_brings_what_generate_returns():
    whole = generate(make_decoding(), PROMPTS, max_new_tokens=12)
    steps = list(Stream(make_decoding(), PROMPTS, max_new_tokens=12))
    assert np.transpose([step.tokens for step in steps]).tolist() == tokens_of(whole)
    np.testing.assert_array_equal(
        np.transpose([step.logprobs for step in steps]), [row.logprobs for row in whole]
    )
    assert steps[-1].finish_reasons == ("length",) * 3


def test_a_stream_is_silent_of_a_row_that_has_ended():
    steps = list(Stream(make_counting(stop_ids=(10,)), [[8], [1]], max_new_tokens=4))
    assert [step.tokens for step in steps] == [(9, 2), (10, 3), (None, 4), (None, 5)]
    assert steps[1].finish_reasons == ("stop", None)


def test_a_stopped_row_leaves_the_others_running():
    stream, seen = Stream(make_counting(), [[1], [20]], max_new_tokens=5), []
    for step in stream:
        seen.append(step.tokens)
        if len(seen) == 2:
            stream.stop(0)
    assert seen == [(2, 21), (3, 22), (None, 23), (None, 24), (None, 25)]


def test_results_hold_no_more_of_a_stopped_row_than_has_come():
    stream = Stream(make_counting(), [[1], [20]], max_new_tokens=5)
    steps = iter(stream)
    next(steps), next(steps)
    stream.stop(0)
    stopped, _ = module.results(stream.state)
    assert (stopped.tokens, stopped.finish_reason) == ((2, 3), "stop")
    assert [step.tokens for step in steps] == [(None, 23), (None, 24), (None, 25)]
    assert module.results(stream.state)[0] == stopped
    assert len(module.results(stream.state)[1].tokens) == 5


def test_a_row_stopped_before_the_first_step_has_no_token():
    stream = Stream(make_counting(), [[1], [20]], max_new_tokens=2)
    stream.stop(0)
    assert [step.tokens for step in stream] == [(None, 21), (None, 22)]
    assert module.results(stream.state)[0].tokens == ()


def test_stopping_a_row_that_has_ended_changes_nothing():
    stream = Stream(make_counting(stop_ids=(10,)), [[9], [20]], max_new_tokens=2)
    assert len(list(stream)) == 2
    ended = module.results(stream.state)
    stream.stop(0)
    stream.stop(1)
    assert module.results(stream.state) == ended
    assert [row.finish_reason for row in ended] == ["stop", "length"]


def test_a_stream_iterated_again_goes_on_and_ends():
    stream = Stream(make_counting(stop_ids=(3,)), [[1], [20]], max_new_tokens=4)
    first = [step.tokens for _, step in zip(range(2), stream, strict=False)]
    assert first == [(2, 21), (3, 22)]
    assert [step.tokens for step in stream] == [(None, 23), (None, 24)]
    assert list(stream) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (7, "sequence must be from 0 to 1, got 7"),
        (-1, "sequence must be from 0 to 1, got -1"),
        (0.5, "sequence must be a whole number, got 0.5"),
    ],
)
def test_a_stream_stops_only_sequences_that_it_has(sequence: Any, message: str):
    stream = Stream(make_counting(), [[1], [20]], max_new_tokens=2)
    with pytest.raises(ValueError, match=message):
        stream.stop(sequence)


def test_twenty_prompt_lengths_compile_a_handful_of_programs():
    decoding = make_counting(stop_ids=(10,))
    # A step function of its own: nothing is compiled for it yet.
    decoding = Decoding(lambda *arguments: count_up(*arguments), (), decoding.spec, VOCAB_SIZE)
    before = prefill._cache_size(), decode._cache_size()
    for length in range(1, 21):
        generate(decoding, [[1] * length], max_new_tokens=4)
    # Widths 16 and 64, and the capacities 4, 8, 16 and 32.
    assert prefill._cache_size() - before[0] <= 5
    assert decode._cache_size() - before[1] <= 4


def test_logits_that_are_not_finite_are_refused():
    def broken(weights, tokens, cache, batch):
        return jnp.full((tokens.shape[0], VOCAB_SIZE), jnp.nan), cache

    with pytest.raises(ValueError, match="must be finite, got NaN or infinity in sequence 0"):
        generate(Decoding(broken, (), make_counting().spec, VOCAB_SIZE), [[1]], max_new_tokens=2)


def test_a_prompt_that_just_fits_is_decoded_and_one_token_more_is_refused():
    decoding = make_counting(capacity=6)
    (row,) = generate(decoding, [[1] * 5], max_new_tokens=2)
    assert len(row.tokens) == 2
    with pytest.raises(
        ValueError, match="a prompt of 6 tokens and 2 new ones need a capacity of 7 tokens, got 6"
    ):
        generate(decoding, [[1] * 6], max_new_tokens=2)


def test_a_model_reads_as_many_positions_as_it_was_made_for():
    decoding = make_counting(max_length=6)
    (row,) = generate(decoding, [[1] * 5], max_new_tokens=2)
    assert len(row.tokens) == 2
    with pytest.raises(ValueError, match="and 3 new ones need a model that reads 7 tokens, got one of 6"):
        generate(decoding, [[1] * 5], max_new_tokens=3)


def test_the_rows_of_an_array_are_prompts():
    rows = generate(make_counting(), np.array([[1, 2], [5, 6]], np.uint8), max_new_tokens=2)
    assert tokens_of(rows) == [[3, 4], [7, 8]]


@pytest.mark.usefixtures("unchecked")
def test_numpys_integers_are_whole_numbers():
    options = {"stop_ids": (np.int32(9),), "capacity": np.int64(16), "buckets": (np.int64(4),)}
    decoding = dataclasses.replace(make_counting(), vocab_size=np.int64(VOCAB_SIZE), **options)
    sampling = SamplingParams(top_k=np.int32(1), temperature=np.float32(0.5), seed=np.int64(-3))
    (row,) = generate(decoding, [[5]], max_new_tokens=np.int64(8), sampling=sampling, seed=np.uint8(1))
    assert row.tokens == (6, 7, 8, 9)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1 to 2147483647, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, got 2.5"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be from 1 to 2147483647, got 2147483648"),
        ({"sampling": [SamplingParams()] * 3}, "one a prompt, got 3 for 2 prompts"),
        ({"sampling": None}, "sampling must be SamplingParams, one or a list, got None"),
        ({"sampling": [0.5, 0.5]}, "sampling must be SamplingParams, one or a list, got [0.5, 0.5]"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"prompts": [1, 2]}, "prompt 0 must be a list of whole token ids, got 1"),
        ({"prompts": [[VOCAB_SIZE]]}, "prompt 0 has token id 32, outside the vocabulary [0, 32)"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(make_counting(), **{"prompts": [[1], [2]], "max_new_tokens": 1} | options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ()}, "buckets must have a width of prefill steps, got none; leave them out"),
        ({"buckets": (-1, 4)}, "a width in buckets must be at least 1 token, got -1"),
        ({"buckets": (0,)}, "a width in buckets must be at least 1 token, got 0"),
        ({"buckets": (4.0,)}, "a width in buckets must be a whole number, got 4.0"),
        ({"buckets": 4}, "buckets must be a list of whole numbers, got 4"),
        ({"stop_ids": (3, 99)}, "stop tokens must be in the vocabulary [0, 32), got 99"),
        ({"stop_ids": (-1,)}, "stop tokens must be in the vocabulary [0, 32), got -1"),
        ({"stop_ids": (1.5,)}, "stop tokens must be in the vocabulary [0, 32), got 1.5"),
        ({"stop_ids": 3}, "stop_ids must be a list of whole numbers, got 3"),
        ({"capacity": 0}, "capacity must be at least 1 token, got 0"),
        ({"capacity": 8.0}, "capacity must be a whole number, got 8.0"),
        ({"max_length": 0}, "max_length must be at least 1 token, got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"vocab_size": 40}, "a step's logits must end in vocab_size, here [1, 40], got [1, 32]"),
        ({"vocab_size": 20}, "a step's logits must end in vocab_size, here [1, 20], got [1, 32]"),
    ],
)
def test_a_decoding_that_makes_no_sense_is_refused(options: dict, message: str):
    decoding = dataclasses.replace(make_counting(), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(decoding, [[1]], max_new_tokens=2)
