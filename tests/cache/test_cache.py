"""The cache as a value: where tokens go, what is refused, what a truncation leaves."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import ops
from jkv.cache import sequences
from jkv.cache.cache import Cache
from jkv.cache.checks import check_integers
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.sharding import Sharding

from ..poison import poison

NUM_HEADS, HEAD_DIM = 2, 4


def make_spec(page_size: int = 1, num_layers: int = 1, codec: str = "f32") -> CacheSpec:
    return CacheSpec.create([CacheGroup(num_layers, NUM_HEADS, HEAD_DIM, codec)], page_size=page_size)


def make_cache(capacity: int = 5, rows: int = 1, **spec) -> Cache:
    return poison(Cache.dense(make_spec(**spec), num_sequences=rows, capacity=capacity))


def make_rows(rows: int, time: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, time, NUM_HEADS, HEAD_DIM))


def write_eagerly(cache: Cache, rows: jax.Array, lens: jax.Array, layer: int = 0) -> Cache:
    """Write `rows` as keys and values; what attention returns is not looked at."""
    cache, batch = cache.begin(lens, time=rows.shape[1])
    _, cache, _ = ops.attend(rows, rows, rows, cache, (0, layer), batch, scale=1.0)
    return cache


write = jax.jit(write_eagerly, static_argnums=3)


def stored(cache: Cache, layer: int = 0) -> np.ndarray:
    """Return the keys of a layer as `[seq, token, kv_head, head_dim]`, in the order of its table."""
    pool = cache.pools[0]
    pages = np.asarray(pool.keys.data)[np.asarray(pool.page_table) + layer * pool.num_pages]
    return pages.swapaxes(2, 3).reshape(len(pages), -1, NUM_HEADS, HEAD_DIM)


def held(cache: Cache, length: int) -> Cache:
    """Return the cache as if each sequence had `length` tokens, their slots still poisoned."""
    return cache.replace(lengths=jnp.full_like(cache.lengths, length))


def vmapped(cache: Cache, rows: jax.Array, lens: jax.Array) -> Cache:
    """Write as row 0 of a batch of caches."""
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (cache, rows, lens))
    return jax.tree.map(lambda leaf: leaf[0], jax.jit(jax.vmap(write))(*many))


def with_x64(cache: Cache, rows: jax.Array, lens: jax.Array) -> Cache:
    with jax.enable_x64(True):
        return write(cache, rows, lens)


WAYS = pytest.mark.parametrize(
    "append", [write_eagerly, write, vmapped, with_x64], ids=["eager", "jit", "vmap", "x64"]
)


@WAYS
@pytest.mark.parametrize("rows", [1, 3])
def test_an_append_that_just_fits_fills_the_last_slots(append, rows: int):
    new = make_rows(rows, 3)
    cache = append(held(make_cache(rows=rows), 2), new, jnp.full(rows, 3, jnp.int32))
    np.testing.assert_array_equal(stored(cache)[:, 2:], new)
    assert np.isnan(stored(cache)[:, :2]).all()
    assert cache.lengths.tolist() == [5] * rows
    assert cache.num_dropped.tolist() == [0] * rows


@WAYS
@pytest.mark.parametrize(("start", "rows"), [(3, 1), (4, 1), (3, 3), (4, 3), (5, 3)])
def test_an_append_past_the_end_leaves_every_byte_and_is_counted(append, start: int, rows: int):
    before = held(make_cache(rows=rows), start)
    after = append(before, make_rows(rows, 3), jnp.full(rows, 3, jnp.int32))
    assert stored(after).tobytes() == stored(before).tobytes()
    assert after.lengths.tolist() == [start] * rows
    assert after.num_dropped.tolist() == [3] * rows


@pytest.mark.parametrize("start", [4, 5, 6])
def test_a_single_token_of_a_single_row_lands_in_its_slot_or_nowhere(start: int):
    before = held(make_cache(page_size=2), start)
    new = make_rows(1, 1)
    after = write(before, new, jnp.ones(1, jnp.int32))
    if start < 5:
        np.testing.assert_array_equal(stored(after)[0, start], new[0, 0])
    assert np.isnan(np.delete(stored(after)[0], start if start < 5 else [], axis=0)).all()
    assert after.num_dropped.tolist() == [0 if start < 5 else 1]


def test_a_row_that_does_not_fit_is_refused_alone():
    cache = make_cache(rows=2).replace(lengths=jnp.array([1, 4], jnp.int32))
    cache = write(cache, make_rows(2, 2), jnp.array([2, 2], jnp.int32))
    assert cache.lengths.tolist() == [3, 4]
    assert cache.num_dropped.tolist() == [0, 2]
    assert np.isnan(stored(cache)[1]).all()


def test_the_limit_counts_true_tokens_and_not_padding():
    padded = make_rows(1, 8)
    fits = write(make_cache(capacity=6), padded, jnp.array([5], jnp.int32))
    refused = write(make_cache(capacity=6), padded, jnp.array([7], jnp.int32))
    assert (fits.lengths.tolist(), fits.num_dropped.tolist()) == ([5], [0])
    assert (refused.lengths.tolist(), refused.num_dropped.tolist()) == ([0], [7])


def test_padding_writes_nothing():
    cache = write(make_cache(rows=2, capacity=8), make_rows(2, 4), jnp.array([2, 0], jnp.int32))
    assert np.isnan(stored(cache)[0, 2:]).all()
    assert np.isnan(stored(cache)[1]).all()


def test_capacity_is_exact_where_pages_are_not():
    cache = make_cache(capacity=5, page_size=4)
    cache = write(cache, make_rows(1, 6), jnp.array([6], jnp.int32))
    assert cache.num_dropped.tolist() == [6]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_writes_its_own_pages_only(layer: int):
    cache = write(make_cache(rows=2, num_layers=3), make_rows(2, 5), jnp.full(2, 5, jnp.int32), layer)
    for other in {0, 1, 2} - {layer}:
        assert np.isnan(stored(cache, other)).all()
    np.testing.assert_array_equal(stored(cache, layer), make_rows(2, 5))


@pytest.mark.parametrize(("page", "rows", "time"), [(99, 1, 1), (4, 2, 1), (-1, 1, 1), (-1, 1, 3), (4, 1, 3)])
def test_a_page_id_outside_the_layer_writes_nothing(page: int, rows: int, time: int):
    """B15: page 4 of the first of two layers is page 0 of the second."""
    cache = make_cache(rows=rows, capacity=4 // rows, num_layers=2)
    pool = cache.pools[0]
    assert (pool.num_pages, pool.keys.data.shape[0]) == (4, 8)
    cache = cache.replace(pools=(pool.replace(page_table=jnp.full_like(pool.page_table, page)),))
    after = write(cache, make_rows(rows, time), jnp.full(rows, min(time, 2), jnp.int32))
    assert np.isnan(after.pools[0].keys.data).all()
    assert np.isnan(after.pools[0].values.data).all()


@pytest.mark.parametrize("page", [4, 99, -1])
def test_pages_outside_the_layer_are_neither_copied_nor_copied_to(page: int):
    cache = write(make_cache(capacity=4, num_layers=2), make_rows(1, 4), jnp.array([4], jnp.int32))
    inside, outside = (jnp.array([one], jnp.int32) for one in (2, page))
    for source, target in ((inside, outside), (outside, inside)):
        after = sequences.copy_pages(cache, [source], [target])
        for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_step_that_its_pages_have_no_room_for_is_refused():
    cache = make_cache(capacity=4)
    table = cache.pools[0].page_table
    cache = cache.assign([jnp.where(table == 2, -1, table)])
    after = write(cache, make_rows(1, 3), jnp.array([3], jnp.int32))
    assert np.isnan(after.pools[0].keys.data).all()
    assert (after.lengths.tolist(), after.num_dropped.tolist()) == ([0], [3])
    after = write(cache, make_rows(1, 2), jnp.array([2], jnp.int32))
    np.testing.assert_array_equal(stored(after)[0, :2], make_rows(1, 2)[0])


@pytest.mark.parametrize(("lengths", "left"), [(0, 0), (3, 3), (5, 3), (3 - 5, 0)])
def test_truncation_leaves_at_most_what_was_there_and_never_less_than_nothing(lengths: int, left: int):
    """B05: cut to nothing, to what is there and past it, and rewound by more than there is."""
    cache = write(make_cache(), make_rows(1, 3), jnp.array([3], jnp.int32))
    cut = cache.truncate(jnp.array([lengths], jnp.int32))
    assert cut.lengths.tolist() == [left]
    _, batch = cut.begin(jnp.array([1], jnp.int32), time=1)
    assert batch.positions.tolist() == [[left]]


def test_truncation_is_for_each_row():
    cache = held(make_cache(rows=3), 4)
    assert cache.truncate(jnp.array([0, 9, 2], jnp.int32)).lengths.tolist() == [0, 4, 2]


def test_what_follows_a_truncation_overwrites_what_it_cut():
    cache = write(make_cache(), make_rows(1, 4), jnp.array([4], jnp.int32))
    cache = write(
        cache.truncate(jnp.array([2], jnp.int32)), make_rows(1, 2, seed=1), jnp.array([2], jnp.int32)
    )
    np.testing.assert_array_equal(stored(cache)[0, :2], make_rows(1, 4)[0, :2])
    np.testing.assert_array_equal(stored(cache)[0, 2:4], make_rows(1, 2, seed=1)[0])


def test_idle_rows_of_a_step_have_no_tokens():
    _, batch = make_cache(rows=3).begin(jnp.array([2, 0, 3], jnp.int32), time=3)
    assert batch.is_valid.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.last.tolist() == [1, 0, 2]


def test_a_batch_selects_each_rows_last_token_or_all():
    x, lens = make_rows(3, 4), jnp.array([2, 0, 4], jnp.int32)
    _, last = make_cache(rows=3).begin(lens, time=4)
    _, every = make_cache(rows=3).begin(lens, time=4, outputs="all")
    np.testing.assert_array_equal(last.select(x), x[jnp.arange(3), jnp.array([1, 0, 3])])
    np.testing.assert_array_equal(every.select(x), x)


def test_no_two_leaves_share_a_buffer():
    cache = make_cache(rows=2, num_layers=2)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(("rows", "capacity"), [(0, 5), (2, 0)])
def test_an_empty_cache_is_refused_with_its_sizes(rows: int, capacity: int):
    with pytest.raises(ValueError, match=f"at least one sequence and one token, got {rows} and {capacity}"):
        Cache.dense(make_spec(), num_sequences=rows, capacity=capacity)


def test_tokens_and_pages_past_what_32_bits_count_are_refused():
    """Before anything is allocated."""
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 tokens, .* got 1,000,000,000,000 tokens"):
        Cache.dense(make_spec(), num_sequences=1, capacity=10**12)
    with pytest.raises(ValueError, match="got 2,147,483,648 tokens and 1,073,741,824 pages"):
        Cache.dense(make_spec(page_size=2), num_sequences=2, capacity=2**30)
    with pytest.raises(ValueError, match="got 1,073,741,824 tokens and 4,294,967,296 pages"):
        Cache.paged(make_spec(num_layers=4), num_sequences=1, capacity=8, num_pages=[2**30])
    with pytest.raises(ValueError, match="got 4,294,967,296 tokens and 1 pages"):
        Cache.paged(make_spec(), num_sequences=1, capacity=2**32, num_pages=[1])


def make_sharding(*axes: str) -> Sharding:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto, devices=jax.devices()[:4])
    return Sharding.create(mesh, dict.fromkeys(axes or ("seq", "page"), "data"))


def test_a_mesh_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(
        ValueError, match="'seq' has 6 entries, which 4 shards of mesh axis 'data' do not divide"
    ):
        Cache.dense(make_spec(), num_sequences=6, capacity=4, sharding=make_sharding())


def test_sequences_move_within_a_shard_and_nowhere_else():
    sharding = make_sharding()
    cache = Cache.dense(make_spec(), num_sequences=8, capacity=2, sharding=sharding)
    cache = cache.replace(lengths=jax.device_put(jnp.arange(8, dtype=jnp.int32), sharding.named("seq")))
    rows = jnp.tile(jnp.array([1, 1], jnp.int32), 4)
    for move in (
        sequences.select,
        lambda cache, rows: sequences.fork(cache, rows, [rows[:, None]]),
        lambda cache, rows: sequences.copy_pages(cache, [rows], [rows]),
    ):
        with pytest.raises(ValueError, match=r"those of a shard, got a cache of 4 shards in a call of 1"):
            move(cache, rows)
    moved = sequences.select(cache, rows, sharding=sharding)
    np.testing.assert_array_equal(moved.lengths, [1, 1, 3, 3, 5, 5, 7, 7])


def test_pages_are_copied_in_the_stripe_that_they_are_named_for():
    sharding = make_sharding("context")
    with pytest.raises(ValueError, match="num_stripes must be the devices of the rule 'context', 4, got 1"):
        Cache.dense(make_spec(), num_sequences=1, capacity=2, sharding=sharding)
    spec = dataclasses.replace(make_spec(num_layers=1, page_size=2), num_stripes=4)
    cache = Cache.dense(spec, num_sequences=1, capacity=16, sharding=sharding)
    (pool,) = cache.pools
    ids = jax.device_put(jnp.arange(8, dtype=jnp.float32)[:, None, None, None], sharding.named("context"))
    pool = pool.replace(keys=jax.tree.map(lambda array: array + ids, pool.keys))
    # Two pages in each stripe, and a copy in the second and the last.
    sources, targets = jnp.array([-1, 0, -1, 1], jnp.int32), jnp.array([-1, 1, -1, 0], jnp.int32)
    copied = sequences.copy_pages(cache.replace(pools=(pool,)), [sources], [targets], sharding=sharding)
    assert copied.pools[0].keys.data[:, 0, 0, 0].tolist() == [0, 1, 2, 2, 4, 5, 7, 7]


def make_window(**options) -> Cache:
    spec = CacheSpec.create([CacheGroup(1, NUM_HEADS, HEAD_DIM, window=4)], page_size=2, max_chunk=3)
    return Cache.dense(spec, num_sequences=1, capacity=40, **options)


def advance(cache: Cache, count: int) -> Cache:
    return cache.begin(jnp.array([count], jnp.int32), time=3)[0]


def test_a_window_keeps_what_it_sees_and_one_step():
    (pool,) = make_window().pools
    assert pool.page_table.shape == (1, 4)
    assert pool.keys.data.shape[0] == 4


def test_a_step_longer_than_a_window_keeps_room_for_is_refused():
    with pytest.raises(ValueError, match=r"at most max_chunk = 3 tokens a sequence .* got 4"):
        make_window().begin(jnp.array([1], jnp.int32), time=4)


@pytest.mark.parametrize(("length", "left"), [(15, 15), (11, 11), (10, 10), (9, 15), (3, 15), (0, 0)])
def test_a_truncation_to_what_a_window_has_overwritten_is_refused(length: int, left: int):
    """Of 15 tokens the ring keeps 8, from position 7: a token at 10 sees 7 to 10."""
    cache = make_window()
    for _ in range(5):
        cache = advance(cache, 3)
    assert cache.truncate(jnp.array([length], jnp.int32)).lengths.tolist() == [left]


def test_what_was_overwritten_stays_lost_after_a_truncation():
    cache = make_window()
    for _ in range(5):
        cache = advance(cache, 3)
    cache = advance(cache.truncate(jnp.array([11], jnp.int32)), 1)
    assert cache.truncate(jnp.array([9], jnp.int32)).lengths.tolist() == [12]


@pytest.mark.parametrize(("length", "left"), [(21, 21), (16, 16), (9, 9), (8, 8), (7, 22), (1, 22), (0, 0)])
def test_a_truncation_into_a_run_whose_keys_are_encoded_is_refused(length: int, left: int):
    """Of 22 tokens the keys from position 6 are kept as given: the first whole run of 8 begins at 8."""
    spec = CacheSpec.create([CacheGroup(1, NUM_HEADS, 8, "int4")], page_size=8)
    cache, _ = Cache.dense(spec, num_sequences=1, capacity=80).begin(jnp.array([22], jnp.int32), time=22)
    assert cache.truncate(jnp.array([length], jnp.int32)).lengths.tolist() == [left]


def test_a_sequence_cut_to_nothing_starts_anew():
    spec = CacheSpec.create([CacheGroup(1, NUM_HEADS, 8, "int4")], page_size=8)
    cache, _ = Cache.dense(spec, num_sequences=1, capacity=80).begin(jnp.array([60], jnp.int32), time=60)
    cache, _ = cache.truncate(jnp.zeros(1, jnp.int32)).begin(jnp.array([14], jnp.int32), time=14)
    assert cache.truncate(jnp.array([11], jnp.int32)).lengths.tolist() == [11]


def test_a_run_that_was_encoded_stays_so_after_a_truncation():
    spec = CacheSpec.create([CacheGroup(1, NUM_HEADS, 8, "int4")], page_size=8)
    cache, _ = Cache.dense(spec, num_sequences=1, capacity=80).begin(jnp.array([22], jnp.int32), time=22)
    cache = cache.truncate(jnp.array([9], jnp.int32))
    assert cache.truncate(jnp.array([7], jnp.int32)).lengths.tolist() == [9]


@pytest.mark.parametrize(("lens", "dropped"), [(4, 4), (3, 0), (-2, 0)])
def test_more_tokens_than_the_step_is_wide_are_refused_whole(lens: int, dropped: int):
    cache = advance(make_window(), lens)
    assert (cache.lengths.tolist(), cache.num_dropped.tolist()) == ([max(lens, 0) - dropped], [dropped])


def test_calibrated_scales_are_asked_for_and_copied():
    spec = make_spec(num_layers=2, codec="int8_static")
    with pytest.raises(ValueError, match=r"scales of keys must have the shape \(2, 2\), got None"):
        Cache.dense(spec, num_sequences=1, capacity=4)
    scales = jnp.ones((2, NUM_HEADS))
    with pytest.raises(ValueError, match=r"must be left out where their codec is not static, got \(2, 2\)"):
        Cache.dense(make_spec(num_layers=2), num_sequences=1, capacity=4, scales=[(scales, None)])
    for wrong in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="scales of values must be finite and positive"):
            Cache.dense(spec, num_sequences=1, capacity=4, scales=[(scales, scales.at[1, 1].set(wrong))])
    cache = Cache.dense(spec, num_sequences=1, capacity=4, scales=[(scales, scales)])
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cache, scales))}
    assert len(pointers) == len(jax.tree.leaves((cache, scales)))


ONE = jnp.ones(1, jnp.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.begin(ONE, time=1), r"lens must have the shapes \[\(2,\)\], got \[\(1,\)\]"),
        (
            lambda cache: cache.begin(jnp.ones(2, jnp.int32), time=0),
            "time must be whole and at least 1, got 0",
        ),
        (lambda cache: cache.begin_ragged(ONE, num_tokens=1), "lens must have the shapes"),
        (lambda cache: cache.truncate(ONE), "lengths must have the shapes"),
        (lambda cache: sequences.clear(cache, ONE > 0), "is_cleared must have the shapes"),
        (lambda cache: sequences.select(cache, ONE), "rows must have the shapes"),
        (lambda cache: sequences.fork(cache, ONE, [ONE[None]]), "rows must have the shapes"),
        (lambda cache: sequences.copy_pages(cache, [], []), "copied in each group, got 0 for 1"),
        (lambda cache: sequences.copy_pages(cache, [ONE], [jnp.ones(2, jnp.int32)]), "targets must have"),
    ],
)
def test_what_has_not_one_entry_a_sequence_is_refused_and_not_broadcast(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(make_cache(rows=2))


def test_lists_in_the_place_of_arrays_are_refused():
    """Past the annotations, which the suite checks and users do not."""
    with pytest.raises(ValueError, match="rows must be arrays, got a list"):
        check_integers("rows", [[1, 0]], [(2,)])
    paged = inspect.unwrap(Cache.paged.__func__)
    with pytest.raises(ValueError, match="num_pages must be a list with one entry a group, got 3"):
        paged(Cache, make_spec(), num_sequences=2, capacity=8, num_pages=3)


def test_a_sequence_that_continues_no_row_is_empty():
    cache = held(make_cache(rows=3), 4)
    rows, pages = jnp.array([2, 3, -1], jnp.int32), [jnp.full((3, 1), -1, jnp.int32)]
    for moved in (sequences.select(cache, rows), sequences.fork(cache, rows, pages)):
        assert moved.lengths.tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": [0]}, r"one sequence, one token and one page, got 2, 8 and \(0,\)"),
        ({"num_pages": [3, 3]}, "one entry a group, got 2 for 1"),
        ({"capacity": 0}, "one sequence, one token and one page"),
    ],
)
def test_a_paged_cache_that_cannot_be_is_refused(sizes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Cache.paged(make_spec(), **{"num_sequences": 2, "capacity": 8, "num_pages": [3]} | sizes)


def test_a_paged_cache_takes_nothing_before_it_has_pages():
    cache = Cache.paged(make_spec(page_size=2), num_sequences=2, capacity=8, num_pages=[3])
    cache, _ = cache.begin(jnp.array([1, 1], jnp.int32), time=1)
    assert (cache.lengths.tolist(), cache.num_dropped.tolist()) == ([0, 0], [1, 1])
    with pytest.raises(ValueError, match=r"page tables must have the shapes \[\(2, 4\)\]"):
        cache.assign([jnp.zeros((2, 3), jnp.int32)])
