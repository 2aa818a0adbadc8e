"""The GPU kernel of page writes, interpreted: bit for bit what is encoded and scattered, and with faults."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.codec import CODECS
from jkv.cache.encoding import encode
from jkv.targets import shapes_on
from kernels_pallas import page_write
from kernels_pallas.page_write import pallas_gpu
from kernels_pallas.paged_attention import Pages, PageSizes
from scripts.gpu_launches import OF_PALLAS, compile_and_list

from ..gpu_kernels import compile_write, interpret, make_write, write
from ..machines import find_target
from .faults import Fault, put_fault

NUM_LAYERS, NUM_PAGES, LAYER = 3, 4, 1
# Holes, two pages of a sequence, and the layer's last slot.
STEP = [[3, -1, 15, 32], [-1, 63, 16, -1]]
# Past the pool, beside a page of it.
PAST = [[NUM_LAYERS * NUM_PAGES * 16 + 1, 5]]
# More tokens than a block of 8 heads has.
CHUNK = [list(range(5, 24))]


def make_call(codec: str, num_heads: int, head_dim: int, slots: list[list[int]]) -> Any:
    """Return pools of any bits, and heads of which some are zero, large, small, or hold NaN."""
    random = np.random.default_rng(0)
    shape = NUM_LAYERS * NUM_PAGES, num_heads, 16
    entry = "number" if codec == "int8" else codec

    def make_pool() -> Pages:
        bits = random.integers(0, 256, (*shape, head_dim), np.uint8)
        scale = random.standard_normal(shape, np.float32)
        return Pages(
            jnp.asarray(bits.view(CODECS[codec].entry if codec == "int8" else "uint8")), scale, entry=entry
        )

    def make_heads() -> jax.Array:
        heads = random.standard_normal((len(slots), len(slots[0]), num_heads, head_dim), np.float32)
        heads[0, 0] *= 1e30
        heads[-1, -1] *= 1e-30
        heads[0, -1, 0] = 0
        heads[-1, 0, -1, 1] = np.nan
        return jnp.asarray(heads, jnp.bfloat16)

    pools, heads = (make_pool(), make_pool()), (make_heads(), make_heads())
    return pools, heads, jnp.array(slots, jnp.int32)


def write_into_layer(call: Any) -> list[tuple[jax.Array, jax.Array]]:
    # Traced anew: the kernel's source may have changed.
    own = jax.jit(lambda *given: write(*given))
    return interpret(own, *call, jnp.int32(LAYER * NUM_PAGES), num_kernels=1)


def assert_is_scattered(codec: str, call: Any, written: Any) -> None:
    pools, heads, slots = call
    for pages, own, found in zip(pools, heads, written, strict=True):
        stored = encode(CODECS[codec], own)
        place = {"page_offset": LAYER * NUM_PAGES, "page_size": pages.page_size}
        data = page_write.xla(pages.data, stored.data, slots, **place)
        scale = np.asarray(page_write.xla(jnp.asarray(pages.scale), stored.scale, slots, **place))
        np.testing.assert_array_equal(found[1], scale)
        # What a scale of NaN multiplies may be anything.
        is_number = ~np.isnan(scale)
        np.testing.assert_array_equal(np.asarray(found[0])[is_number], np.asarray(data)[is_number])


@pytest.mark.parametrize(
    ("codec", "num_heads", "head_dim", "slots"),
    [
        ("int8", 2, 128, STEP),
        ("int8", 8, 64, CHUNK),
        ("int8", 1, 80, STEP),
        ("fp8_e4m3", 2, 64, STEP),
        ("fp8_e4m3", 5, 96, CHUNK),
        ("fp8_e5m2", 1, 256, CHUNK),
        ("fp8_e5m2", 64, 128, STEP),
        ("int8", 2, 128, PAST),
        ("int8", 2, 128, [[-1]]),
    ],
)
def test_the_kernel_writes_bit_for_bit_what_is_encoded_and_scattered(
    codec: str, num_heads: int, head_dim: int, slots: list[list[int]]
):
    call = make_call(codec, num_heads, head_dim, slots)
    assert_is_scattered(codec, call, write_into_layer(call))


FAULTS: dict[str, Fault] = {
    name: (pallas_gpu, found, replacement)
    for name, (found, replacement) in {
        "heads that are not waited for": ("plgpu.barrier_wait(scratch.barrier)", "pass"),
        "entries that are not committed": ("    plgpu.commit_smem()", "    pass"),
        "a scale that is 2 % off": ("/ sizes.largest_entry", "/ (1.02 * sizes.largest_entry)"),
        "the scale of the next head": ("scratch.scale[first + head]", "scratch.scale[first + head + 1]"),
        "heads that are not rotated by a factor": (") * sizes.factor", ")"),
        "a zero head that is divided by its scale": ("jnp.where(scale == 0, 1.0, scale)", "scale"),
        "entries that are not rounded": ("else jnp.round(entries)", "else entries"),
        "a slot that is one off": ("data.at[page, :, within]", "data.at[page, :, within ^ 1]"),
        "another layer": ("page += offset_ref[0]", "page += 0"),
        "a hole that is written": ("(slot >= 0) & ", ""),
        "a page past the pool": (" & (page < refs.data.shape[0])", ""),
        "tokens past the last": ("jnp.where(token < sizes.num_tokens, slot, -1)", "slot + token * 0"),
        "the block before": (
            "first, form = block * sizes",
            "first, form = jnp.maximum(block - 1, 0) * sizes",
        ),
        "a pool that is left out": ("grid = len(pools),", "grid = 1,"),
    }.items()
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    put_fault(FAULTS[fault], monkeypatch)
    calls = [("int8", 2, STEP), ("int8", 5, CHUNK), ("int8", 2, PAST), ("fp8_e4m3", 2, STEP)]
    made = [(codec, make_call(codec, num_heads, 80, slots)) for codec, num_heads, slots in calls]
    # The interpreter itself finds what is out of bounds.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        [assert_is_scattered(codec, call, write_into_layer(call)) for codec, call in made]


@pytest.mark.parametrize(
    ("pages", "heads", "message"),
    [
        (
            {"data": jnp.bfloat16, "scale": None},
            {},
            "tokens, got entries of number in bfloat16 with no scale",
        ),
        ({"scale": (2,)}, {}, r"tokens, got entries of number in int8 with scales \(2,\)"),
        ({"rows": (8, 128)}, {}, r"layout 'plain', got pages in rows \(8, 128\)"),
        ({}, {"dtype": jnp.float32}, "heads in bfloat16, got float32"),
        ({"head_dim": 72}, {}, "multiple of 16 up to 256, got 72"),
        ({"head_dim": 512}, {}, "multiple of 16 up to 256, got 512"),
        ({"num_heads": 65}, {}, "at most 64 rows, got 66 for 65 heads of 64"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_its_sizes(pages: dict, heads: dict, message: str):
    sizes = {"num_heads": 2, "head_dim": 64} | pages
    num_heads, head_dim = sizes["num_heads"], sizes["head_dim"]
    data = jnp.zeros((4, num_heads, *sizes.get("rows", (16, head_dim))), sizes.get("data", jnp.int8))
    scale = sizes.get("scale", (4, num_heads, 16))
    stated = PageSizes(16, head_dim, scale and scale[2:])
    pool = Pages(data, None if scale is None else jnp.zeros(scale), stated=stated)
    given = jnp.zeros((1, 1, num_heads, head_dim), heads.get("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=f"page writes on GPUs cannot run: .*{message}; use 'xla'"):
        write((pool,) * 2, (given,) * 2, jnp.zeros((1, 1), jnp.int32), jnp.int32(0))


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_a_token_s_copy_begins_where_it_may(head_dim: int):
    """At multiples of 128 bytes of shared memory, which no interpreter sees."""
    for num_heads in range(1, 65):
        rows = pallas_gpu.rows_of_token(num_heads, head_dim)
        assert rows >= num_heads
        assert rows * head_dim % 128 == 0


@pytest.mark.gpu_aot
@pytest.mark.parametrize("tokens", [(64, 1), (1, 512)], ids=["decode", "chunk"])
@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        ("int8", (8, 128, 64)),
        ("int8", (8, 64, 16)),
        ("int8", (1, 80, 16)),
        ("int8", (4, 96, 128)),
        ("int8", (2, 192, 64)),
        ("fp8_e4m3", (8, 128, 16)),
        ("fp8_e4m3", (64, 128, 64)),
        ("fp8_e5m2", (1, 256, 32)),
    ],
)
def test_the_kernel_is_the_only_one_of_a_write_in_place(
    codec: str, sizes: tuple[int, int, int], tokens: tuple[int, int], tmp_path: Path
):
    mesh = find_target("h200")
    (report,) = compile_write(mesh, codec, sizes, tokens, tmp_path).values()
    print(report[:3])
    assert report.spilled_bytes == 0
    # A block that ends earlier gives away what copies are still to read; no interpreter sees it.
    assert "cp.async.bulk.wait_group \t0" in report.assembly
    assert report.shared_bytes <= 227 * 1024
    arguments = jax.eval_shape(functools.partial(make_write, codec, sizes, tokens))
    lowered = jax.jit(write, donate_argnums=0).lower(*shapes_on(mesh, arguments))
    program, kernels = compile_and_list(lowered)
    # Others fill rows up to whole blocks; a model's are those that make the heads.
    assert [name for name, _ in kernels if not re.match("loop_pad_fusion", name)] == [OF_PALLAS]
    memory: Any = program.memory_analysis()
    pools = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[0]))
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < 2**22
