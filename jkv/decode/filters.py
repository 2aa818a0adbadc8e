"""Top-k, top-p and min-p over rows of logits, exact and without a sort.

Knows no requests and draws nothing. What decides a token is added up in integers, so a row's result does not
depend on the order of addition, and so neither on the batch's size nor on the platform's reductions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# Probabilities are rounded to multiples of 2**-31: a row's sum, near 1, fits in 32 bits.
ONE = 2.0**31


def top_k(logits: Float[Array, "seq vocab"], k: Int[Array, " seq"]) -> Float[Array, "seq vocab"]:
    """Return each row with all but its `k` largest logits at -inf; the lower id wins among equals.

    `k` is at least 1; from the size of the vocabulary on it keeps all.
    """
    is_kept = _largest(logits, jnp.ones((1, 1), jnp.uint32), k.astype(jnp.uint32))
    return jnp.where(is_kept, logits, -jnp.inf)


def top_p(logits: Float[Array, "seq vocab"], p: Float[Array, " seq"]) -> Float[Array, "seq vocab"]:
    """Return each row with all but its smallest set of likely tokens whose probability reaches `p` at -inf.

    Tokens enter the set by falling logit, then by rising id (Holtzman et al. 2020, section 3.1). The set has
    at least one token; `p = 1` keeps all.
    """
    weights = relative_weights(logits)
    shares = jnp.round(weights * (ONE / fixed_point_sum(weights))[:, None]).astype(jnp.uint32)
    total = jnp.sum(shares, axis=-1, dtype=jnp.uint32)
    target = jnp.ceil(p * total.astype(jnp.float32)).astype(jnp.uint32)
    is_kept = _largest(logits, shares, jnp.maximum(target, 1))
    return jnp.where(is_kept | (p >= 1)[:, None], logits, -jnp.inf)


def min_p(logits: Float[Array, "seq vocab"], p: Float[Array, " seq"]) -> Float[Array, "seq vocab"]:
    """Return each row with the tokens less than `p` times as likely as its likeliest at -inf."""
    return jnp.where(relative_weights(logits) >= p[:, None], logits, -jnp.inf)


def relative_weights(logits: Float[Array, "seq vocab"]) -> Float[Array, "seq vocab"]:
    """Return each token's probability as a share of the likeliest one's, from 0 to 1."""
    return jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))


def fixed_point_sum(values: Float[Array, "seq vocab"]) -> Float[Array, " seq"]:
    """Return the sum of each row of values in [0, 1], the same bits in whatever order it is added up.

    Values are cut into limbs short enough that a row's limbs add up in 32 bits. Three limbs reach 2**-39 for
    262,143 values, finer than float32 resolves a sum that is 1 or more.
    """
    limb_bits = 32 - values.shape[-1].bit_length()
    total, rest = jnp.zeros(values.shape[:-1], jnp.float32), values
    for limb in range(1, 4):
        scaled = rest * 2.0**limb_bits
        whole = jnp.floor(scaled)
        limb_sum = jnp.sum(whole.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
        total += limb_sum.astype(jnp.float32) * 2.0 ** (-limb * limb_bits)
        rest = scaled - whole
    return total


def _largest(
    values: Float[Array, "seq vocab"], weights: UInt32[Array, "#seq #vocab"], target: UInt32[Array, " seq"]
) -> Bool[Array, "seq vocab"]:
    """Mark the shortest prefix, by falling value and then rising index, whose weights reach `target`.

    Equal values have equal weights; where all weights together fall short, all values are marked.
    """
    order = _ordered(values)

    def weigh(is_chosen: Bool[Array, "seq vocab"]) -> UInt32[Array, " seq"]:
        return jnp.sum(jnp.where(is_chosen, weights, 0), axis=-1, dtype=jnp.uint32)

    def settle_bit(index: Int[Array, ""], threshold: UInt32[Array, " seq"]) -> UInt32[Array, " seq"]:
        raised = threshold | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(weigh(order >= raised[:, None]) >= target, raised, threshold)

    # The largest threshold that enough weight stands at or above, from its high bit to its low one.
    threshold = jax.lax.fori_loop(0, 32, settle_bit, jnp.zeros_like(target))
    is_above = order > threshold[:, None]
    is_equal = order == threshold[:, None]
    equal_weight = jnp.max(jnp.where(is_equal, weights, 1), axis=-1)
    num_wanted = (target - weigh(is_above) - 1) // equal_weight + 1
    return is_above | _first(is_equal, num_wanted)


def _ordered(values: Float[Array, "seq vocab"]) -> UInt32[Array, "seq vocab"]:
    """Return integers that compare as the float32 values do, -0 as 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _first(is_marked: Bool[Array, "seq vocab"], count: UInt32[Array, " seq"]) -> Bool[Array, "seq vocab"]:
    """Keep the first `count` marks of each row; counting along a row is slow, so only where one has more."""

    def count_along(is_marked: Bool[Array, "seq vocab"]) -> Bool[Array, "seq vocab"]:
        return is_marked & (jnp.cumsum(is_marked, axis=-1, dtype=jnp.uint32) <= count[:, None])

    has_more = jnp.sum(is_marked, axis=-1, dtype=jnp.uint32) > count
    return jax.lax.cond(has_more.any(), count_along, lambda is_marked: is_marked, is_marked)
