"""Sequences that share a pool: the tokens of a dense cache, and every page returned."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jkv.decode import generate as module
from jkv.decode.generate import Decoding, Stream, begin, generate
from jkv.decode.loop import decode, prefill
from jkv.decode.score import score
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model

from ..poison import poison
from ..tiny import make_config

CONFIG = make_config(num_layers=3, windows=(None, 6, None), max_length=128)
PROMPTS = [[3], [9, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1]]
NUM_NEW = 12
# Rows of up to 12, 22, 15 and 17 tokens take 3, 6, 4 and 5 pages: the last two wait.
SMALL_POOL = 10


@functools.cache
def make_model():
    return split_model(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def make_decoding(*, keeps_windows: bool = True, **options) -> Decoding:
    spec = cache_spec(CONFIG, page_size=4, max_chunk=4 if keeps_windows else None)
    return Decoding(*make_model(), spec, CONFIG.vocab_size, **{"buckets": (4,)} | options)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch):
    made = module.make_cache
    monkeypatch.setattr(module, "make_cache", lambda *arguments: poison(made(*arguments)))


@functools.cache
def whole():
    """Generate without ends, every sequence with pages of its own."""
    return generate(make_decoding(), PROMPTS, max_new_tokens=NUM_NEW)


@functools.cache
def ended():
    """Generate with a token that ends some of the sequences early."""
    return generate(make_decoding(stop_ids=stop_ids()), PROMPTS, max_new_tokens=NUM_NEW)


def stop_ids() -> tuple[int, ...]:
    return (whole()[1].tokens[4],)


def test_some_sequences_end_early_and_at_different_times():
    assert len({len(row.tokens) for row in ended()}) > 1
    assert {row.finish_reason for row in ended()} == {"stop", "length"}


def test_windows_change_no_token():
    dense = generate(make_decoding(keeps_windows=False), PROMPTS, max_new_tokens=NUM_NEW)
    assert [row.tokens for row in dense] == [row.tokens for row in whole()]


@pytest.mark.parametrize("num_pages", ["auto", SMALL_POOL])
def test_a_shared_pool_changes_no_bit(num_pages):
    assert generate(make_decoding(num_pages=num_pages), PROMPTS, max_new_tokens=NUM_NEW) == whole()
    decoding = make_decoding(num_pages=num_pages, stop_ids=stop_ids())
    assert generate(decoding, PROMPTS, max_new_tokens=NUM_NEW) == ended()


@pytest.mark.parametrize("num_pages", ["auto", SMALL_POOL])
def test_a_stream_takes_pages_as_it_grows_and_returns_them_at_once(num_pages):
    stream = Stream(make_decoding(num_pages=num_pages, stop_ids=stop_ids()), PROMPTS, max_new_tokens=NUM_NEW)
    books, held = stream.books, []
    assert books is not None
    come = [[] for _ in PROMPTS]
    for step in stream:
        books.check()
        for row, (token, reason) in enumerate(zip(step.tokens, step.finish_reasons, strict=True)):
            come[row] += [] if token is None else [token]
            has_pages = (books.tables()[0][row] >= 0).any()
            assert has_pages == (bool(come[row]) and reason is None)
        held.append((books.tables()[0] >= 0).sum())
    assert come == [list(row.tokens) for row in ended()]
    assert module.results(stream.state) == ended()
    assert stream.state.cache.num_dropped.tolist() == [0] * len(PROMPTS)
    assert held[-1] == 0
    # No sequence holds from the start what it will need at its end.
    assert books.peaks[0] > held[0]
    assert books.peaks[0] <= books.plan.num_pages[0]


def test_a_stopped_sequence_makes_room_for_one_that_waits():
    stream = Stream(make_decoding(num_pages=SMALL_POOL), PROMPTS, max_new_tokens=NUM_NEW)
    steps = iter(stream)
    first = next(steps)
    assert [token is None for token in first.tokens] == [False, False, True, True]
    stream.stop(1)
    stream.stop(3)
    assert [token is None for token in next(steps).tokens] == [False, True, False, True]
    list(steps)
    stopped = [row.tokens for row in whole()]
    stopped[1], stopped[3] = stopped[1][:1], ()
    assert [row.tokens for row in module.results(stream.state)] == stopped


def test_a_state_that_is_begun_has_every_page_it_will_need():
    state = begin(make_decoding(num_pages="auto"), PROMPTS, max_new_tokens=NUM_NEW)
    held = [(np.asarray(pool.page_table) >= 0).sum(axis=1).tolist() for pool in state.cache.pools]
    # A window of 6 and a step of 4 take 3 pages.
    assert held == [[3, 6, 4, 5], [3] * 4]
    with pytest.raises(ValueError, match="the 4 sequences need 18 pages at once, got a pool of 10"):
        begin(make_decoding(num_pages=SMALL_POOL), PROMPTS, max_new_tokens=NUM_NEW)


def test_pages_and_sequences_that_come_later_make_no_second_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    step, weights = make_model()
    # A step function of its own, and weights that are tied to a device as a loaded model's are.
    weights = jax.device_put(weights, jax.devices()[0])
    decoding = replace(make_decoding(num_pages=SMALL_POOL), step=lambda *given: step(*given), weights=weights)
    before = prefill._cache_size(), decode._cache_size()
    list(Stream(decoding, PROMPTS, max_new_tokens=NUM_NEW))
    assert (prefill._cache_size() - before[0], decode._cache_size() - before[1]) == (1, 1)


def test_a_prompt_that_can_never_fit_is_refused():
    message = "a prompt of 11 tokens and 12 new ones need 6 pages of 4 tokens, got a pool of 5"
    with pytest.raises(ValueError, match=message):
        generate(make_decoding(num_pages=5), PROMPTS, max_new_tokens=NUM_NEW)


def test_a_score_through_a_pool_is_that_of_a_dense_cache():
    tokens = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, 21))
    dense = score(make_decoding(), tokens, chunk=4)
    np.testing.assert_array_equal(score(make_decoding(num_pages="auto"), tokens, chunk=4).nll, dense.nll)
    with pytest.raises(ValueError, match="the 2 sequences need 12 pages at once, got a pool of 11"):
        score(replace(make_decoding(), num_pages=11), tokens, chunk=4)
