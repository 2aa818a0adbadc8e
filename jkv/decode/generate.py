"""Generation from prompts of token ids: whole, or step by step as tokens come.

Knows no text: `jkv.decode.text` turns tokens into it.
"""

import functools
import reprlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Cache, Scales
from jkv.cache.spec import CacheSpec
from jkv.decode.batch import DEFAULT_BUCKETS, Prompts, chunks, read_prompts, round_capacity
from jkv.decode.loop import FINISH_REASONS, NOT_FINITE, RUNNING, STOP, DecodeState, decode, prefill, start
from jkv.decode.params import SamplingParams, require_whole
from jkv.decode.sampling import Sampler
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
        buckets: widths of prefill steps.
        sharding: where the cache lives; None is one device.
        scales: for each cache group those of keys and values, where their codec is static.
    """

    step: StepFunction
    weights: Any
    spec: CacheSpec
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    capacity: int | None = None
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    sharding: Sharding | None = None
    scales: Scales | None = None

    def check(self) -> None:
        """Raise ValueError for the first size or id that cannot be decoded with."""
        require_whole("vocab_size", self.vocab_size, at_least=1)
        for name in ("stop_ids", "buckets"):
            if not isinstance(getattr(self, name), Sequence):
                raise ValueError(f"{name} must be a list of whole numbers, got {getattr(self, name)!r}")
        for token in self.stop_ids:
            if not isinstance(token, Integral) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"stop tokens must be in the vocabulary [0, {self.vocab_size}), got {token!r}"
                )
        if self.capacity is not None:
            require_whole("capacity", self.capacity, at_least=1, unit=" token")
        if not self.buckets:
            raise ValueError("buckets must have a width of prefill steps, got none; leave them out")
        for width in self.buckets:
            require_whole("a width in buckets", width, at_least=1, unit=" token")


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
    state = begin(decoding, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    state = decode(decoding.step, decoding.weights, state, int(max_new_tokens))
    return results(state)


class Stream:
    """Tokens of a batch as they come; iterating again goes on where the last time ended.

    The device runs one step ahead of the host. `stop` ends a sequence early, with reason `stop`.

    Attributes:
        state: the latest decode state; of a sequence that runs it holds one token more than has come.
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
    ):
        self._clock = time.perf_counter()
        self.decoding = decoding
        self.state = begin(decoding, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
        self.step_seconds: list[float] = []
        # Why sequences ended, as far as the host has been told.
        self._finish = np.full(self.state.finish.shape, RUNNING)

    def __iter__(self) -> Iterator[StepResult]:
        while (was_running := self._finish == RUNNING).any():
            latest = _latest(self.state)
            # Queued before the host reads this step's tokens, so that the device does not wait for it.
            self.state = decode(self.decoding.step, self.decoding.weights, self.state, 1)
            tokens, logprobs, finish = jax.device_get(latest)
            now = time.perf_counter()
            self.step_seconds.append(now - self._clock)
            self._clock = now
            _check_finite(finish)
            self._finish = np.array(finish)
            yield _step_result(tokens, logprobs, finish, was_running)

    def stop(self, sequence: int) -> None:
        """End a sequence after the tokens that have come; one that has ended stays as it is.

        Raises:
            ValueError: there is no such sequence.
        """
        require_whole("sequence", sequence, at_least=0, at_most=len(self._finish) - 1)
        if self._finish[sequence] != RUNNING:
            return
        self._finish[sequence] = STOP
        # A step brings each running sequence one token; the one that the device is ahead by is dropped.
        num_new = self.state.num_new.at[sequence].set(len(self.step_seconds))
        self.state = self.state.replace(finish=self.state.finish.at[sequence].set(STOP), num_new=num_new)


def begin(
    decoding: Decoding,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    seed: int = 0,
) -> DecodeState:
    """Prefill the prompts, sample each sequence's first token, and return the state that `decode` takes.

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
    sampler = Sampler.create(params, vocab_size=decoding.vocab_size, prompts=sequences, base_seed=seed)
    cache = make_cache(decoding, sequences, max_new_tokens)
    place = functools.partial(_place, sharding=decoding.sharding)
    logits = place(jnp.zeros((rows, decoding.vocab_size), jnp.float32), ("seq", "vocab"))
    for chunk in chunks(sequences, decoding.buckets):
        tokens, lens = place((chunk.tokens, chunk.lens))
        logits, cache = prefill(decoding.step, decoding.weights, cache, tokens, lens, logits)
    history = (rows, round_capacity(max_new_tokens, 16))
    top = (*history, sampler.num_logprobs)
    of_rows = {
        "sampler": sampler,
        "token": jnp.zeros(rows, jnp.int32),
        "num_new": jnp.zeros(rows, jnp.int32),
        "finish": jnp.full(rows, RUNNING, jnp.int32),
        "limits": jnp.full(rows, max_new_tokens, jnp.int32),
        "new_tokens": jnp.zeros(history, jnp.int32),
        "logprobs": jnp.zeros(history, jnp.float32),
        "top_tokens": jnp.zeros(top, jnp.int32),
        "top_logprobs": jnp.zeros(top, jnp.float32),
    }
    stop_ids = place(np.asarray(decoding.stop_ids or (-1,), np.int32), (None,))
    state = DecodeState(cache=cache, stop_ids=stop_ids, **place(of_rows))
    return start(state, logits)


def _place(tree: Any, axes: tuple[str | None, ...] = ("seq",), *, sharding: Sharding | None) -> Any:
    """Put a tree of arrays, all with these logical first axes, on the mesh."""
    if sharding is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, sharding.named(*axes, *[None] * (leaf.ndim - len(axes)))), tree
    )


def make_cache(decoding: Decoding, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Cache:
    """Return an empty cache for the prompts and their continuations; its capacity is checked first.

    Raises:
        ValueError: the longest prompt and its new tokens do not fit in `decoding.capacity`.
    """
    longest = max(len(prompt) for prompt in prompts)
    # The last new token is never written: nothing follows that would attend to it.
    needed = longest + max_new_tokens - 1
    capacity = decoding.capacity
    if capacity is None:
        capacity = round_capacity(needed, decoding.spec.page_size)
    elif needed > capacity:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need a capacity of {needed} tokens, "
            f"got {capacity}; shorten them or raise the capacity"
        )
    return Cache.dense(
        decoding.spec,
        num_sequences=len(prompts),
        capacity=capacity,
        scales=decoding.scales,
        sharding=decoding.sharding,
    )


def results(state: DecodeState) -> list[Generation]:
    """Bring what the state's sequences have generated to the host.

    Raises:
        ValueError: a sequence's logits were not finite.
    """
    finish, counts, tokens, logprobs, top_tokens, top_logprobs = jax.device_get(
        (state.finish, state.num_new, state.new_tokens, state.logprobs, state.top_tokens, state.top_logprobs)
    )
    _check_finite(finish)
    return [
        Generation(
            tokens=tuple(tokens[row, :count].tolist()),
            logprobs=tuple(logprobs[row, :count].tolist()),
            top_logprobs=tuple(
                tuple(zip(ids.tolist(), values.tolist(), strict=True))
                for ids, values in zip(top_tokens[row, :count], top_logprobs[row, :count], strict=True)
            ),
            finish_reason=FINISH_REASONS.get(int(finish[row])),
        )
        for row, count in enumerate(counts)
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
