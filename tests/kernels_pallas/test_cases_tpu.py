"""Ways in which caches have gone wrong elsewhere, each a case (B..), through the TPU kernels, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec

from ..compare import assert_close
from ..poison import poison
from .tpu_kernels import has_races, interpreted

pytestmark = pytest.mark.gate

PAGE_SIZE, HEADS = 16, CacheGroup(2, 2, 128)
LATENTS = CacheGroup(1, 1, 128, kind="latent", rope_dim=64)


def random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(jax.random.key(0), len(shapes)), shapes, strict=True)
    ]


def make_heads(rows: int, time: int) -> list[jax.Array]:
    return random(*((rows, time, count, HEADS.head_dim) for count in (4, 2, 2)))


def make_cache(group: CacheGroup, table: np.ndarray, num_pages: int, dead: float = np.nan) -> Cache:
    spec = CacheSpec.create([group], page_size=PAGE_SIZE, layout="tpu")
    rows, width = table.shape
    cache = Cache.paged(spec, num_sequences=rows, capacity=width * PAGE_SIZE, num_pages=[num_pages])
    return poison(cache, dead).assign([jnp.asarray(table, jnp.int32)])


@jax.jit
def step(cache: Cache, lens: jax.Array, heads: list[jax.Array]) -> tuple[jax.Array, Cache]:
    cache, batch = cache.begin(lens, time=heads[0].shape[1])
    attend = ops.attend if len(heads) == 3 else ops.attend_latent
    out, cache, _ = attend(*heads, cache, (0, 0), batch, scale=0.1, implementation="pallas_tpu")
    return out, cache


def run(cache: Cache, lens: list[int], heads: list[jax.Array]) -> tuple[np.ndarray, Cache]:
    """Run a step in the interpreter."""
    out, cache = interpreted(lambda: step(cache, jnp.array(lens, jnp.int32), heads))
    assert not has_races()
    return np.asarray(out), cache


@pytest.mark.parametrize("page", [4, 99, -1])
def test_a_page_id_outside_the_layer_writes_and_reads_nothing(page: int):
    """B15: page 4 of the first of two layers is page 0 of the second."""
    cache = make_cache(HEADS, np.arange(4)[None], 4)
    (pool,) = cache.pools
    cache = cache.replace(pools=(pool.replace(page_table=jnp.full_like(pool.page_table, page)),))
    out, after = run(cache, [3], make_heads(1, 3))
    assert not out.any()
    for array in jax.tree.leaves((after.pools[0].keys, after.pools[0].values)):
        assert np.isnan(array).all()


@pytest.mark.parametrize("width", [3, 4, 5])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "fixed_stride"])
def test_rows_of_a_batch_read_their_own_pages_alone(width: int, is_packed: bool):
    """B17: what a table names past a row's end, here a page of NaN, changes no bit."""
    lengths, needed = np.array([1, 33, 16]), (1, 3, 2)
    starts = np.cumsum((0, *needed[:-1])) if is_packed else np.arange(3) * width
    heads = make_heads(3, 34)
    first, second = ([x[:, :33] for x in heads], [x[np.arange(3), lengths][:, None] for x in heads])
    results = []
    for past in (-1, 15):
        table = np.full((3, width), past)
        for row, (start, count) in enumerate(zip(starts, needed, strict=True)):
            table[row, :count] = start + np.arange(count)
        prefilled, cache = run(make_cache(HEADS, table, 16), lengths.tolist(), first)
        stepped, _ = run(cache, [1, 1, 1], second)
        results.append((prefilled, stepped))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    expected = np.asarray(ops.attend(*heads, scale=0.1).out)
    for row, length in enumerate(lengths):
        assert_close(results[0][0][row, :length], expected[row, :length])
        assert_close(results[0][1][row, 0], expected[row, length])


def test_latents_do_not_depend_on_how_a_prompt_is_cut():
    """B29: a prompt of 37 tokens whole, and in chunks of 16, 5 and 1; the first has no past."""
    heads = random((1, 37, 4, 128), (1, 37, 4, 64), (1, 37, 128), (1, 37, 64))
    whole = None
    for width in (37, 16, 5, 1):
        cache, out = make_cache(LATENTS, np.arange(3)[None], 3), np.zeros(())
        for start in range(0, 37, width):
            chunk = [x[:, start : start + width] for x in heads]
            count = chunk[0].shape[1]
            padded = [
                jnp.pad(x, [(0, width - count) if axis == 1 else (0, 0) for axis in range(x.ndim)])
                for x in chunk
            ]
            out, cache = run(cache, [count], padded)
            out = out[:, count - 1]
        whole = out if whole is None else whole
        assert_close(out, whole, 1e-4)


def test_idle_and_empty_rows_touch_no_live_one():
    """B59: what no row owns is NaN, as is what its page holds past its end."""
    table, heads = np.array([[0, 1], [2, -1], [3, 0], [5, 5], [-1, -1]]), make_heads(5, 20)
    outs = []
    for dead in (0.0, np.nan):
        _, cache = run(make_cache(HEADS, table, 6, dead), [20, 2, 4, 1, 0], heads)
        out, _ = run(cache, [1, 0, 0, 0, 0], [x[:, :1] for x in heads])
        outs.append(out)
    np.testing.assert_array_equal(outs[0], outs[1])
    assert outs[1][0].any()
    assert not outs[1][1:].any()
