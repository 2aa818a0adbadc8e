"""Steps in which each sequence has as many tokens as it likes, in one row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from kernels_pallas.paged_attention import Tiling

from .compare import assert_close
from .poison import poison

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LAYER = 4, 2, 16, 1
# A prefill beside single tokens, idle sequences first, last and between; nothing; one for all.
STEPS = [(21, 0, 1, 6), (0, 1, 1, 1), (3, 17, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)]
TOKENS = 30
WIDEST = max(map(max, STEPS))


def make_cache(codec: str, window: int | None = None) -> Cache:
    group = CacheGroup(2, NUM_KV_HEADS, HEAD_DIM, codec, window=window)
    spec = CacheSpec.create([group], page_size=8, max_chunk=24)
    return poison(Cache.dense(spec, num_sequences=4, capacity=96))


def make_rows(lens: tuple[int, ...], heads: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((count, heads, HEAD_DIM), np.float32) for count in lens]


def pad(rows: list[np.ndarray], time: int) -> jax.Array:
    return jnp.stack([jnp.pad(row, ((0, time - len(row)), (0, 0), (0, 0))) for row in rows])


def pack(rows: list[np.ndarray]) -> jax.Array:
    return pad([np.concatenate(rows)], TOKENS)


@functools.partial(jax.jit, static_argnames=("is_ragged", "window", "implementation"))
def step(cache, lens, query, key, value, is_ragged, window, implementation):
    if is_ragged:
        cache, batch = cache.begin_ragged(lens, num_tokens=query.shape[1])
    else:
        cache, batch = cache.begin(lens, time=query.shape[1])
    attended = ops.attend(
        query,
        key,
        value,
        cache,
        (0, LAYER),
        batch,
        scale=HEAD_DIM**-0.5,
        window=window,
        implementation=implementation,
        tiling=Tiling(query_tokens=5),
    )
    return attended, batch


@pytest.mark.parametrize(
    ("codec", "window", "implementation"),
    [("f32", None, "xla"), ("int4", None, "xla"), ("int8", 11, "xla"), ("int4", 11, "reference")],
)
def test_a_ragged_step_is_the_padded_one(codec: str, window: int | None, implementation: str):
    ragged, padded = make_cache(codec, window), make_cache(codec, window)
    for seed, lens in enumerate(STEPS):
        rows = [make_rows(lens, heads, seed) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        counts = jnp.array(lens, jnp.int32)
        options = {"window": window, "implementation": implementation}
        (out, ragged, log_sum), batch = step(ragged, counts, *map(pack, rows), True, **options)
        columns = (pad(heads, WIDEST) for heads in rows)
        (expected, padded, expected_log_sum), _ = step(padded, counts, *columns, False, **options)
        assert (np.asarray(out)[0, sum(lens) :] == 0).all()
        for row, offset, count in zip(range(4), np.cumsum(lens) - lens, lens, strict=True):
            if not count:
                continue
            own = slice(offset, offset + count)
            assert_close(out[0, own], expected[row, :count])
            assert_close(log_sum[0, own], expected_log_sum[row, :count])
            assert int(batch.last[row]) == offset + count - 1
        for got, wanted in zip(jax.tree.leaves(ragged), jax.tree.leaves(padded), strict=True):
            assert got.tobytes() == wanted.tobytes()


def test_sequences_that_do_not_fit_are_refused_and_the_others_stay_in_place():
    """Of 30 tokens the second sequence is past its capacity and the fourth past the row."""
    cache = make_cache("f32")
    cache = cache.replace(lengths=jnp.array([0, 90, 0, 0], jnp.int32))
    lens = (9, 10, 8, 4)
    rows = [make_rows(lens, heads, 0) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    packed = (pack([row[: 30 - 27] if len(row) == 4 else row for row in heads]) for heads in rows)
    (out, cache, _), batch = step(cache, jnp.array(lens, jnp.int32), *packed, True, None, "xla")
    assert cache.lengths.tolist() == [9, 90, 8, 0]
    assert cache.num_dropped.tolist() == [0, 10, 0, 4]
    assert batch.is_valid[0].tolist() == [True] * 9 + [False] * 10 + [True] * 8 + [False] * 3
    alone = make_cache("f32")
    (expected, _, _), _ = step(
        alone, jnp.array([8, 0, 0, 0], jnp.int32), *(pack([heads[2]]) for heads in rows), True, None, "xla"
    )
    assert_close(out[0, 19:27], expected[0, :8])


def test_a_sequence_longer_than_a_window_keeps_room_for_is_refused():
    cache, _ = make_cache("f32", window=11).begin_ragged(jnp.array([25, 24, 0, 0], jnp.int32), num_tokens=60)
    assert (cache.lengths.tolist(), cache.num_dropped.tolist()) == ([0, 24, 0, 0], [25, 0, 0, 0])


def test_lengths_whose_sum_overflows_are_refused():
    lens = [3, 2**31 - 1, 2**31 - 1, 1]
    cache, _ = make_cache("f32").begin_ragged(jnp.array(lens, jnp.int32), num_tokens=30)
    assert (cache.lengths.tolist(), cache.num_dropped.tolist()) == ([3, 0, 0, 0], [0, *lens[1:]])


def test_parts_of_a_sequence_merge_by_their_log_sums():
    """A window's part and the part before it are the whole."""
    cache = make_cache("f32")
    rows = [make_rows((20, 0, 0, 0), heads, 0) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    lens = jnp.array([20, 0, 0, 0], jnp.int32)
    packed = [pack(heads) for heads in rows]
    (whole, _, total), _ = step(cache, lens, *packed, True, None, "xla")
    (near, _, near_log_sum), _ = step(make_cache("f32"), lens, *packed, True, 4, "xla")
    query, key, value = (heads[0] for heads in rows)
    group = NUM_HEADS // NUM_KV_HEADS
    for head in range(NUM_HEADS):
        logits = key[:16, head // group] @ query[19, head] / HEAD_DIM**0.5
        log_sum = np.logaddexp.reduce(logits)
        far = np.exp(logits - log_sum) @ value[:16, head // group]
        weight = 1 / (1 + np.exp(log_sum - float(near_log_sum[0, 19, head])))
        assert_close(weight * near[0, 19, head] + (1 - weight) * far, whole[0, 19, head])
        assert_close(np.logaddexp(log_sum, float(near_log_sum[0, 19, head]))[None], total[0, 19, head][None])
