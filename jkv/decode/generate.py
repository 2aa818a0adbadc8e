"""Generation from prompts of token ids: whole, or step by step as tokens come.

Knows no text: `jkv.decode.text` turns tokens into it.
"""

import functools
import reprlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Cache
from jkv.cache.checks import Scales
from jkv.cache.spec import CacheSpec
from jkv.decode.batch import DEFAULT_BUCKETS, Prompts, read_prompts, round_capacity
from jkv.decode.loop import FINISH_REASONS, NOT_FINITE, RUNNING, WAITING, DecodeState
from jkv.decode.pages import CachePlan, NumPages, PageBooks, plan_cache
from jkv.decode.params import SamplingParams, require_whole
from jkv.decode.running import RunningBatch
from jkv.decode.sampling import Sampler
from jkv.hosts import fetch
from jkv.models.step import StepFunction
from jkv.sharding import Sharding

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Decoding:
    """A model and how it is decoded; what stays the same between calls.

    Attributes:
        step: `(weights, tokens, cache, batch) -> (logits, cache)`, from `split_model` or your own.
        weights: what `step` takes first.
        spec: the cache's sizes and codec.
        vocab_size: columns of the logits.
        stop_ids: tokens that end a sequence; the token itself is the last one returned.
        capacity: tokens that a sequence may hold; None is the least that serves each call.
        num_pages: pages of each cache group's pool, which all sequences share and those that it has no room
            for wait for; "auto" is what all take at once. None gives every sequence pages of its own.
        buckets: widths of prefill steps.
        sharding: where the cache lives; None is one device.
        scales: for each cache group those of keys and values, where their codec is static.
        max_length: positions that the model was made for; None is any number.
    """

    step: StepFunction
    weights: Any
    spec: CacheSpec
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    capacity: int | None = None
    num_pages: NumPages = None
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    sharding: Sharding | None = None
    scales: Scales | None = None
    max_length: int | None = None

    def check(self) -> None:
        """Raise ValueError for the first size or id that cannot be decoded with."""
        require_whole("vocab_size", self.vocab_size, at_least=1)
        for name in ("stop_ids", "buckets"):
            if not isinstance(getattr(self, name), Sequence):
                raise ValueError(f"{name} must be a list of whole numbers, got {getattr(self, name)!r}")
        check_stop_ids(self.stop_ids, self.vocab_size)
        if self.capacity is not None:
            require_whole("capacity", self.capacity, at_least=1, unit=" token")
        if self.max_length is not None:
            require_whole("max_length", self.max_length, at_least=1, unit=" token")
        if self.num_pages not in (None, "auto"):
            require_whole("num_pages", self.num_pages, at_least=1, unit=" page")
        if not self.buckets:
            raise ValueError("buckets must have a width of prefill steps, got none; leave them out")
        for width in self.buckets:
            require_whole("a width in buckets", width, at_least=1, unit=" token")

    @functools.cached_property
    def device(self) -> Any:
        """The one device that the weights are tied to; None where they are free, or on a mesh."""
        tied = {
            device
            for leaf in jax.tree.leaves(self.weights)
            if isinstance(leaf, jax.Array) and leaf.committed
            for device in leaf.devices()
        }
        return tied.pop() if len(tied) == 1 else None

    def place(self, tree: Any, axes: tuple[str | None, ...] = ("seq",)) -> Any:
        """Put a tree of arrays, all with these logical first axes, where the weights are.

        What is tied to a device and what is free make two programs of one: both are tied, or both are free.
        """
        if self.sharding is None:
            return jax.device_put(tree, self.device)
        named = self.sharding.named
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, named(*axes, *[None] * (leaf.ndim - len(axes)))), tree
        )


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for the first stop token that the vocabulary does not have."""
    for token in stop_ids:
        if not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise ValueError(f"stop tokens must be in the vocabulary [0, {vocab_size}), got {token!r}")


@dataclass(frozen=True)
class Generation:
    """One sequence's new tokens.

    Attributes:
        tokens: the new tokens, the stop token included.
        logprobs: log-probability of each under the model's raw logits.
        top_logprobs: for each place, the likeliest tokens and their log-probabilities.
        finish_reason: `stop` or `length`; None while it runs.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str | None


@dataclass(frozen=True)
class StepResult:
    """What one step brought: for each sequence its new token, or None where it had ended.

    Attributes:
        tokens: one a sequence.
        logprobs: of the tokens.
        finish_reasons: set in the step that ends a sequence, and after it.
    """

    tokens: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    finish_reasons: tuple[str | None, ...]


def generate(
    decoding: Decoding,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    seed: int = 0,
) -> list[Generation]:
    """Return the continuation of each prompt, decoded in one `while_loop` on the device.

    Where sequences wait for pages the loop returns to the host when one ends.

    Args:
        decoding: the model and its cache.
        prompts: token ids, in lists or in the rows of an array; lengths may differ.
        max_new_tokens: most new tokens of a sequence.
        sampling: for all sequences, or one each.
        seed: base of the streams of requests that have no seed of their own.

    Raises:
        ValueError: a prompt is empty, too long or holds an unknown id, another argument cannot be honoured,
            or the logits are not finite or not `vocab_size` wide.
    """
    batch = open_batch(decoding, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    while batch.admit():
        batch.advance(int(max_new_tokens))
        batch.tell(fetch(batch.state.finish))
    return results(batch.state)


class Stream:
    """Tokens of a batch as they come; iterating again goes on where the last time ended.

    The device runs one step ahead of the host. `stop` ends a sequence early, with reason `stop`.

    Attributes:
        step_seconds: host time between the arrivals of tokens, one a step; the first is the prefill's.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        seed: int = 0,
        first_request: int = 0,
    ):
        self._clock = time.perf_counter()
        self._batch = open_batch(
            decoding,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            first_request=first_request,
        )
        self._batch.admit()
        self._num_come = np.zeros(len(self._batch.finish), int)
        self.step_seconds: list[float] = []

    @property
    def state(self) -> DecodeState:
        """The latest decode state; of a sequence that runs it holds one token more than has come."""
        return self._batch.state

    @property
    def books(self) -> PageBooks | None:
        """Who holds which pages of the pool; None where every sequence owns its pages."""
        return self._batch.books

    def cache_bytes(self, sequence: int) -> int:
        """Return the bytes of a sequence's pages: its own, or the most that it has held of the pool."""
        if self.books is not None:
            return self.books.row_bytes(sequence)
        cache = self.state.cache
        return cache.spec.dense_bytes(1, cache.capacity)

    def __iter__(self) -> Iterator[StepResult]:
        while self._batch.admit():
            was_running = self._batch.finish == RUNNING
            latest = _latest(self.state)
            # Queued before the host reads this step's tokens, so that the device does not wait for it.
            self._batch.advance(1)
            tokens, logprobs, finish = fetch(latest)
            now = time.perf_counter()
            self.step_seconds.append(now - self._clock)
            self._clock = now
            _check_finite(finish)
            self._num_come += was_running
            self._batch.tell(finish)
            yield _step_result(tokens, logprobs, finish, was_running)

    def stop(self, sequence: int) -> None:
        """End a sequence after the tokens that have come; one that has ended stays as it is.

        Raises:
            ValueError: there is no such sequence.
        """
        require_whole("sequence", sequence, at_least=0, at_most=len(self._num_come) - 1)
        if self._batch.finish[sequence] in (RUNNING, WAITING):
            # The token that the device is ahead by is dropped.
            self._batch.stop(sequence, num_new=int(self._num_come[sequence]))


def begin(
    decoding: Decoding,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    seed: int = 0,
) -> DecodeState:
    """Prefill the prompts, sample each sequence's first token, and return the state that `decode` takes.

    Sequences that share a pool have all the pages that they will need.

    Raises:
        ValueError: as `generate`, or the pool cannot hold all sequences at once.
    """
    batch = open_batch(decoding, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    if batch.books is not None:
        batch.books.plan.require_room()
    batch.admit()
    batch.reserve(int(max_new_tokens))
    return batch.state


def open_batch(
    decoding: Decoding,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    seed: int = 0,
    first_request: int = 0,
) -> RunningBatch:
    """Return the prompts as a batch on the device, all of whose sequences wait.

    Args:
        decoding: see `generate`, as are the others.
        prompts: token ids.
        max_new_tokens: most new tokens of a sequence.
        sampling: for all sequences, or one each.
        seed: base of the streams of requests that have no seed of their own.
        first_request: the first prompt's index among all requests, which such a stream depends on too.

    Raises:
        ValueError: as `generate`.
    """
    decoding.check()
    sequences = read_prompts(prompts, vocab_size=decoding.vocab_size)
    max_new_tokens = require_whole("max_new_tokens", max_new_tokens, at_least=1, at_most=2**31 - 1)
    require_whole("seed", seed, at_least=0)
    rows = len(sequences)
    params = [sampling] * rows if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(params, Sequence) or not all(isinstance(row, SamplingParams) for row in params):
        raise ValueError(f"sampling must be SamplingParams, one or a list, got {reprlib.repr(params)}")
    if len(params) != rows:
        raise ValueError(
            f"sampling must be one for all or one a prompt, got {len(params)} for {rows} prompts"
        )
    sampler = Sampler.create(
        params,
        vocab_size=decoding.vocab_size,
        prompts=sequences,
        base_seed=seed,
        request_indices=range(first_request, first_request + rows),
    )
    history = (rows, round_capacity(max_new_tokens, 16))
    top = (*history, sampler.most_logprobs)
    of_rows = {
        "sampler": sampler,
        "token": np.zeros(rows, np.int32),
        "num_new": np.zeros(rows, np.int32),
        "finish": np.full(rows, WAITING, np.int32),
        "limits": np.full(rows, max_new_tokens, np.int32),
        "new_tokens": np.zeros(history, np.int32),
        "logprobs": np.zeros(history, np.float32),
        "top_tokens": np.zeros(top, np.int32),
        "top_logprobs": np.zeros(top, np.float32),
    }
    return RunningBatch(
        decoding.step,
        decoding.weights,
        DecodeState(
            cache=make_cache(decoding, sequences, max_new_tokens),
            stop_ids=decoding.place(np.asarray(decoding.stop_ids or (-1,), np.int32), (None,)),
            **decoding.place(of_rows),
        ),
        sequences,
        open_books(decoding, sequences, max_new_tokens),
        buckets=decoding.buckets,
        vocab_size=decoding.vocab_size,
        place=decoding.place,
    )


def make_cache(decoding: Decoding, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Cache:
    """Return an empty cache for the prompts and their continuations; its sizes are checked first.

    Raises:
        ValueError: the longest prompt and its new tokens do not fit in the capacity or the pool.
    """
    plan = plan_decoding(decoding, prompts, max_new_tokens)
    options: dict[str, Any] = {
        "num_sequences": len(prompts),
        "capacity": plan.capacity,
        "scales": decoding.scales,
        "sharding": decoding.sharding,
    }
    if plan.num_pages is None:
        cache = Cache.dense(decoding.spec, **options)
    else:
        cache = Cache.paged(decoding.spec, num_pages=plan.num_pages, **options)
    return cache if decoding.sharding else decoding.place(cache)


def make_full_cache(decoding: Decoding, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Cache:
    """Return an empty cache in which every sequence has the pages for all its tokens.

    Raises:
        ValueError: as `make_cache`, or the pool cannot hold all sequences at once.
    """
    books = open_books(decoding, prompts, max_new_tokens)
    if books is None:
        return make_cache(decoding, prompts, max_new_tokens)
    books.plan.require_room()
    for row, prompt in enumerate(prompts):
        assert books.start(row)
        books.extend(row, len(prompt) + max_new_tokens)
    cache = make_cache(decoding, prompts, max_new_tokens)
    return cache.assign(decoding.place(books.tables(), ("seq", None)))


def open_books(decoding: Decoding, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> PageBooks | None:
    """Return the books of the cache that `make_cache` returns; None where every sequence owns its pages."""
    plan = plan_decoding(decoding, prompts, max_new_tokens)
    if plan.num_pages is None:
        return None
    return PageBooks(plan, [len(prompt) + max_new_tokens - 1 for prompt in prompts])


def plan_decoding(decoding: Decoding, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> CachePlan:
    """Return the sizes of the cache for the prompts; see `plan_cache`.

    Raises:
        ValueError: as `plan_cache`, or the model does not read as many tokens.
    """
    longest = max(map(len, prompts))
    # Nothing follows the last new token that would read it.
    num_read = longest + max_new_tokens - 1
    if decoding.max_length is not None and num_read > decoding.max_length:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need a model that reads {num_read} "
            f"tokens, got one of {decoding.max_length}; shorten them"
        )
    return plan_cache(
        decoding.spec,
        Counter(map(len, prompts)),
        max_new_tokens,
        capacity=decoding.capacity,
        num_pages=decoding.num_pages,
        num_shards=decoding.sharding.size("seq") if decoding.sharding else 1,
    )


def results(state: DecodeState) -> list[Generation]:
    """Bring what the state's sequences have generated to the host.

    Raises:
        ValueError: a sequence's logits were not finite.
    """
    finish, counts, tokens, logprobs, top_counts, top_tokens, top_logprobs = fetch(
        (
            state.finish,
            state.num_new,
            state.new_tokens,
            state.logprobs,
            state.sampler.num_logprobs,
            state.top_tokens,
            state.top_logprobs,
        )
    )
    _check_finite(finish)
    return [
        Generation(
            tokens=tuple(tokens[row, :count].tolist()),
            logprobs=tuple(logprobs[row, :count].tolist()),
            top_logprobs=tuple(
                tuple(zip(ids.tolist(), values.tolist(), strict=True))
                for ids, values in zip(
                    top_tokens[row, :count, :top_count], top_logprobs[row, :count, :top_count], strict=True
                )
            ),
            finish_reason=FINISH_REASONS.get(int(finish[row])),
        )
        for row, (count, top_count) in enumerate(zip(counts, top_counts, strict=True))
    ]


@jax.jit
def _latest(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each row's newest token, its log-probability, and why the row ended."""
    column = jnp.maximum(state.num_new - 1, 0)[:, None]
    return state.token, jnp.take_along_axis(state.logprobs, column, axis=1)[:, 0], state.finish


def _step_result(
    tokens: np.ndarray, logprobs: np.ndarray, finish: np.ndarray, is_new: np.ndarray
) -> StepResult:
    return StepResult(
        tokens=tuple(int(token) if new else None for token, new in zip(tokens, is_new, strict=True)),
        logprobs=tuple(float(value) if new else None for value, new in zip(logprobs, is_new, strict=True)),
        finish_reasons=tuple(FINISH_REASONS.get(int(code)) for code in finish),
    )


def _check_finite(finish: np.ndarray) -> None:
    bad = np.flatnonzero(finish == NOT_FINITE)
    if bad.size:
        raise ValueError(
            f"logits must be finite, got NaN or infinity in sequence {bad[0]}; check the weights"
        )
