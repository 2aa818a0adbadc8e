"""Top-k, top-p and min-p against a sort in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jkv.decode import filters

top_k = jax.jit(filters.top_k)
top_p = jax.jit(filters.top_p)
min_p = jax.jit(filters.min_p)

SPECIAL = [-np.inf, 0.0, -0.0, 1.0, 1.0000001, -1.0, 3e38, -3e38, 1e-30, -1e-30]
VALUES = st.sampled_from(SPECIAL) | st.floats(-30, 30, width=32, allow_subnormal=False)
ROWS = hnp.arrays(np.float32, (2, 19), elements=VALUES | st.just(1.0))
MANY = settings(max_examples=150)


def by_likelihood(row: np.ndarray) -> np.ndarray:
    """Token ids by falling logit, then by rising id."""
    return np.argsort(-row, kind="stable")


def assert_is_nucleus(row: np.ndarray, kept: np.ndarray, p: float) -> None:
    """`kept` is the shortest prefix that reaches `p`, up to what float32 can tell."""
    order = by_likelihood(row)
    num_kept = int(kept.sum())
    assert num_kept >= 1
    assert set(np.flatnonzero(kept)) == set(order[:num_kept])
    share = np.exp(row.astype(np.float64) - row.max())
    share = share[order] / share.sum()
    assert share[:num_kept].sum() >= p * (1 - 1e-6)
    assert num_kept == 1 or share[: num_kept - 1].sum() < p * (1 + 1e-6)


@MANY
@given(ROWS, st.lists(st.integers(1, 25), min_size=2, max_size=2))
def test_top_k_keeps_what_a_stable_sort_keeps(rows, k):
    expected = np.full_like(rows, -np.inf)
    for row, kept, limit in zip(rows, expected, k, strict=True):
        ids = by_likelihood(row)[:limit]
        kept[ids] = row[ids]
    np.testing.assert_array_equal(top_k(rows, jnp.array(k)), expected)


@MANY
@given(
    ROWS,
    st.lists(st.floats(2.0**-30, 1, width=32) | st.sampled_from([0.5, 0.75, 1.0]), min_size=2, max_size=2),
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_p(rows, p):
    rows[:, 7] = np.where(np.isneginf(rows).all(-1), 0, rows[:, 7])
    filtered = np.asarray(top_p(rows, jnp.array(p)))
    for row, kept, limit in zip(rows, filtered > -np.inf, p, strict=True):
        if limit == 1:
            np.testing.assert_array_equal(kept, row > -np.inf)
        else:
            assert_is_nucleus(row, kept, limit)


# XLA flushes subnormal numbers to zero, and a `p` of zero keeps all.
@MANY
@given(ROWS, st.floats(0, 1, width=32, allow_subnormal=False))
def test_min_p_keeps_tokens_near_the_likeliest(rows, p):
    rows[:, 7] = np.where(np.isneginf(rows).all(-1), 0, rows[:, 7])
    filtered = np.asarray(min_p(rows, jnp.array([p, p])))
    share = np.exp(rows.astype(np.float64) - rows.max(-1, keepdims=True))
    assert (filtered[share >= p * (1 + 1e-6)] == rows[share >= p * (1 + 1e-6)]).all()
    assert np.isneginf(filtered[share < p * (1 - 1e-6)]).all()


@pytest.mark.parametrize(
    ("p", "expected"), [(1e-9, [0]), (0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.75, [0, 1, 2])]
)
def test_top_p_among_equals_keeps_the_lowest_ids(p, expected):
    assert np.flatnonzero(top_p(jnp.zeros((1, 4)), jnp.array([p]))[0] == 0).tolist() == expected


@pytest.mark.parametrize("change", [-1, 1])
def test_the_check_of_top_p_fails_a_set_one_token_off(change):
    row = np.arange(8, dtype=np.float32)
    kept = np.asarray(top_p(row[None], jnp.array([0.9])))[0] > -np.inf
    assert_is_nucleus(row, kept, 0.9)
    ids = by_likelihood(row)[: kept.sum() + change]
    with pytest.raises(AssertionError):
        assert_is_nucleus(row, np.isin(np.arange(8), ids), 0.9)


@pytest.mark.parametrize("vocab_size", [1, 49152])
def test_a_whole_vocabulary_is_filtered_exactly(vocab_size):
    row = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    kept = np.asarray(top_p(row[None], jnp.array([0.9])))[0] > -np.inf
    assert_is_nucleus(row, kept, 0.9)
    kept = np.asarray(top_k(row[None], jnp.array([50])))[0] > -np.inf
    np.testing.assert_array_equal(np.sort(by_likelihood(row)[:50]), np.flatnonzero(kept))


@pytest.mark.parametrize("stage", [filters.top_k, filters.top_p, filters.min_p])
def test_no_stage_sorts(stage):
    limit = jnp.array([5]) if stage is filters.top_k else jnp.array([0.5])
    assert "sort" not in str(jax.make_jaxpr(stage)(jnp.zeros((1, 64)), limit))


def test_a_row_is_filtered_the_same_in_any_batch():
    rows = jax.random.normal(jax.random.key(0), (5, 4099)) * 3
    p = jnp.linspace(0.5, 0.99, 5)
    together = top_p(rows, p)
    for index in range(5):
        np.testing.assert_array_equal(
            top_p(rows[index : index + 1], p[index : index + 1])[0], together[index]
        )


def test_the_fixed_point_sum_has_the_same_bits_in_any_order():
    values = jax.random.uniform(jax.random.key(0), (1, 49152)) ** 20
    total = filters.fixed_point_sum(values)
    for seed in range(3):
        shuffled = jax.random.permutation(jax.random.key(seed), values, axis=1)
        assert filters.fixed_point_sum(shuffled)[0] == total[0]


@pytest.mark.parametrize("values", [np.full(262_143, 1e-9), np.ones(262_143), np.geomspace(1, 1e-12, 49152)])
def test_the_fixed_point_sum_is_as_good_as_float32(values):
    values = np.r_[1, values[1:]].astype(np.float32)
    expected = values.astype(np.float64).sum()
    np.testing.assert_allclose(filters.fixed_point_sum(jnp.array(values[None]))[0], expected, rtol=5e-7)
