"""The decode loop as functions on one state: prefill in chunks, start, decode.

Works on any `(weights, tokens, cache, batch) -> (logits, cache)`; knows no text.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.cache import Cache
from jkv.decode.sampling import Sampler, sample
from jkv.models.step import StepFunction
from jkv.pytree import State, pytree

RUNNING, STOP, LENGTH, NOT_FINITE = range(4)
FINISH_REASONS = {STOP: "stop", LENGTH: "length"}


@pytree
class DecodeState(State):
    """Everything that a loop carries.

    Attributes:
        cache: holds each sequence's prompt and all but the last of its new tokens.
        sampler: parameters, keys and counts; see `jkv.decode.sampling`.
        token: the last sampled token, the next step's input.
        num_new: tokens sampled so far.
        finish: why a sequence ended, or RUNNING.
        limits: new tokens that each sequence may have.
        stop_ids: tokens that end a sequence; -1 fills the row.
        new_tokens: the sampled tokens, `num_new` of each row.
        logprobs: their log-probabilities under the raw logits.
    """

    cache: Cache
    sampler: Sampler
    token: Int[Array, " seq"]
    num_new: Int[Array, " seq"]
    finish: Int[Array, " seq"]
    limits: Int[Array, " seq"]
    stop_ids: Int[Array, "seq stop"]
    new_tokens: Int[Array, "seq max_new"]
    logprobs: Float[Array, "seq max_new"]

    @property
    def is_running(self) -> Bool[Array, " seq"]:
        """Rows that take another step."""
        return self.finish == RUNNING


@functools.partial(jax.jit, static_argnames="step", donate_argnames=("cache", "logits"))
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
    """
    cache, batch = cache.begin(lens, time=tokens.shape[1])
    latest, cache = step(weights, tokens, cache, batch)
    return jnp.where(batch.lens[:, None] > 0, latest, logits), cache


@functools.partial(jax.jit, donate_argnames=("state", "logits"))
def start(state: DecodeState, logits: Float[Array, "seq vocab"]) -> DecodeState:
    """Sample the first new token of each sequence from the logits that `prefill` returned. Consumes both."""
    return _take(state, logits)


@functools.partial(jax.jit, static_argnames="step", donate_argnames="state")
def decode(step: StepFunction, weights: Any, state: DecodeState, num_steps: Int[Array, ""] | int) -> DecodeState:
    """Take at most `num_steps` steps, fewer when every sequence ends. Consumes `state`.

    `num_steps` is traced: one program serves a whole generation and a single step.
    """

    def is_unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        count, state = carry
        return (count < num_steps) & state.is_running.any()

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        count, state = carry
        cache, batch = state.cache.begin(state.is_running.astype(jnp.int32), time=1)
        logits, cache = step(weights, state.token[:, None], cache, batch)
        return count + 1, _take(state.replace(cache=cache), logits)

    return jax.lax.while_loop(is_unfinished, body, (jnp.int32(0), state))[1]
