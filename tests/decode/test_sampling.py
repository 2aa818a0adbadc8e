"""Drawing tokens: what decides them, what is reported, what stays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.decode import sampling
from jkv.decode.params import LARGEST, LEAST, SamplingParams
from jkv.decode.sampling import Sampler

sample = jax.jit(sampling.sample, static_argnames="pad_id")
log_weights = jax.jit(sampling.log_weights)

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    logit_bias=((3, 1.5),),
    seed=42,
)
NUM_STEPS = 16


def make_story(row_id: int, *, vocab_size: int = 257) -> jax.Array:
    """Logits of each step of one sequence: [step, vocab]."""
    return 2 * jax.random.normal(jax.random.key(row_id), (NUM_STEPS, vocab_size))


@jax.jit
def draw_all(sampler: Sampler, stories: jax.Array) -> jax.Array:
    """Draw a token for each row at each of its steps: [seq, step]."""

    def step(sampler, logits):
        draw, sampler = sample(logits, sampler, jnp.ones(logits.shape[0], bool))
        return sampler, draw.tokens

    return jax.lax.scan(step, sampler, stories.swapaxes(0, 1))[1].T


def draw_rows(params: list[SamplingParams], stories: list[jax.Array], **options) -> np.ndarray:
    sampler = Sampler.create(params, vocab_size=stories[0].shape[-1], **options)
    return np.asarray(draw_all(sampler, jnp.stack(stories)))


def draw_once(logits: jax.Array, params: SamplingParams, **options):
    sampler = Sampler.create([params] * len(logits), vocab_size=logits.shape[-1], **options)
    return sample(logits, sampler, jnp.ones(len(logits), bool))[0]


def draw_often(logits: jax.Array, params: SamplingParams) -> np.ndarray:
    """Draw 8,192 tokens of one request from the same logits."""
    return draw_rows([params], [jnp.tile(logits, (8192, 1))])[0]


def support(logits: list[float], params: SamplingParams) -> list[int]:
    """Ids that can be drawn."""
    sampler = Sampler.create([params], vocab_size=len(logits))
    return np.flatnonzero(log_weights(jnp.array([logits]), sampler)[0] > -jnp.inf).tolist()


def assert_drawn_from(tokens: jax.Array, probabilities: np.ndarray) -> None:
    """Pearson's chi-square test; the bound is the mean plus five deviations, rarer than 1 in 10,000."""
    expected = probabilities * tokens.size
    assert expected[probabilities > 0].min() > 5
    observed = np.bincount(np.asarray(tokens), minlength=len(probabilities))
    assert not observed[probabilities == 0].any()
    is_possible = probabilities > 0
    statistic = ((observed - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    freedom = is_possible.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


# What a row's tokens depend on.


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8, seed=42), EVERYTHING])
def test_a_seeded_row_draws_the_same_tokens_in_any_batch(params):
    story, other = make_story(0), make_story(1)
    unseeded = SamplingParams(temperature=1.3)
    alone = draw_rows([params], [story])[0]
    assert len(set(alone.tolist())) > 3
    np.testing.assert_array_equal(draw_rows([params, unseeded], [story, other])[0], alone)
    np.testing.assert_array_equal(
        draw_rows([unseeded, SamplingParams(), params], [other, other, story])[2], alone
    )
    np.testing.assert_array_equal(draw_rows([params, params], [story, story]), [alone, alone])


@pytest.mark.parametrize("num_before", [1, 7, 15])
def test_a_row_rebuilt_after_some_draws_goes_on_the_same(num_before):
    story = make_story(0)
    whole = draw_rows([EVERYTHING], [story], prompts=[[5, 9]])[0]
    rest = draw_rows(
        [EVERYTHING], [story[num_before:]], prompts=[[5, 9]], outputs=[whole[:num_before].tolist()]
    )[0]
    np.testing.assert_array_equal(rest, whole[num_before:])


def test_selected_rows_go_on_the_same():
    stories = [make_story(index) for index in range(3)]
    params = [EVERYTHING, SamplingParams(temperature=1.0, seed=7), SamplingParams()]
    sampler = Sampler.create(params, vocab_size=257)
    chosen = jnp.array([2, 0])
    np.testing.assert_array_equal(
        draw_all(jax.tree.map(lambda leaf: leaf[chosen], sampler), jnp.stack(stories)[chosen]),
        draw_all(sampler, jnp.stack(stories))[chosen],
    )


def test_an_unseeded_row_follows_its_request_and_the_base_seed():
    story, params = make_story(0), SamplingParams(temperature=1.0)
    first = draw_rows([params, params], [story, story], request_indices=[8, 9])
    np.testing.assert_array_equal(
        draw_rows([params, params], [story, story], request_indices=[9, 8]), first[::-1]
    )
    assert (first[0] != first[1]).any()
    assert (draw_rows([params], [story], request_indices=[8], base_seed=1)[0] != first[0]).any()


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 - 1])
def test_a_seed_gives_the_key_that_jax_makes_of_it(seed):
    sampler = Sampler.create([SamplingParams(temperature=1.0, seed=seed)], vocab_size=4)
    assert sampler.randomness.keys[0] == jax.random.key(np.uint32(seed))


def test_all_64_bits_of_a_seed_count():
    seeds = [1, 2**32 + 1, -1, -(2**63), 2**63 - 1]
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    words = jax.random.key_data(Sampler.create(rows, vocab_size=4).randomness.keys)
    assert len(np.unique(words, axis=0)) == len(seeds)


# Which tokens can be drawn.


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0, top_k=1, top_p=0.8), [0]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 1]),
        (SamplingParams(temperature=1.0, top_p=1e-9), [0]),
        (SamplingParams(temperature=1.0, top_k=9), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0), [0, 1, 2, 3]),
        (SamplingParams(), [0]),
        # exp(-1) = 0.37 and exp(-2) = 0.14 of the likeliest.
        (SamplingParams(temperature=1.0, min_p=0.3), [0, 1, 2]),
        # The temperature comes first: exp(-1 / 0.5) = 0.14.
        (SamplingParams(temperature=0.5, min_p=0.3), [0]),
        # Token 0 has 0.73 of what top-k leaves, and 0.53 of the whole.
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.7), [0]),
        (SamplingParams(temperature=1.0, top_p=0.7), [0, 1]),
        (SamplingParams(temperature=1.0, logit_bias=((0, -math.inf), (3, 5.0)), top_k=1), [3]),
    ],
)
def test_the_support_is_as_documented(params, expected):
    assert support([2.0, 1.0, 1.0, 0.0], params) == expected


def test_temperature_zero_takes_the_lowest_id_among_the_likeliest():
    assert draw_once(jnp.array([[0.0, 3.0, 3.0, 1.0]]), SamplingParams()).tokens[0] == 1


def test_greedy_and_random_rows_share_a_batch():
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0]] * 64)
    rows = [SamplingParams(temperature=2.0 * (index % 2)) for index in range(64)]
    tokens = sample(logits, Sampler.create(rows, vocab_size=4), jnp.ones(64, bool))[0].tokens
    assert (tokens[::2] == 0).all()
    assert len(set(tokens[1::2].tolist())) > 1


@pytest.mark.parametrize("temperature", [LEAST, 1e-6, LARGEST])
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_extreme_temperatures_and_logits_stay_finite(temperature, scale):
    logits = jnp.array([[2.0, 1.0, 1.0, -3.0]]) * scale
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.9, min_p=0.01)
    draw = draw_once(logits, params)
    assert draw.is_finite[0]
    if temperature < 1:
        assert draw.tokens[0] == 0


def test_extreme_parameters_keep_any_finite_logits_finite():
    params = [
        SamplingParams(
            temperature=temperature,
            repetition_penalty=repetition,
            presence_penalty=added,
            frequency_penalty=added,
            logit_bias=((0, -math.inf), (1, -added), (2, -added)),
        )
        for temperature in (0.0, LEAST, LARGEST)
        for repetition in (LEAST, LARGEST)
        for added in (-LARGEST, LARGEST)
    ]
    rows = len(params)
    sampler = Sampler.create(params, vocab_size=4, prompts=[range(4)] * rows)
    # As after the longest output that can be counted, for each token.
    counts = jnp.full((rows, 4), 2**31 - 1, jnp.int32)
    sampler = sampler.replace(penalties=sampler.penalties.replace(output_counts=counts))
    for logit in (3.4e38, -3.4e38, 0.0):
        logits = jnp.tile(jnp.array([[0.0, logit, -logit, logit]]), (rows, 1))
        draw = sample(logits, sampler, jnp.ones(rows, bool))[0]
        assert draw.is_finite.all()
        assert (draw.tokens >= 1).all()
        assert (draw.tokens < 4).all()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_penalty_does_not_hide_a_logit_that_is_not_finite(bad):
    params = SamplingParams(repetition_penalty=2.0)
    assert not draw_once(jnp.array([[0.0, bad]]), params, prompts=[[1]]).is_finite[0]


def test_a_batch_of_greedy_rows_computes_no_randomness():
    sampler = Sampler.create([SamplingParams()] * 2, vocab_size=8)
    program = jax.make_jaxpr(sampling.sample)(jnp.zeros((2, 8)), sampler, jnp.ones(2, bool))
    assert "random" not in str(program)
    assert not jax.tree.leaves((sampler.randomness, sampler.penalties, sampler.bias))


# How often each is drawn.


def test_draws_of_one_seed_follow_the_softmax():
    logits = jnp.linspace(-2, 2, 12)
    tokens = draw_often(logits, SamplingParams(temperature=1.5, seed=3))
    assert_drawn_from(tokens, np.asarray(jax.nn.softmax(logits / 1.5)))


def test_first_draws_of_many_requests_follow_the_softmax():
    logits = jnp.linspace(-2, 2, 12)
    tokens = draw_once(jnp.tile(logits, (8192, 1)), SamplingParams(temperature=1.0)).tokens
    assert_drawn_from(tokens, np.asarray(jax.nn.softmax(logits)))


def test_filtered_draws_follow_the_softmax_of_what_is_left():
    logits = jnp.linspace(-2, 2, 12)
    tokens = draw_often(logits, SamplingParams(temperature=1.0, top_k=5, seed=3))
    assert_drawn_from(tokens, np.asarray(jax.nn.softmax(logits.at[:7].set(-jnp.inf))))


def test_the_check_of_draws_fails_a_wrong_temperature():
    logits = jnp.linspace(-2, 2, 12)
    tokens = draw_often(logits, SamplingParams(temperature=1.1, seed=3))
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens, np.asarray(jax.nn.softmax(logits)))


# Penalties and bias.


def test_penalties_are_those_of_their_sources():
    params = SamplingParams(
        temperature=1.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    sampler = Sampler.create([params], vocab_size=5, prompts=[[0, 1, 1]], outputs=[[1, 2, 2, 2]])
    logits = jnp.array([[4.0, -4.0, 4.0, 4.0, -4.0]])
    expected = np.array([2.0, -8 - 0.25 - 0.5, 2 - 0.25 - 1.5, 4.0, -4.0])
    np.testing.assert_allclose(
        log_weights(logits, sampler)[0], expected - expected.max(), rtol=1e-6, atol=1e-6
    )


def test_a_drawn_token_is_counted_at_once():
    params = SamplingParams(presence_penalty=5.0)
    logits = jnp.tile(jnp.array([3.0, 2.0, 1.0, 0.0]), (1, 4, 1))
    assert draw_rows([params], [logits[0]])[0].tolist() == [0, 1, 2, 3]


def test_a_neighbours_penalty_changes_nothing():
    logits = jnp.array([[3.0, 2.0], [3.0, 2.0]])
    rows = [SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=2.0)]
    sampler = Sampler.create(rows, vocab_size=2, prompts=[[0], [0]])
    np.testing.assert_array_equal(log_weights(logits, sampler)[0], [0, -1])


def test_a_bias_is_added_and_minus_infinity_bans():
    logits = jnp.array([[3.0, 2.0, 1.0]])
    params = SamplingParams(temperature=1.0, logit_bias=((0, -math.inf), (2, 0.5)))
    sampler = Sampler.create([params], vocab_size=3)
    np.testing.assert_array_equal(log_weights(logits, sampler)[0], [-np.inf, 0, -0.5])


# Rows that draw nothing.


def test_an_inactive_row_gets_the_pad_and_keeps_its_state():
    sampler = Sampler.create([EVERYTHING] * 2, vocab_size=257)
    logits = jnp.stack([make_story(0)[0]] * 2)
    draw, after = sample(logits, sampler, jnp.array([True, False]), pad_id=-1)
    assert draw.tokens[0] >= 0
    assert draw.tokens[1] == -1
    assert draw.logprobs[1] == 0
    np.testing.assert_array_equal(after.num_draws, [1, 0])
    np.testing.assert_array_equal(after.penalties.output_counts.sum(-1), [1, 0])


def test_a_pause_does_not_change_a_rows_tokens():
    story = make_story(0)
    sampler = Sampler.create([EVERYTHING], vocab_size=257)
    tokens = []
    for index in range(8):
        _, sampler = sample(story[index][None], sampler, jnp.array([False]))
        draw, sampler = sample(story[index][None], sampler, jnp.array([True]))
        tokens.append(int(draw.tokens[0]))
    assert tokens == draw_rows([EVERYTHING], [story])[0, :8].tolist()


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_row_that_is_not_finite_is_reported_and_draws_nothing(params, bad):
    logits = jnp.stack([make_story(0)[0]] * 3).at[1:, 100].set(bad)
    sampler = Sampler.create([params] * 3, vocab_size=257)
    draw, after = sample(logits, sampler, jnp.array([True, True, False]), pad_id=256)
    np.testing.assert_array_equal(draw.is_finite, [True, False, True])
    np.testing.assert_array_equal(draw.tokens[1:], [256, 256])
    np.testing.assert_array_equal(after.num_draws, [1, 0, 0])
    assert draw.tokens[0] == draw_once(logits[:1], params).tokens[0]


def test_a_row_without_a_possible_token_is_reported():
    assert not draw_once(jnp.full((1, 4), -jnp.inf), SamplingParams(temperature=1.0)).is_finite[0]
    banned = SamplingParams(logit_bias=tuple((index, -math.inf) for index in range(3)))
    assert not draw_once(jnp.array([[0.0, 0.0, 0.0, -jnp.inf]]), banned).is_finite[0]


def test_a_draw_from_weights_that_are_not_numbers_is_no_token():
    params = SamplingParams(temperature=1.0, logit_bias=((1, -math.inf),))
    sampler = Sampler.create([params], vocab_size=4)
    broken = sampler.replace(randomness=sampler.randomness.replace(temperature=jnp.array([jnp.inf])))
    draw, after = sample(jnp.zeros((1, 4)), broken, jnp.ones(1, bool))
    assert not draw.is_finite[0]
    assert draw.tokens[0] == 0
    assert after.num_draws[0] == 0


# Log-probabilities.


def test_logprobs_are_those_of_the_raw_logits():
    logits = make_story(0)[:3]
    draw = draw_once(logits, EVERYTHING)
    expected = jax.nn.log_softmax(logits)[jnp.arange(3), draw.tokens]
    np.testing.assert_allclose(draw.logprobs, expected, rtol=1e-5, atol=1e-6)


def test_top_logprobs_are_as_many_as_any_row_asks_for():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0]] * 2)
    rows = [SamplingParams(num_logprobs=1), SamplingParams(num_logprobs=3)]
    draw = sample(logits, Sampler.create(rows, vocab_size=4), jnp.ones(2, bool))[0]
    np.testing.assert_array_equal(draw.top_tokens, [[1, 3, 2]] * 2)
    np.testing.assert_allclose(draw.top_logprobs, jax.nn.log_softmax(logits)[:, [1, 3, 2]], rtol=1e-5)
    assert draw_once(logits, SamplingParams()).top_tokens.shape == (2, 0)


def test_bfloat16_logits_are_sampled_in_float32():
    logits = make_story(0)[:2].astype(jnp.bfloat16)
    draw = draw_once(logits, EVERYTHING)
    assert draw.logprobs.dtype == jnp.float32
    np.testing.assert_array_equal(draw.tokens, draw_once(logits.astype(jnp.float32), EVERYTHING).tokens)


# The state as a value.


def test_a_while_loop_carries_the_state_and_consumes_it():
    rows = [EVERYTHING, SamplingParams(temperature=1.0, seed=1)]
    logits = jnp.stack([make_story(0)[0], make_story(1)[0]])

    def draw_five(sampler):
        return jax.lax.while_loop(
            lambda sampler: sampler.num_draws[0] < 5,
            lambda sampler: sample(logits, sampler, jnp.ones(2, bool))[1],
            sampler,
        )

    sampler = Sampler.create(rows, vocab_size=257)
    after = jax.jit(draw_five, donate_argnums=0)(sampler)
    np.testing.assert_array_equal(after.num_draws, [5, 5])
    np.testing.assert_array_equal(after.penalties.output_counts.sum(-1), [5, 5])
    assert sampler.penalties.output_counts.is_deleted()


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"one entry a row, got \[2, 1, 2, 2\]"):
        Sampler.create([SamplingParams()] * 2, vocab_size=4, prompts=[[1]])


@pytest.mark.parametrize("token", [-1, 4])
def test_a_counted_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"below the vocabulary's 4, got {token}"):
        Sampler.create([SamplingParams(presence_penalty=1.0)], vocab_size=4, outputs=[[0, token]])


def test_a_bad_parameter_is_refused_before_any_array_is_made():
    with pytest.raises(ValueError, match="top_p must be"):
        Sampler.create([SamplingParams(top_p=0.0)], vocab_size=4)
