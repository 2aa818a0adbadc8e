"""Choosing the next token of every sequence: a pure function of logits and the sampler's state.

Knows no model, cache or text. A row's tokens depend on its own logits, parameters, seed and number of draws,
and on nothing else of the batch; between platforms they differ only as far as float32 functions round
differently.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jkv.decode.batch import read_ids
from jkv.decode.filters import fixed_point_sum, min_p, relative_weights, top_k, top_p
from jkv.decode.params import SamplingParams, require_whole
from jkv.pytree import State, pytree, static

_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@pytree
class Randomness(State):
    """Parameters of the draw; rows of temperature 0 ignore the others.

    Attributes:
        keys: one a sequence; its draw n uses `fold_in(key, n)`.
        temperature: at least 0.
        top_k: at least 1, at most the size of the vocabulary.
        top_p: at most 1.
        min_p: from 0 to 1.
    """

    keys: Key[Array, " seq"]
    temperature: Float[Array, " seq"]
    top_k: Int[Array, " seq"]
    top_p: Float[Array, " seq"]
    min_p: Float[Array, " seq"]


@pytree
class Penalties(State):
    """Penalties, and the tokens that they count.

    Attributes:
        repetition: over prompt and output; 1 is none.
        presence: over the output; 0 is none.
        frequency: over the output; 0 is none.
        in_prompt: whether a token is in the prompt.
        output_counts: how often a token was drawn.
    """

    repetition: Float[Array, " seq"]
    presence: Float[Array, " seq"]
    frequency: Float[Array, " seq"]
    in_prompt: Bool[Array, "seq vocab"]
    output_counts: Int[Array, "seq vocab"]


@pytree
class Sampler(State):
    """The sampling state of a batch. Stages that no row needs are None, and cost nothing.

    The first axis of each leaf is `seq`, so `jax.tree.map(lambda leaf: leaf[rows], sampler)` selects rows.

    Attributes:
        num_draws: tokens drawn so far.
        randomness: None where every row takes the likeliest token.
        penalties: None where no row has one.
        bias: added to the logits; None where no row has one.
        num_logprobs: likeliest tokens that each row asks for.
        most_logprobs: the largest of these, as many as are reported with each draw.
    """

    num_draws: Int[Array, " seq"]
    randomness: Randomness | None
    penalties: Penalties | None
    bias: Float[Array, "seq vocab"] | None
    num_logprobs: Int[Array, " seq"]
    most_logprobs: int = static(default=0)

    @staticmethod
    def create(
        params: Sequence[SamplingParams],
        *,
        vocab_size: int,
        prompts: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        base_seed: int = 0,
        request_indices: Sequence[int] | None = None,
    ) -> "Sampler":
        """Return the state of rows that have drawn `outputs`, so that each goes on as if never interrupted.

        Args:
            params: one a row.
            vocab_size: tokens that a row of logits has.
            prompts: each row's prompt, which a repetition penalty counts; None for no tokens.
            outputs: the tokens that each row has drawn, in order; None for a fresh start.
            base_seed: at least 0; requests without a seed get theirs from it and from their index.
            request_indices: number of each row's request, at least 0; None for the row's own.

        Raises:
            ValueError: a parameter or a token is outside its range, or the lists differ in length.
        """
        num_rows = len(params)
        prompts = [()] * num_rows if prompts is None else prompts
        outputs = [()] * num_rows if outputs is None else outputs
        request_indices = range(num_rows) if request_indices is None else request_indices
        sizes = [num_rows, len(prompts), len(outputs), len(request_indices)]
        if len(set(sizes)) > 1:
            raise ValueError(
                "params, prompts, outputs and request_indices must have one entry a row, "
                f"got {sizes}; give equally many"
            )
        for row in params:
            row.check(vocab_size)
        require_whole("base_seed", base_seed, at_least=0)
        for index in request_indices:
            require_whole("a request index", index, at_least=0)
        keys = _make_keys(params, base_seed, request_indices)
        return Sampler(
            num_draws=jnp.array([len(output) for output in outputs], jnp.int32),
            randomness=_make_randomness(params, keys, vocab_size),
            penalties=_make_penalties(params, prompts, outputs, vocab_size),
            bias=_make_bias(params, vocab_size),
            num_logprobs=jnp.array([row.num_logprobs for row in params], jnp.int32),
            most_logprobs=max((row.num_logprobs for row in params), default=0),
        )


@pytree
class Draw(State):
    """One step's tokens.

    Attributes:
        tokens: the chosen ids; the pad id in rows that are inactive or not finite.
        logprobs: their log-probabilities under the raw logits; 0 in rows that drew none.
        top_tokens: the likeliest ids under the raw logits, likeliest first; the lower id first among equals.
        top_logprobs: their log-probabilities.
        is_finite: False in an active row whose logits have NaN or +inf, or leave no token possible.
    """

    tokens: Int[Array, " seq"]
    logprobs: Float[Array, " seq"]
    top_tokens: Int[Array, "seq top"]
    top_logprobs: Float[Array, "seq top"]
    is_finite: Bool[Array, " seq"]


def sample(
    logits: Float[Array, "seq vocab"], sampler: Sampler, active: Bool[Array, " seq"], *, pad_id: int = 0
) -> tuple[Draw, Sampler]:
    """Draw a token for each active row and return the draws and the state after them.

    In float32 and in this order: penalties, bias, temperature, top-k, top-p over what is left, min-p, then
    the largest of log-weight plus Gumbel noise, which is a sample of their softmax (Maddison et al. 2014). A
    row that is inactive or not finite draws nothing and its state stays.
    """
    raw = logits.astype(jnp.float32)
    adjusted = _adjust(raw, sampler)
    is_finite = jnp.isfinite(jnp.max(adjusted, axis=-1))
    if sampler.randomness is None:
        chosen = _argmax(adjusted)
    else:
        noise = _gumbel(sampler.randomness.keys, sampler.num_draws, raw.shape[-1])
        chosen = _argmax(_log_weights(adjusted, sampler.randomness) + noise)
    # Nothing equals a NaN, and the id past the vocabulary is then no token.
    is_finite &= chosen < raw.shape[-1]
    is_drawn = active & is_finite
    tokens = jnp.where(is_drawn, chosen, pad_id)
    logprobs, top_tokens, top_logprobs = _logprobs(raw, chosen, sampler.most_logprobs)
    draw = Draw(
        tokens=tokens,
        logprobs=jnp.where(is_drawn, logprobs, 0),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        is_finite=is_finite | ~active,
    )
    return draw, _record(sampler, chosen, is_drawn)


def log_weights(logits: Float[Array, "seq vocab"], sampler: Sampler) -> Float[Array, "seq vocab"]:
    """Return what `sample` draws from: unnormalized log-probabilities, -inf where no draw can fall.

    A row of temperature 0 has one token, at 0.
    """
    adjusted = _adjust(logits.astype(jnp.float32), sampler)
    if sampler.randomness is None:
        return _only_likeliest(adjusted)
    return _log_weights(adjusted, sampler.randomness)


def _adjust(logits: Float[Array, "seq vocab"], sampler: Sampler) -> Float[Array, "seq vocab"]:
    if sampler.penalties is not None:
        logits = _penalize(logits, sampler.penalties)
    return logits if sampler.bias is None else logits + sampler.bias


def _penalize(logits: Float[Array, "seq vocab"], penalties: Penalties) -> Float[Array, "seq vocab"]:
    is_drawn = penalties.output_counts > 0
    repetition = penalties.repetition[:, None]
    reduced = jnp.where(logits > 0, logits / repetition, logits * repetition)
    # A penalty makes no finite logit infinite; what the model gave as infinite stays so.
    reduced = jnp.clip(reduced, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    is_reduced = (penalties.in_prompt | is_drawn) & jnp.isfinite(logits)
    logits = jnp.where(is_reduced, reduced, logits)
    presence = penalties.presence[:, None] * is_drawn.astype(jnp.float32)
    frequency = penalties.frequency[:, None] * penalties.output_counts.astype(jnp.float32)
    return logits - presence - frequency


def _log_weights(logits: Float[Array, "seq vocab"], randomness: Randomness) -> Float[Array, "seq vocab"]:
    is_greedy = randomness.temperature == 0
    # Relative to the largest, so that a tiny temperature cannot overflow.
    relative = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = relative / jnp.where(is_greedy, 1, randomness.temperature)[:, None]
    for stage, limit, is_used in (
        (top_k, randomness.top_k, randomness.top_k < logits.shape[-1]),
        (top_p, randomness.top_p, randomness.top_p < 1),
        (min_p, randomness.min_p, randomness.min_p > 0),
    ):
        weights = jax.lax.cond(is_used.any(), stage, lambda weights, _: weights, weights, limit)
    return jnp.where(is_greedy[:, None], _only_likeliest(logits), weights)


def _only_likeliest(logits: Float[Array, "seq vocab"]) -> Float[Array, "seq vocab"]:
    return jnp.where(_token_ids(logits) == _argmax(logits)[:, None], 0, -jnp.inf)


def _argmax(values: Float[Array, "seq vocab"]) -> Int[Array, " seq"]:
    # Two plain reductions: XLA's CPU backend vectorizes them, but not the paired one of jnp.argmax.
    is_largest = values == jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, _token_ids(values), values.shape[-1]), axis=-1)


def _token_ids(logits: Float[Array, "seq vocab"]) -> Int[Array, "seq vocab"]:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)


def _gumbel(
    keys: Key[Array, " seq"], num_draws: Int[Array, " seq"], vocab_size: int
) -> Float[Array, "seq {vocab_size}"]:
    def row(key: Key[Array, ""], index: Int[Array, ""]) -> Float[Array, " vocab"]:
        return jax.random.gumbel(jax.random.fold_in(key, index), (vocab_size,), jnp.float32)

    return jax.vmap(row)(keys, num_draws)


def _logprobs(
    logits: Float[Array, "seq vocab"], tokens: Int[Array, " seq"], num_top: int
) -> tuple[Float[Array, " seq"], Int[Array, "seq {num_top}"], Float[Array, "seq {num_top}"]]:
    peak = jnp.max(logits, axis=-1, keepdims=True)
    normalizer = peak + jnp.log(fixed_point_sum(relative_weights(logits)))[:, None]
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    top_logits, top_tokens = jax.lax.top_k(logits, num_top)
    return (chosen - normalizer)[:, 0], top_tokens, top_logits - normalizer


def _record(sampler: Sampler, tokens: Int[Array, " seq"], is_drawn: Bool[Array, " seq"]) -> Sampler:
    drawn = is_drawn.astype(jnp.int32)
    penalties = sampler.penalties
    if penalties is not None:
        rows = jnp.arange(tokens.shape[0])
        penalties = penalties.replace(output_counts=penalties.output_counts.at[rows, tokens].add(drawn))
    return sampler.replace(num_draws=sampler.num_draws + drawn, penalties=penalties)


def _make_keys(
    params: Sequence[SamplingParams], base_seed: int, request_indices: Sequence[int]
) -> Key[Array, " seq"]:
    words = np.zeros((len(params), 2), np.uint32)
    for row, index, pair in zip(params, request_indices, words, strict=True):
        if row.seed is None:
            pair[:] = np.random.SeedSequence((base_seed, index)).generate_state(2)
        else:
            # What jax.random.key makes of a 64-bit seed, whether or not JAX has 64-bit integers.
            pair[:] = divmod(int(row.seed) % 2**64, 2**32)
    return jax.random.wrap_key_data(jnp.array(words), impl="threefry2x32")


def _make_randomness(
    params: Sequence[SamplingParams], keys: Key[Array, " seq"], vocab_size: int
) -> Randomness | None:
    if all(row.temperature == 0 for row in params):
        return None
    # A greedy row filters nothing, so that it does not cause a stage to run.
    rows = [row if row.temperature > 0 else SamplingParams() for row in params]
    return Randomness(
        keys=keys,
        temperature=_floats(row.temperature for row in rows),
        top_k=jnp.array([min(row.top_k or vocab_size, vocab_size) for row in rows], jnp.int32),
        top_p=_floats(row.top_p for row in rows),
        min_p=_floats(row.min_p for row in rows),
    )


def _make_penalties(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab_size: int,
) -> Penalties | None:
    if not any(row.has_penalties for row in params):
        return None
    return Penalties(
        repetition=_floats(row.repetition_penalty for row in params),
        presence=_floats(row.presence_penalty for row in params),
        frequency=_floats(row.frequency_penalty for row in params),
        in_prompt=jnp.array([_count(prompt, vocab_size) > 0 for prompt in prompts]),
        output_counts=jnp.array([_count(output, vocab_size) for output in outputs]),
    )


def _count(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.array(read_ids("a counted output or prompt", tokens), np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"token ids must be at least 0 and below the vocabulary's {vocab_size}, got {outside[0]}; "
            "use the model's tokenizer"
        )
    return np.bincount(ids, minlength=vocab_size).astype(np.int32)


def _make_bias(params: Sequence[SamplingParams], vocab_size: int) -> Float[Array, "seq vocab"] | None:
    if not any(row.logit_bias for row in params):
        return None
    bias = np.zeros((len(params), vocab_size), np.float32)
    for row, values in zip(params, bias, strict=True):
        for token_id, value in row.logit_bias:
            values[token_id] = value
    return jnp.array(bias)


def _floats(values: Iterable[float]) -> Float[Array, " seq"]:
    return jnp.array(list(values), jnp.float32)
