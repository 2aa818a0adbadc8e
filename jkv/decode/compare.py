"""Caches or models over the same tokens: how far next-token distributions drift apart.

Knows distributions; no codec by name.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.cache import Cache
from jkv.decode.batch import Prompts
from jkv.decode.generate import Decoding, make_full_cache
from jkv.decode.loop import check_logits
from jkv.decode.platform import PlatformJit
from jkv.decode.score import check_finite, losses, measure, read_rows, steps
from jkv.hosts import fetch
from jkv.models.step import StepFunction


@dataclass(frozen=True)
class Comparison:
    """What another cache costs a model, or another model costs, beside a base that is taken for right.

    Attributes:
        base_nll: negative log-likelihood of tokens 1.. of each row with the base, in nats.
        nll: the same with the compared one.
        divergence: Kullback-Leibler divergence of the compared next-token distribution from the base one, at
            every token, in nats.
        has_same_top: whether both find the same token likeliest.
    """

    base_nll: Float[np.ndarray, "seq scored"]
    nll: Float[np.ndarray, "seq scored"]
    divergence: Float[np.ndarray, "seq time"]
    has_same_top: Bool[np.ndarray, "seq time"]

    def between(self, start: int, end: int) -> "Comparison":
        """Return the comparison at the tokens of places `start` to `end` - 1 alone."""
        place = slice(start, end)
        return Comparison(*(getattr(self, name)[:, place] for name in self.__dataclass_fields__))

    @property
    def base_perplexity(self) -> float:
        """Perplexity of the base."""
        return float(np.exp(self.base_nll.mean(dtype=np.float64)))

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the compared one over that of the base; 1 is no loss."""
        return float(np.exp((self.nll - self.base_nll).mean(dtype=np.float64)))

    @property
    def mean_divergence(self) -> float:
        """Mean divergence, in nats."""
        return float(self.divergence.mean(dtype=np.float64))

    @property
    def worst_divergence(self) -> float:
        """99th percentile of the divergences, in nats."""
        return float(np.percentile(self.divergence, 99))

    @property
    def same_top_share(self) -> float:
        """Share of tokens at which both find the same next token likeliest."""
        return float(self.has_same_top.mean())


def compare(
    base: Decoding, others: Sequence[Decoding], tokens: Prompts, *, chunk: int = 64
) -> list[Comparison]:
    """Run tokens through the caches of all, in steps of `chunk` tokens, and set each beside the base.

    Args:
        base: the model and the cache that are taken for right.
        others: the same model with other caches, or other models of its vocabulary.
        tokens: as `score`.
        chunk: as `score`; logits of so many tokens of every cache are held at once.

    Raises:
        ValueError: as `score`.
    """
    ids = read_rows(base, tokens, chunk)
    decodings = [base, *others]
    caches = [make_full_cache(decoding, ids.tolist(), max_new_tokens=1) for decoding in decodings]
    functions = tuple(decoding.step for decoding in decodings)
    weights = [decoding.weights for decoding in decodings]
    pieces = []
    for step in steps(ids, chunk):
        found, caches = compare_chunk(functions, weights, caches, *step, vocab_size=base.vocab_size)
        pieces.append(fetch(found))

    def join(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=1)[:, : ids.shape[1]]

    base_nll, *measured = jax.tree.map(lambda *parts: join(parts), *pieces)
    check_finite(np.stack([base_nll, *(nll for nll, _, _ in measured)]))
    return [
        Comparison(base_nll[:, :-1], nll[:, :-1], divergences, agreements)
        for nll, divergences, agreements in measured
    ]


@functools.partial(PlatformJit, static_argnames=("functions", "vocab_size"), donate_argnames="caches")
def compare_chunk(
    functions: tuple[StepFunction, ...],
    weights: list[Any],
    caches: list[Cache],
    tokens: Int[Array, "seq time"],
    targets: Int[Array, "seq time"],
    lens: Int[Array, " seq"],
    *,
    vocab_size: int,
) -> tuple[list[Any], list[Cache]]:
    """Return the base's loss, then of each other cache its loss, divergence and agreement; and the caches.

    Consumes the caches, of which the first is the base's.
    """
    logits, written = [], []
    for step, parameters, cache in zip(functions, weights, caches, strict=True):
        cache, batch = cache.begin(lens, time=tokens.shape[1], outputs="all")
        found, cache = step(parameters, tokens, cache, batch)
        check_logits(found, (*tokens.shape, vocab_size))
        logits.append(found)
        written.append(cache)
    base, *others = logits
    measured = [
        (
            measure(losses, other, targets),
            measure(divergence, base, other),
            measure(has_same_top, base, other),
        )
        for other in others
    ]
    return [measure(losses, base, targets), *measured], written


def divergence(
    base: Float[Array, "seq time vocab"], other: Float[Array, "seq time vocab"]
) -> Float[Array, "seq time"]:
    """Return the Kullback-Leibler divergence of the distribution of `other` from that of `base`, in nats."""
    base, other = jax.nn.log_softmax(base, axis=-1), jax.nn.log_softmax(other, axis=-1)
    return (jnp.exp(base) * (base - other)).sum(-1)


def has_same_top(
    base: Float[Array, "seq time vocab"], other: Float[Array, "seq time vocab"]
) -> Bool[Array, "seq time"]:
    """Return whether both find the same token likeliest."""
    return jnp.argmax(base, axis=-1) == jnp.argmax(other, axis=-1)
