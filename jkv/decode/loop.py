"""The decode loop as functions on one state: prefill in chunks, start, decode.

Works on any `(weights, tokens, cache, batch) -> (logits, cache)`; knows no text.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.cache import Cache
from jkv.decode.platform import PlatformJit
from jkv.decode.sampling import Sampler, sample
from jkv.models.step import StepFunction
from jkv.pytree import State, pytree

RUNNING, STOP, LENGTH, NOT_FINITE, WAITING = range(5)
FINISH_REASONS = {STOP: "stop", LENGTH: "length"}


@pytree
class DecodeState(State):
    """Everything that a loop carries.

    Attributes:
        cache: holds each sequence's prompt and all but the last of its new tokens.
        sampler: parameters, keys and counts; see `jkv.decode.sampling`.
        token: the last sampled token, the next step's input.
        num_new: tokens sampled so far.
        finish: why a sequence ended; RUNNING, or WAITING where it has not started.
        limits: new tokens that each sequence may have.
        stop_ids: tokens that end a sequence; -1 is none.
        new_tokens: the sampled tokens, `num_new` of each row.
        logprobs: their log-probabilities under the raw logits.
        top_tokens: the likeliest tokens at each place, as many as the row that asks for most gets.
        top_logprobs: their log-probabilities.
    """

    cache: Cache
    sampler: Sampler
    token: Int[Array, " seq"]
    num_new: Int[Array, " seq"]
    finish: Int[Array, " seq"]
    limits: Int[Array, " seq"]
    stop_ids: Int[Array, " stop"]
    new_tokens: Int[Array, "seq max_new"]
    logprobs: Float[Array, "seq max_new"]
    top_tokens: Int[Array, "seq max_new top"]
    top_logprobs: Float[Array, "seq max_new top"]

    @property
    def is_running(self) -> Bool[Array, " seq"]:
        """Rows that take another step."""
        return self.finish == RUNNING


@functools.partial(PlatformJit, static_argnames="step", donate_argnames=("cache", "logits"))
def prefill(
    step: StepFunction,
    weights: Any,
    cache: Cache,
    tokens: Int[Array, "seq time"],
    lens: Int[Array, " seq"],
    logits: Float[Array, "seq vocab"],
) -> tuple[Float[Array, "seq vocab"], Cache]:
    """Run one chunk of the prompts and return each sequence's latest logits and the cache.

    Consumes `cache` and `logits`; a row with no token in this chunk keeps the logits it has.

    Raises:
        ValueError: the step's logits are of another shape.
    """
    cache, batch = cache.begin(lens, time=tokens.shape[1])
    latest, cache = step(weights, tokens, cache, batch)
    check_logits(latest, logits.shape)
    return jnp.where(batch.lens[:, None] > 0, latest, logits), cache


def check_logits(logits: jax.Array, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a step's logits have the shape; it is known when the step is traced."""
    if logits.shape != shape:
        raise ValueError(
            f"a step's logits must end in vocab_size, here {list(shape)}, got {list(logits.shape)}; "
            "set vocab_size to the width of the model's logits"
        )


@functools.partial(PlatformJit, donate_argnames="state")
def start(
    state: DecodeState, logits: Float[Array, "seq vocab"], is_fresh: Bool[Array, " seq"]
) -> DecodeState:
    """Sample the first new token of each fresh sequence from `prefill`'s logits. Consumes `state`."""
    finish = jnp.where(is_fresh, jnp.int32(RUNNING), state.finish)
    return _take(state.replace(finish=finish), logits, is_fresh)


@functools.partial(PlatformJit, static_argnames="step", donate_argnames="state")
def decode(
    step: StepFunction,
    weights: Any,
    state: DecodeState,
    num_steps: Int[Array, ""] | int,
    until_end: Bool[Array, ""] | bool = False,
) -> DecodeState:
    """Take at most `num_steps` steps, fewer when every sequence ends. Consumes `state`.

    With `until_end` the end of one sequence is enough: another may be waiting for its pages. Both are traced:
    one program serves a whole generation and a single step.
    """
    num_running = state.is_running.sum()

    def is_unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        count, state = carry
        num_left = state.is_running.sum()
        has_ended = jnp.logical_and(until_end, num_left < num_running)
        return (count < num_steps) & (num_left > 0) & ~has_ended

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        count, state = carry
        cache, batch = state.cache.begin(state.is_running.astype(jnp.int32), time=1)
        logits, cache = step(weights, state.token[:, None], cache, batch)
        return count + 1, _take(state.replace(cache=cache), logits, state.is_running)

    return jax.lax.while_loop(is_unfinished, body, (jnp.int32(0), state))[1]


def _take(
    state: DecodeState, logits: Float[Array, "seq vocab"], is_taken: Bool[Array, " seq"]
) -> DecodeState:
    """Sample one token of each sequence in `is_taken`, record it, and end the sequences that it ends.

    On a mesh with Explicit axes the compiler places what sampling computes; the state keeps its placement.
    """
    axes = jax.typeof(logits).sharding.mesh.explicit_axes
    if not axes:
        return _sampled(state, logits, is_taken)
    placement = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, state)
    placed: Any = jax.sharding.auto_axes(_sampled, axes=axes, out_sharding=placement)
    return placed(state, logits, is_taken)


def _sampled(
    state: DecodeState, logits: Float[Array, "seq vocab"], is_taken: Bool[Array, " seq"]
) -> DecodeState:
    draw, sampler = sample(logits, state.sampler, is_taken)
    is_kept = is_taken & draw.is_finite
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    # A row that takes no token writes past the end, which drops it.
    column = jnp.where(is_kept, state.num_new, state.new_tokens.shape[1])
    num_new = state.num_new + is_kept.astype(jnp.int32)
    is_stop = (draw.tokens[:, None] == state.stop_ids[None]).any(axis=1)
    finish = jnp.where(
        ~draw.is_finite,
        NOT_FINITE,
        jnp.where(is_stop, STOP, jnp.where(num_new >= state.limits, LENGTH, RUNNING)),
    )

    def record(history: jax.Array, new: jax.Array) -> jax.Array:
        return history.at[rows, column].set(new, mode="drop")

    return state.replace(
        sampler=sampler,
        token=jnp.where(is_taken, draw.tokens, state.token),
        num_new=num_new,
        finish=jnp.where(is_taken, finish, state.finish).astype(jnp.int32),
        new_tokens=record(state.new_tokens, draw.tokens),
        logprobs=record(state.logprobs, draw.logprobs),
        top_tokens=record(state.top_tokens, draw.top_tokens),
        top_logprobs=record(state.top_logprobs, draw.top_logprobs),
    )
