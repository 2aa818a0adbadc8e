"""Ways in which caches have gone wrong elsewhere, each a case (B..) that is driven through a whole cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv import ops
from jkv.cache import sequences
from jkv.cache.cache import Cache
from jkv.cache.codec import Codec
from jkv.cache.encoding import decode, encode
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.canonical import to_canonical
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model

from ..compare import assert_close
from ..histories import Form, History
from ..poison import poison
from ..tiny import make_config

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5


def make_heads(rows: int, time: int) -> list[jax.Array]:
    """Return queries, keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [
        jax.random.normal(key, (rows, time, count, HEAD_DIM)) for key, count in zip(keys, counts, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="window")
def run_step(cache: Cache, lens: jax.Array, heads: list[jax.Array], window: int | None = None):
    cache, batch = cache.begin(lens, time=heads[0].shape[1])
    out, cache, _ = ops.attend(*heads, cache, (0, 0), batch, scale=SCALE, window=window)
    return out, cache


def cut(heads: list[jax.Array], start: int, count: int, time: int) -> list[jax.Array]:
    """Return `count` tokens of each row from `start` on, padded to `time` with NaN."""
    padding = ((0, 0), (0, time - count), (0, 0), (0, 0))
    return [jnp.pad(x[:, start : start + count], padding, constant_values=jnp.nan) for x in heads]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("widths", "time"),
    [([11, *[1] * 12], 14), ([*[1] * 7, 3, 6, 3, 6], 6)],
    ids=["B11_long_padded_prefill_then_steps", "B13_steps_then_chunks"],
)
def test_a_ring_gives_what_banded_attention_gives(widths: list[int], time: int, page_size: int):
    """B11, B13: a prompt longer than the window, padded, and chunks after the ring has wrapped."""
    heads = make_heads(1, sum(widths))
    group = CacheGroup(1, NUM_KV_HEADS, HEAD_DIM, window=4)
    spec = CacheSpec.create([group], page_size=page_size, max_chunk=time)
    cache = poison(Cache.dense(spec, num_sequences=1, capacity=64))
    assert cache.is_ring(0)
    assert spec.pages_for(64) * page_size < sum(widths)
    outs, start = [], 0
    for width in widths:
        out, cache = run_step(cache, jnp.array([width]), cut(heads, start, width, time), window=4)
        outs.append(out[:, :width])
        start += width
    assert_close(np.concatenate(outs, axis=1), ops.attend(*heads, scale=SCALE, window=4).out)


def make_tables(width: int, past: int, *, is_packed: bool) -> np.ndarray:
    """Return a table for 2, 10 and 5 tokens in pages of 4; entries that a row does not need are `past`."""
    table, needed = np.full((3, width), past, np.int32), (1, 3, 2)
    starts = np.cumsum((0, *needed[:-1])) if is_packed else np.arange(3) * width
    for row, (start, count) in enumerate(zip(starts, needed, strict=True)):
        table[row, :count] = start + np.arange(count)
    return table


@pytest.mark.parametrize("width", [3, 4, 5])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "fixed_stride"])
def test_rows_of_a_batch_read_their_own_pages_alone(width: int, is_packed: bool):
    """B17: what a table names past a row's end, here a page of NaN, changes no bit."""
    lengths, num_pages = np.array([1, 9, 4]), 16
    heads = make_heads(3, 10)
    first = cut(heads, 0, 9, 10)
    second = cut([x[np.arange(3), lengths][:, None] for x in heads], 0, 1, 10)
    spec = CacheSpec.create([CacheGroup(1, NUM_KV_HEADS, HEAD_DIM)], page_size=4)

    def run(past: int) -> tuple[np.ndarray, np.ndarray]:
        cache = Cache.paged(spec, num_sequences=3, capacity=4 * width, num_pages=[num_pages])
        cache = poison(cache).assign([jnp.asarray(make_tables(width, past, is_packed=is_packed))])
        prefilled, cache = run_step(cache, jnp.asarray(lengths, jnp.int32), first)
        stepped, cache = run_step(cache, jnp.ones(3, jnp.int32), second)
        assert cache.lengths.tolist() == (lengths + 1).tolist()
        return np.asarray(prefilled), np.asarray(stepped)

    prefilled, stepped = run(num_pages - 1)
    for got, expected in zip((prefilled, stepped), run(-1), strict=True):
        np.testing.assert_array_equal(got, expected)
    expected = np.asarray(ops.attend(*heads, scale=SCALE).out)
    for row, length in enumerate(lengths):
        assert_close(prefilled[row, :length], expected[row, :length])
        assert_close(stepped[row, 0], expected[row, length])


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_request_gives_all_its_pages_back(page_size: int):
    """B18: a prompt of 3, then 20 tokens; every page has one owner, and a second free is refused."""
    history = History(Form("paged", page_size=page_size, pages_per_row=24 // page_size, num_rows=1))
    allocator = history.allocator
    assert allocator is not None
    for count in [3, *[1] * 20]:
        assert_close(*history.append([count], 4))
        assert allocator.num_held == len(set(history.pages[0])) == -(-history.heads[0].shape[1] // page_size)
    pages = list(history.pages[0])
    history.clear(0)
    assert allocator.num_free + allocator.num_cached == allocator.num_pages
    with pytest.raises(ValueError, match="a page can be freed once per holder"):
        allocator.free(pages)


def test_rows_of_int8_keep_their_own_precision():
    """B24: rows that are small, large, zero and constant, side by side."""
    small, large = make_heads(1, 2)[1][0]
    rows = [0.01 * small / jnp.abs(small).max(), 4 * large / jnp.abs(large).max()]
    heads = jnp.stack([*rows, jnp.zeros_like(small), jnp.full_like(small, 3e-4)])
    codec = Codec("int8", "token")
    stored = encode(codec, heads)
    assert stored.scale is not None
    assert np.isfinite(stored.scale).all()
    errors = np.abs(np.asarray(decode(codec, stored) - heads, np.float64))
    assert (errors.max(-1) <= np.abs(heads).max(-1) / 254 * (1 + 1e-5)).all()
    assert (errors[2] == 0).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("count", [1, 32, 33, 65])
def test_beams_take_their_whole_history_along(codec: str, count: int):
    """B26: two beams swapped, then one of them kept twice, on both sides of a page's border."""
    history = History(Form("dense", codec, page_size=32, pages_per_row=3, num_rows=2))
    history.append([count, count], 65)
    before = to_canonical(history.cache)
    swap = jax.jit(sequences.select)
    first, second = (swap(history.cache, jnp.array([1, 0])) for _ in range(2))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(to_canonical(first)), strict=True):
        np.testing.assert_array_equal(other, one[::-1])
    for rows in ([1, 0], [1, 1]):
        history.fork(rows)
        assert_close(*history.append([1, 1], 65))


def test_idle_and_empty_rows_touch_no_live_one():
    """B59: the null page, that tables name past a row's end, and all free pages are NaN."""
    config = make_config()
    step, weights = split_model(Decoder(config, rngs=nnx.Rngs(0)))
    spec = cache_spec(config, page_size=4)
    table = np.zeros((5, 2), np.int32)
    table[:, 0] = np.arange(1, 6)
    tokens = jnp.array([[3, 1, 4, 1, 5]] * 5)

    @jax.jit
    def run(cache: Cache, lens: jax.Array):
        cache, batch = cache.begin(lens, time=5)
        return step(weights, tokens, cache, batch)

    def logits(dead: float) -> np.ndarray:
        cache = Cache.paged(spec, num_sequences=5, capacity=8, num_pages=[8])
        cache = poison(cache, dead).assign([jnp.asarray(table)])
        _, cache = run(cache, jnp.array([3, 2, 4, 1, 0]))
        return np.asarray(run(cache, jnp.array([1, 0, 0, 0, 0]))[0])

    clean, poisoned = logits(0.0), logits(np.nan)
    np.testing.assert_array_equal(poisoned[0], clean[0])
    assert np.isfinite(poisoned).all()
