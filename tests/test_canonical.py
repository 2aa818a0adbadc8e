"""A cache as plain arrays, and another layout made from them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.canonical import from_canonical, to_canonical

from .compare import assert_close
from .histories import LAYER, Form, History
from .poison import poison

LAYOUTS, CODECS = ("dense", "paged", "window"), ("f32", "bf16", "int8", "int4", "fp8_e4m3")
# Each form is several programs: `make test` takes each codec in one layout and runs of slots in all of them.
SHORT = {("dense", "f32"), ("paged", "bf16"), ("dense", "int8"), ("window", "fp8_e4m3")}
SHORT |= {(layout, "int4") for layout in LAYOUTS}
STORED = [
    pytest.param(*form, marks=() if form in SHORT else pytest.mark.gate)
    for form in itertools.product(LAYOUTS, CODECS)
]


def make_history(layout: str, codec: str, **options) -> History:
    history = History(Form(layout, codec, **({"head_dim": 16} | options)))
    history.append([8, 5, 2], 8)
    history.append([1, 1, 1])
    return history


def held(history: History, row: int) -> np.ndarray:
    """Return the keys, whole runs as they are encoded, and the values that a row's model has."""
    keys, values = history.heads[row]
    return np.stack([history.runs(keys)[1], values])


@pytest.mark.parametrize(("layout", "codec"), STORED)
def test_the_canonical_form_is_what_was_stored(layout: str, codec: str):
    history = make_history(layout, codec)
    canonical = to_canonical(history.cache)
    assert canonical.lengths.tolist() == [9, 6, 3]
    for row, length in enumerate(canonical.lengths.tolist()):
        keys, values = (np.asarray(arrays[0][LAYER][row]) for arrays in (canonical.keys, canonical.values))
        assert_close(keys[:length], held(history, row)[0])
        assert_close(values[:length], held(history, row)[1])
        assert (keys[length:] == 0).all()


def test_a_form_of_other_layers_or_rows_is_refused():
    one = CacheSpec.create([CacheGroup(1, 2, 4)], page_size=4)
    two = CacheSpec.create([CacheGroup(2, 2, 4)], page_size=4)
    canonical = to_canonical(Cache.dense(one, num_sequences=2, capacity=4))
    with pytest.raises(
        ValueError, match=r"keys must be of as many layers a group as the cache's, \[2\], got"
    ):
        from_canonical(canonical, Cache.dense(two, num_sequences=2, capacity=4))
    with pytest.raises(ValueError, match="lens must have the shapes"):
        from_canonical(canonical, Cache.dense(one, num_sequences=3, capacity=4))
    with pytest.raises(ValueError, match="num_tokens must be whole and at least 1, got 0"):
        to_canonical(Cache.dense(one, num_sequences=2, capacity=4), 0)


def test_a_window_gives_what_it_still_keeps():
    history = History(Form("window", head_dim=16))
    for _ in range(5):
        history.append([8, 8, 1], 8)
    canonical = to_canonical(history.cache)
    keys = np.asarray(canonical.keys[0][LAYER][0])
    num_kept = history.width * history.form.page_size
    assert (keys[: 40 - num_kept] == 0).all()
    assert_close(keys[40 - num_kept : 40], history.heads[0][0][40 - num_kept :])


@pytest.mark.parametrize("kind", ["gqa", "latent"])
def test_another_layout_and_codec_goes_on_from_it(kind: str):
    """Rows that int8 has stored are stored again in float32, in pages of another size."""
    options = {"head_dim": 16, "heads": (4, 2 if kind == "gqa" else 1), "kind": kind}
    history = make_history("paged", "int8/int8", **options)
    other = History(Form("dense", "f32", page_size=16, **options))
    other.cache = from_canonical(to_canonical(history.cache, num_tokens=16), other.cache)
    other.heads = history.heads
    other.check_lengths()
    for got, expected in (other.append([3, 1, 2], 16), other.append([1, 1, 1])):
        assert_close(got, expected)


def test_what_does_not_fit_is_refused_and_counted():
    canonical = to_canonical(make_history("dense", "f32").cache)
    small = Cache.dense(Form("dense", head_dim=16).spec, num_sequences=3, capacity=8)
    after = from_canonical(canonical, poison(small))
    assert after.lengths.tolist() == [0, 6, 3]
    assert after.num_dropped.tolist() == [9, 0, 0]
    assert all(
        np.isnan(leaf[0]).all() for leaf in jax.tree.leaves((after.pools[0].keys, after.pools[0].values))
    )
    assert jnp.isfinite(after.pools[0].keys.data[3 * LAYER + 1, 0, 0]).all()
