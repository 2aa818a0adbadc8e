"""Every layout over eight devices against one: attention through a history, and the bytes of each device."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS as ALL_CODECS
from jkv.cache.spec import CacheSpec
from jkv.canonical import from_canonical, to_canonical
from jkv.collectives import assert_collectives
from jkv.sharding import Sharding

from .compare import assert_close
from .layouts import CAPACITY, HEAD_DIM, NUM_HEADS, NUM_ROWS, WINDOW, Form, Layout, make_sharding, run_history
from .poison import poison

# Rule: mesh axis and devices, outermost first.
MESHES = {
    "heads 8": {"head": ("model", 8)},
    "sequences 8": {"seq": ("data", 8)},
    "stripes 8": {"context": ("stripe", 8)},
    "sequences 2, heads 4": {"seq": ("data", 2), "head": ("model", 4)},
    "sequences 4, heads 2": {"seq": ("data", 4), "head": ("model", 2)},
    "stripes 2, heads 4": {"context": ("stripe", 2), "head": ("model", 4)},
    "sequences 4, stripes 2": {"seq": ("data", 4), "context": ("stripe", 2)},
    "sequences 2, stripes 4": {"seq": ("data", 2), "context": ("stripe", 4)},
    "sequences 2, stripes 2, heads 2": {
        "seq": ("data", 2),
        "context": ("stripe", 2),
        "head": ("model", 2),
    },
}
HEADS, CODECS = (8, 2, 1, None), ("bf16", "int8", "int4")
FORMS = [
    Form(heads, codec, WINDOW if (i + j) % 2 else None)
    for (i, heads), (j, codec) in itertools.product(enumerate(HEADS), enumerate(CODECS))
]
# The other codecs, each once: scales follow their pages, and calibrated ones their heads.
OTHERS = [
    Form(HEADS[i % len(HEADS)], codec, WINDOW if i % 3 == 1 else None)
    for i, codec in enumerate(sorted(ALL_CODECS.keys() - set(CODECS)))
]


@functools.cache
def on_one_device(forms: tuple[Form, ...]) -> tuple[Layout, list[list[np.ndarray]], np.ndarray]:
    return run_history(forms, None, is_paged=False)


def check_bytes(layout: Layout) -> None:
    """Check that every device holds the bytes that are planned."""
    cache, rows = layout.cache, layout.shard_rows
    device = layout.spec.split_heads(layout.sharding.size("kv_head"))
    planned = (
        device.paged_bytes(rows, layout.num_pages) if layout.is_paged else device.dense_bytes(rows, CAPACITY)
    )
    assert allocated([pool.replace(page_table=None) for pool in cache.pools]) == {planned}
    counts = (cache.lengths, cache.peaks, cache.num_dropped)
    tables = [pool.page_table for pool in cache.pools]
    assert allocated((tables, counts)) == {device.table_bytes(rows, CAPACITY)}


def allocated(tree: Any) -> set[int]:
    """Return the bytes that each of the eight devices holds of a tree's arrays."""
    totals = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            totals[shard.device] += shard.data.nbytes
    return set(totals.values())


def check_against_one_device(forms: list[Form], index: int) -> None:
    """Check a history over a mesh, the bytes of each device, and that stripes alone send anything."""
    sharding = make_sharding(
        list(MESHES.values())[index], AxisType.Explicit if index // 2 % 2 else AxisType.Auto
    )
    # Of bfloat16 pages, plain JAX rounds probabilities as well, in each stripe by its own largest.
    if sharding.size("context") > 1:
        forms = [
            replace(form, implementation="reference") if form.codec == "bf16" else form for form in forms
        ]
    layout, outs, tokens = run_history(tuple(forms), sharding, is_paged=index % 2 == 1)
    check_bytes(layout)
    whole, expected, expected_tokens = on_one_device(tuple(forms))
    np.testing.assert_array_equal(layout.cache.lengths, whole.cache.lengths)
    np.testing.assert_array_equal(tokens, expected_tokens)
    for got, wanted in zip(outs, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert_close(one, other, 1e-5)
    for (time, _), program in layout.programs.items():
        # One largest log-sum-exp for each query head of a device, and one sum of it with a partial output.
        # Groups do not wait for each other: XLA puts theirs together.
        entries = layout.shard_rows * time * NUM_HEADS // sharding.size("q_head") * (1 + HEAD_DIM + 1)
        sent = {"all-reduce": (2, len(forms) * entries * 4)}
        assert_collectives(program, sent if layout.num_stripes > 1 else {})


@pytest.mark.parametrize("index", range(len(MESHES)), ids=MESHES)
def test_a_history_over_a_mesh_equals_that_of_one_device(index: int):
    """Any two of a mesh, heads and a codec meet."""
    forms = [FORMS[len(CODECS) * i + (index + i) % len(CODECS)] for i in range(len(HEADS))]
    check_against_one_device([*forms, OTHERS[index % len(OTHERS)]], index)


@pytest.mark.histories
@pytest.mark.parametrize("index", range(len(MESHES)), ids=MESHES)
def test_every_history_over_a_mesh_equals_that_of_one_device(index: int):
    check_against_one_device([*FORMS, *OTHERS], index)


@pytest.mark.histories
def test_bfloat16_pages_in_stripes_differ_by_the_rounding_of_probabilities():
    forms = tuple(form for form in FORMS if form.codec == "bf16")
    _, outs, _ = run_history(forms, make_sharding(MESHES["stripes 8"], AxisType.Auto), is_paged=True)
    for got, wanted in zip(outs, on_one_device(forms)[1], strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert_close(one, other, 2**-7)


@pytest.mark.parametrize("num_kv_heads", [4, None])
def test_an_explicit_mesh_takes_arrays_that_lie_whole(num_kv_heads: int | None):
    """As `jax.make_mesh` makes it, and as an automatic one does."""
    forms, outs = (Form(num_kv_heads, "f32"),), []
    rules = {"seq": ("data", 2), "context": ("stripe", 2), "head": ("model", 2)}
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        layout = Layout(forms, make_sharding(rules, axis_type), is_paged=False)
        layout.place = lambda array, *axes: jnp.asarray(array)
        outs.append([layout.step([12] * NUM_ROWS, 0), layout.step([1] * NUM_ROWS, 1)])
    jax.tree.map(np.testing.assert_array_equal, *outs)


def test_a_ragged_step_over_heads_and_stripes_is_that_of_one_device():
    """Chunks beside single tokens and idle rows, from pages that other stripes hold."""
    forms = (Form(2, "int4"), Form(None, "int8"))
    steps = [2 * [12, 1, 0, 9, 12, 3, 1, 7], 2 * [1, 12, 8, 0, 1, 1, 12, 1]]
    sharding = make_sharding(MESHES["stripes 2, heads 4"], AxisType.Explicit)
    split, whole = (Layout(forms, each, is_paged=False) for each in (sharding, None))
    for seed, lens in enumerate(steps):
        outs, expected = (layout.step(lens, seed, is_ragged=True) for layout in (split, whole))
        for got, wanted in zip(outs, expected, strict=True):
            assert_close(got[:, : sum(lens)], wanted[:, : sum(lens)], 1e-5)
    assert split.cache.lengths.tolist() == whole.cache.lengths.tolist() == np.sum(steps, axis=0).tolist()


def test_a_cache_over_a_mesh_reads_as_one():
    forms = (Form(2, "int4"), Form(None, "int8"))
    sharding = make_sharding(MESHES["sequences 2, stripes 2, heads 2"], AxisType.Auto)
    layout, whole = (Layout(forms, each, is_paged=False) for each in (sharding, None))
    check_bytes(layout)
    for each in (layout, whole):
        each.step(2 * [12, 7, 12, 1, 0, 12, 5, 9], 0)
    got, expected = to_canonical(layout.cache, sharding=sharding), to_canonical(whole.cache)
    for one, split in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(split, one)


def test_a_canonical_form_from_memory_is_written_to_an_explicit_mesh():
    sharding = make_sharding({"seq": ("data", 2), "head": ("model", 2)}, AxisType.Explicit)
    layout, whole = (Layout((Form(2, "f32"),), each, is_paged=False) for each in (sharding, None))
    whole.step(2 * [12, 7, 12, 1, 0, 12, 5, 9], 0)
    expected = jax.tree.map(np.asarray, to_canonical(whole.cache, 12))
    got = to_canonical(from_canonical(expected, layout.cache, sharding=sharding), 12, sharding=sharding)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(("num_stripes", "form"), [(2, Form(1, "f32")), (4, Form(None, "int8"))])
def test_an_append_at_any_length_over_stripes_is_that_of_one_device(num_stripes: int, form: Form):
    """Rows of 0 to 8 tokens, of 8 that they may hold, get one more."""
    canonical = []
    for sharding in (None, make_sharding({"context": ("stripe", num_stripes)}, AxisType.Auto)):
        stripes = sharding.size("context") if sharding else 1
        spec = CacheSpec.create([form.group(1)], page_size=1, num_stripes=stripes)
        cache = poison(Cache.dense(spec, num_sequences=9, capacity=8, sharding=sharding))
        heads = np.random.default_rng(0).standard_normal((2, 9, 8, 1, HEAD_DIM), np.float32)
        cache = _appended(cache, jnp.arange(9, dtype=jnp.int32), heads, sharding)
        cache = _appended(cache, jnp.ones(9, jnp.int32), heads[:, :, :1] + 1, sharding)
        assert cache.num_dropped.tolist() == [0] * 8 + [1]
        canonical.append(to_canonical(cache, sharding=sharding))
    for one, split in zip(*map(jax.tree.leaves, canonical), strict=True):
        np.testing.assert_array_equal(split, one)


def _appended(cache: Cache, lens: jax.Array, heads: np.ndarray, sharding: Sharding | None) -> Cache:
    @jax.jit
    def append(cache: Cache, lens: jax.Array, key: jax.Array, value: jax.Array) -> Cache:
        cache, batch = cache.begin(lens, time=key.shape[1])
        return ops.append(cache, (0, 1), batch, key, value, sharding=sharding)

    return append(cache, lens, *map(jnp.asarray, heads))
