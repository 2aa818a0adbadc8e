"""The arithmetic of cache sizes."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS, ArraySpec, PoolLayout, choose_layout
from jkv.cache.spec import CacheGroup, CacheSpec


def make_group(**sizes) -> CacheGroup:
    return CacheGroup(**{"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, **sizes})


def make_spec(page_size: int = 16, layout: str = "plain", **sizes) -> CacheSpec:
    return CacheSpec.create([make_group(**sizes)], page_size=page_size, layout=layout)


def make_latent(page_size: int = 16, layout: str = "plain", **options) -> CacheSpec:
    latent = {"num_kv_heads": 1, "head_dim": 512, "kind": "latent", "rope_dim": 64}
    return make_spec(page_size, layout, **(latent | options))


def allocated(cache: Cache, *names: str) -> int:
    leaves = jax.tree.leaves([getattr(pool, name) for pool in cache.pools for name in names])
    arrays = [ArraySpec(leaf.shape, leaf.dtype.name) for leaf in leaves]
    return sum(array.padded_bytes(cache.spec.layout) for array in arrays)


def test_dense_bytes_are_two_b_s_l_h_d_p():
    spec = make_spec(codec="bf16", num_layers=80, num_kv_heads=8, head_dim=128)
    assert spec.dense_bytes(32, 8192) == 2 * 32 * 8192 * 80 * 8 * 128 * 2 == 80 * 2**30


@pytest.mark.parametrize("layout", ["plain", "tpu", "gpu"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_planned_is_what_gets_allocated(codec: str, window: int | None, layout: PoolLayout):
    groups = [make_group(codec=codec), make_group(value_codec=codec, window=window)]
    spec = CacheSpec.create(groups, page_size=16, max_chunk=8, layout=layout)
    scales = [
        tuple(jnp.ones((3, 2)) if one.scaling == "static" else None for one in group.codecs)
        for group in groups
    ]
    dense = functools.partial(Cache.dense, spec, num_sequences=5, capacity=70, scales=scales)
    paged = functools.partial(
        Cache.paged, spec, num_sequences=5, capacity=70, num_pages=(7, 3), scales=scales
    )
    for make, planned in ((dense, spec.dense_bytes(5, 70)), (paged, spec.paged_bytes(5, (7, 3)))):
        cache = jax.eval_shape(make)
        assert allocated(cache, "keys", "values", "key_scale", "value_scale", "recent") == planned
        counts = 4 * sum(count.size for count in (cache.lengths, cache.peaks, cache.num_dropped))
        assert 4 * sum(pool.page_table.size for pool in cache.pools) + counts == spec.table_bytes(5, 70)


def test_a_latent_costs_its_entries_and_the_rotated_ones():
    assert make_latent(codec="bf16").bytes_per_token == 3 * (512 + 64) * 2
    assert make_latent(codec="f32").bytes_per_token == 3 * (512 + 64) * 4
    # A token's scale is one float32; the rotated part stays as it is.
    assert make_latent(codec="int8").bytes_per_token == 3 * (512 + 4 + 64 * 2)
    assert make_latent(codec="int8", rope_codec="int8").bytes_per_token == 3 * (512 + 64 + 2 * 4)


@pytest.mark.parametrize(
    ("shape", "dtype", "padded"),
    [
        ((6, 2, 16, 64), "bfloat16", (6, 2, 16, 128)),
        ((6, 2, 20, 128), "bfloat16", (6, 2, 24, 128)),
        ((6, 2, 3, 130), "float32", (6, 2, 4, 256)),
        ((6, 2, 1, 128), "int8", (6, 2, 4, 128)),
        ((6, 1, 16), "float32", (6, 1, 128)),
    ],
)
def test_a_tpu_pads_the_two_minor_dimensions(shape: tuple, dtype: str, padded: tuple):
    array = ArraySpec(shape, dtype)
    assert array.padded_bytes("tpu") == ArraySpec(padded, dtype).nbytes
    assert array.padded_bytes("plain") == array.padded_bytes("gpu") == array.nbytes


def test_padding_counts_against_a_budget():
    spec = make_spec(layout="tpu", codec="bf16", head_dim=96)
    assert 3 * spec.padded_bytes_per_page == 4 * spec.bytes_per_page
    assert 3 * spec.padded_bytes_per_token == 4 * spec.bytes_per_token
    assert spec.tokens_in(spec.padded_bytes_per_page) == 16
    assert 3 * spec.dense_bytes(5, 64) == 4 * make_spec(codec="bf16", head_dim=96).dense_bytes(5, 64)


@pytest.mark.parametrize(
    ("codec", "head_dim", "page_size", "shapes"),
    [
        ("bf16", 64, 16, [(8, 128)]),
        ("bf16", 80, 16, [(16, 128)]),
        ("f32", 192, 16, [(32, 128)]),
        ("int8", 128, 64, [(64, 128), (1, 128)]),
        ("int8", 128, 256, [(256, 128), (2, 128)]),
        ("int4", 128, 64, [(32, 128), (2, 128), (2, 128)]),
        # Rows are whole tiles of a TPU: 8, or as many as fill a word.
        ("int4_token", 80, 40, [(24, 128), (2, 128), (2, 128)]),
        ("int4_token", 64, 16, [(4, 128), (2, 128), (2, 128)]),
    ],
)
def test_slots_share_rows_of_128_lanes_or_take_whole_ones(
    codec: str, head_dim: int, page_size: int, shapes: list[tuple[int, int]]
):
    keys, _ = make_group(codec=codec, head_dim=head_dim).page_arrays(7, page_size, "tpu")
    assert [array.shape for array in keys.values()] == [(3 * 7, 2, *shape) for shape in shapes]


def test_a_device_holds_its_share_of_the_heads_and_a_whole_latent():
    whole = make_spec(num_kv_heads=8, codec="int8")
    assert 4 * whole.split_heads(4).dense_bytes(5, 64) == whole.dense_bytes(5, 64)
    assert make_latent().split_heads(4) == make_latent()
    with pytest.raises(ValueError, match="split evenly over devices, got 8 over 16"):
        whole.split_heads(16)


def test_a_part_of_a_page_costs_a_whole_one():
    spec = make_spec(page_size=16)
    assert spec.dense_bytes(1, 17) == spec.dense_bytes(1, 32) == 2 * spec.bytes_per_page
    assert [spec.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_budget_holds_whole_pages():
    spec = make_spec(page_size=16)
    assert spec.tokens_in(3 * spec.bytes_per_page - 1) == 32
    assert spec.tokens_in(spec.bytes_per_page - 1) == 0


def test_groups_add_up():
    wide, narrow = CacheGroup(1, 4, 16), CacheGroup(2, 1, 8, "bf16")
    spec = CacheSpec.create([wide, narrow], page_size=4)
    assert spec.bytes_per_token == 2 * (4 * 16 * 4 + 2 * 8 * 2)
    assert wide.page_arrays(10, page_size=4)[0]["data"].shape == (10, 4, 4, 16)
    assert narrow.page_arrays(10, page_size=4)[1]["data"].shape == (20, 1, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, r"must be whole and positive, got \(0, 2, 8\)"),
        ({"head_dim": -8}, r"must be whole and positive, got \(3, 2, -8\)"),
        ({"page_size": 0}, "at least 1 token, got 0"),
        ({"codec": "int4", "page_size": 12}, "got 12 and 8; change page_size, or use int4_token"),
        ({"codec": "int4", "head_dim": 20, "page_size": 64}, "got 64 and 20; use int4_token"),
        ({"codec": "int4", "head_dim": 7}, "even for int4, two entries a byte, got 7"),
        ({"layout": "gpu", "page_size": 24}, "8, 16, 32 or a multiple of 64 in the layout 'gpu', got 24"),
        ({"kind": "latent", "rope_dim": 4}, "must have 1 KV head, .* got 2, 4 and None"),
        ({"rope_dim": 64}, "belong to a latent group, got 64 and None"),
    ],
)
def test_sizes_that_make_no_cache_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_spec(**options)


def test_unknown_names_and_parts_of_sizes_are_refused():
    # In a process of its own: here jaxtyping's hook refuses them first.
    code = (
        "from jkv.cache.spec import CacheGroup, CacheSpec\n"
        "kind, window = {'kind': 'mla'}, {'window': 1.5}\n"
        "for group, spec in ((kind, {}), ({}, {'layout': 'npu'}), (window, {}), ({}, {'page_size': 8.0})):\n"
        "    try: CacheSpec.create([CacheGroup(1, 1, 8, **group)], **{'page_size': 8, **spec})\n"
        "    except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "a group's kind must be one of ('gqa', 'latent'), got 'mla'",
        "a pool's layout must be one of ('plain', 'tpu', 'gpu'), got 'npu'",
        "window must be whole and at least 1 token, got 1.5",
        "page_size and max_chunk must be whole and at least 1 token, got 8.0 and 256",
    ]


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda spec: spec.tokens_in(-1), "budget_bytes must be whole and at least 0, got -1"),
        (lambda spec: spec.bytes_for(-1), "num_tokens must be whole and at least 0, got -1"),
        (lambda spec: spec.dense_bytes(-1, 8), "num_sequences must be whole and at least 0, got -1"),
        (lambda spec: spec.paged_bytes(1, [-3]), "num_pages must be whole and at least 0, got -3"),
        (lambda spec: spec.paged_bytes(1, [3, 4]), "one entry a group, got 2 for 1"),
        (lambda spec: spec.split_heads(0), "must split evenly over devices, got 2 over 0"),
    ],
)
def test_what_is_no_count_has_no_bytes(count, message: str):
    with pytest.raises(ValueError, match=message):
        count(make_spec())


def test_a_cache_without_groups_is_refused():
    with pytest.raises(ValueError, match="at least one group"):
        CacheSpec.create([], page_size=4)


def test_auto_is_the_layout_of_the_device():
    chosen = [choose_layout("auto", platform) for platform in ("tpu", "gpu", "cpu")]
    assert chosen == ["tpu", "plain", "plain"]
    assert choose_layout("tpu", "cpu") == "tpu"
