"""Log-likelihoods of given tokens through the cache, chunk by chunk.

Knows no text and draws no token.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jkv.cache.cache import Cache
from jkv.decode.batch import Prompts, read_prompts
from jkv.decode.generate import Decoding, make_full_cache
from jkv.decode.loop import check_logits
from jkv.decode.params import require_whole
from jkv.decode.platform import PlatformJit
from jkv.hosts import fetch
from jkv.models.step import StepFunction


@dataclass(frozen=True)
class Score:
    """How likely a model finds tokens.

    Attributes:
        nll: negative log-likelihood of tokens 1.. of each row, in nats.
        logits: at every token; None where they were not kept.
    """

    nll: Float[np.ndarray, "seq scored"]
    logits: Float[np.ndarray, "seq time vocab"] | None

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood."""
        return float(np.exp(self.nll.mean(dtype=np.float64)))


def score(decoding: Decoding, tokens: Prompts, *, chunk: int = 256, keep_logits: bool = False) -> Score:
    """Score tokens, given all before them, in steps of `chunk` tokens: the result does not depend on it.

    Args:
        decoding: the model and its cache.
        tokens: lists of ids or the rows of an array; of one length, at least 2.
        chunk: tokens of a step; memory follows it, not the length.
        keep_logits: bring the logits of every token to the host.

    Raises:
        ValueError: there are too few tokens or too many, an id is unknown, or the logits are not finite or
            not `vocab_size` wide.
    """
    ids = read_rows(decoding, tokens, chunk)
    cache = make_full_cache(decoding, ids.tolist(), max_new_tokens=1)
    nll, logits = [], []
    for step in steps(ids, chunk):
        losses, kept, cache = score_chunk(
            decoding.step,
            decoding.weights,
            cache,
            *step,
            vocab_size=decoding.vocab_size,
            keep_logits=keep_logits,
        )
        nll.append(fetch(losses))
        if keep_logits:
            logits.append(fetch(kept))
    time = ids.shape[1]
    whole = np.concatenate(nll, axis=1)[:, : time - 1]
    check_finite(whole)
    return Score(whole, np.concatenate(logits, axis=1)[:, :time] if keep_logits else None)


def read_rows(decoding: Decoding, tokens: Prompts, chunk: int) -> Int[np.ndarray, "seq time"]:
    """Return rows of tokens that can be scored, after the checks of `score`."""
    decoding.check()
    require_whole("chunk", chunk, at_least=1, unit=" token")
    prompts = read_prompts(tokens, vocab_size=decoding.vocab_size)
    rows, lengths = len(prompts), sorted({len(prompt) for prompt in prompts})
    time = lengths[0]
    if time < 2:
        raise ValueError(f"a score needs at least 2 tokens a row, got {rows} rows of {time}")
    if len(lengths) > 1:
        raise ValueError(f"a score needs rows of one length, got lengths from {time} to {lengths[-1]}")
    return np.array(prompts, np.int32)


def steps(ids: Int[np.ndarray, "seq time"], chunk: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield each step's tokens, the tokens that follow them, and how many are real."""
    rows, time = ids.shape
    chunk = min(chunk, time)
    for start in range(0, time, chunk):
        lens = jnp.full(rows, min(chunk, time - start), jnp.int32)
        yield _columns(ids, start, chunk), _columns(ids, start + 1, chunk), lens


def check_finite(nll: Float[np.ndarray, "..."]) -> None:
    """Refuse losses that are not finite."""
    if not np.isfinite(nll).all():
        raise ValueError("logits must be finite, got NaN or infinity; check the weights and the dtype")


@functools.partial(
    PlatformJit, static_argnames=("step", "vocab_size", "keep_logits"), donate_argnames="cache"
)
def score_chunk(
    step: StepFunction,
    weights: Any,
    cache: Cache,
    tokens: Int[Array, "seq time"],
    targets: Int[Array, "seq time"],
    lens: Int[Array, " seq"],
    *,
    vocab_size: int,
    keep_logits: bool,
) -> tuple[Float[Array, "seq time"], Float[Array, "seq time vocab"] | None, Cache]:
    """Return each target's negative log-likelihood, logits if kept, and the cache. Consumes `cache`.

    Raises:
        ValueError: the logits are not `vocab_size` wide.
    """
    cache, batch = cache.begin(lens, time=tokens.shape[1], outputs="all")
    logits, cache = step(weights, tokens, cache, batch)
    check_logits(logits, (*tokens.shape, vocab_size))
    return measure(losses, logits, targets), logits if keep_logits else None, cache


def losses(
    logits: Float[Array, "seq time vocab"], targets: Int[Array, "seq time"]
) -> Float[Array, "seq time"]:
    """Return each target's negative log-likelihood."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def measure(function: Callable[..., Any], logits: Array, *arguments: Array) -> Any:
    """Return `function`'s `[seq, time]` of logits; on Explicit axes the compiler places what is between."""
    placement = jax.typeof(logits).sharding
    axes = placement.mesh.explicit_axes
    if not axes:
        return function(logits, *arguments)
    rows = NamedSharding(placement.mesh, PartitionSpec(*placement.spec[:2]))
    placed: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=rows)
    return placed(logits, *arguments)


def _columns(tokens: Int[np.ndarray, "seq time"], start: int, width: int) -> Int[Array, "seq {width}"]:
    """Return `width` columns from `start` on, zeros past the end."""
    piece = tokens[:, start : start + width]
    return jnp.asarray(np.pad(piece, ((0, 0), (0, width - piece.shape[1]))), jnp.int32)
