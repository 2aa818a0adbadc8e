"""Two caches of one model: divergences of their next-token distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.compare import compare
from jkv.decode.generate import Decoding
from jkv.decode.score import score

from ..compare import assert_close

VOCAB_SIZE = 8
TOKENS = np.array([[1, 2, 3, 5, 6], [4, 3, 2, 3, 4]])


def count_up(weights, tokens, cache, batch):
    """Expect each token to be followed by the next id, less surely with a bfloat16 cache."""
    sureness = 3.0 if cache.spec.groups[0].codec == "f32" else jnp.where(tokens == 5, -1.0, 2.0)[..., None]
    return sureness * jax.nn.one_hot(tokens + 1, VOCAB_SIZE), cache


def make_decoding(codec: str) -> Decoding:
    spec = CacheSpec.create([CacheGroup(1, 1, 2, codec)], page_size=4)
    return Decoding(count_up, (), spec, VOCAB_SIZE)


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_measures_are_those_of_the_distributions(chunk: int):
    base, other = make_decoding("f32"), make_decoding("bf16")
    again, result = compare(base, [base, other], TOKENS, chunk=chunk)
    assert again.perplexity_ratio == 1
    assert (again.divergence == 0).all()
    assert_close(result.base_nll, score(base, TOKENS).nll)
    assert_close(result.nll, score(other, TOKENS).nll)
    scores = [score(decoding, TOKENS, keep_logits=True) for decoding in (base, other)]
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(one.logits))) for one in scores)
    divergence = (p * np.log(p / q)).sum(-1)
    assert_close(result.divergence, divergence)
    np.testing.assert_array_equal(result.has_same_top, TOKENS != 5)
    assert result.same_top_share == 0.9
    assert result.mean_divergence == pytest.approx(divergence.mean(), rel=1e-5)
    assert result.worst_divergence == pytest.approx(np.percentile(divergence, 99), rel=1e-5)
    assert result.between(3, 4).same_top_share == 0.5


def test_logits_that_are_not_finite_are_refused():
    def spoil(weights, tokens, cache, batch):
        return jnp.full((*tokens.shape, VOCAB_SIZE), jnp.nan), cache

    decoding = dataclasses.replace(make_decoding("f32"), step=spoil)
    with pytest.raises(ValueError, match="logits must be finite"):
        compare(decoding, [decoding], TOKENS)
