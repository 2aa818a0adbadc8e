"""The GPU kernel of page writes, interpreted: what it writes is what is encoded and scattered; with faults.

Sums of these numbers are exact, so entries and scales are equal bit for bit. On a GPU shares are rounded
otherwise.
"""

import functools
import re
from pathlib import Path
from typing import Any, cast

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
from .faults import put_fault

NUM_LAYERS, NUM_PAGES, LAYER = 3, 4, 1
# Holes, two pages of a sequence, and the layer's last slot.
STEP = [[3, -1, 15, 32], [-1, 63, 16, -1]]
# The first slot past the pool, and its last page's.
PAST = [[(NUM_LAYERS - LAYER) * NUM_PAGES * 16, (NUM_LAYERS - LAYER) * NUM_PAGES * 16 - 2, 5]]
# More tokens than a block of 8 heads has, and of one.
CHUNK, LONG_CHUNK = [list(range(5, 24))], [list(range(70))]


def make_call(
    codecs: tuple[str, str],
    dims: tuple[int, int],
    slots: list[list[int]],
    num_heads: int = 2,
    page_size: int = 16,
    num_pages: int = NUM_PAGES,
) -> Any:
    """Return pools of any bits, and heads of which some are zero, large, small, or hold NaN."""
    random = np.random.default_rng(0)
    shape = NUM_LAYERS * num_pages, num_heads, page_size

    def make_pool(codec: str, head_dim: int) -> Pages:
        bits = random.integers(0, 256, (*shape, head_dim), np.uint8)
        is_int8 = codec == "int8"
        data = jnp.asarray(bits.view("int8" if is_int8 else "uint8"))
        scale = random.standard_normal(shape, np.float32)
        return Pages(data, scale, entry="number" if is_int8 else cast(Any, codec))

    def make_heads(head_dim: int) -> jax.Array:
        heads = random.standard_normal((len(slots), len(slots[0]), num_heads, head_dim), np.float32)
        heads[0, 0] *= 1e30
        heads[-1, -1] *= 1e-30
        heads[0, -1, 0] = 0
        heads[-1, 0, -1, 1] = np.nan
        return jnp.asarray(heads, jnp.bfloat16)

    pools, heads = tuple(map(make_pool, codecs, dims)), tuple(map(make_heads, dims))
    return pools, heads, jnp.array(slots, jnp.int32), jnp.int32(LAYER * num_pages)


def assert_is_scattered(codecs: tuple[str, str], call: Any) -> None:
    """Write by the kernel, and compare with what is encoded and scattered."""
    pools, heads, slots, page_offset = call
    # Traced anew: the kernel's source may have changed.
    written = interpret(jax.jit(lambda *given: write(*given)), *call, num_kernels=1)
    for codec, pages, own, found in zip(codecs, pools, heads, written, strict=True):
        stored = encode(CODECS[codec], own)
        place = {"page_offset": page_offset, "page_size": pages.page_size}
        data = page_write.xla(pages.data, stored.data, slots, **place)
        scale = np.asarray(page_write.xla(jnp.asarray(pages.scale), stored.scale, slots, **place))
        # A CPU's maximum of NaN may be any number that is none, and what it multiplies anything.
        is_number = np.isfinite(scale)
        np.testing.assert_array_equal(np.isfinite(found[1]), is_number)
        np.testing.assert_array_equal(np.asarray(found[1])[is_number], scale[is_number])
        np.testing.assert_array_equal(np.asarray(found[0])[is_number], np.asarray(data)[is_number])


INT8, FP8, MIXED = ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "int8")


@pytest.mark.parametrize(
    ("codecs", "dims", "slots", "sizes"),
    [
        (INT8, (128, 128), STEP, {"page_size": 32}),
        (INT8, (64, 64), CHUNK, {"num_heads": 8}),
        (INT8, (128, 128), LONG_CHUNK, {"num_heads": 1, "page_size": 32}),
        (FP8, (64, 64), STEP, {}),
        (FP8, (96, 96), CHUNK, {"num_heads": 5}),
        (MIXED, (256, 80), CHUNK, {"num_heads": 1}),
        (MIXED, (32, 128), STEP, {"num_heads": 64}),
        (INT8, (128, 128), PAST, {}),
        (INT8, (128, 128), [[-1]], {}),
        (INT8, (16, 16), [[33000, 67000]], {"num_heads": 1, "num_pages": 4200}),
    ],
)
def test_the_kernel_writes_what_is_encoded_and_scattered(
    codecs: tuple[str, str], dims: tuple[int, int], slots: list[list[int]], sizes: dict[str, int]
):
    assert_is_scattered(codecs, make_call(codecs, dims, slots, **sizes))


def test_writes_that_are_mapped_are_made_one_after_another():
    call = make_call(INT8, (64, 64), STEP)
    several = jax.tree.map(lambda array: jnp.stack([array, -array]), call[1])
    mapped = jax.vmap(write, in_axes=(None, 0, None, None))
    found = interpret(jax.jit(mapped), call[0], several, *call[2:])
    second = jax.tree.map(lambda array: array[1], several)
    alone = interpret(jax.jit(write), call[0], second, *call[2:], num_kernels=1)
    jax.tree.map(lambda left, right: np.testing.assert_array_equal(left[1], right), found, alone)


FAULTS = {
    "heads that are not waited for": ("plgpu.barrier_wait(scratch.barrier)", "pass"),
    "entries that are not committed": ("    plgpu.commit_smem()", "    pass"),
    "a scale that is 2 % off": ("/ sizes.largest_entry", "/ (1.02 * sizes.largest_entry)"),
    "the scale of the next head": ("scratch.scale[first + head]", "scratch.scale[first + head + 1]"),
    "heads that are not rotated by a factor": (") * sizes.factor", ")"),
    "a zero head that is divided by its scale": ("jnp.where(scale == 0, 1.0, scale)", "scale"),
    "entries that are not rounded": ("else jnp.round(entries)", "else entries"),
    "a slot that is one off": ("data.at[page, :, within]", "data.at[page, :, within ^ 1]"),
    "another layer": ("page += page_offset", "page += 0"),
    "a hole that is written": ("(slot >= 0) & ", ""),
    "the page past the pool": ("page < refs.data.shape[0]", "page <= refs.data.shape[0]"),
    "no last page": ("page < refs.data.shape[0]", "page < refs.data.shape[0] - 1"),
    "slots of 15 bits": ("divide(jnp.maximum(slot, 0),", "divide(jnp.clip(slot, 0, 2**15 - 1),"),
    "pages of 16": ("(slot, 0), sizes.page_size)", "(slot, 0), 16)"),
    "the sizes of another pool": ("_write_block(index, each,", "_write_block(index, sizes[0],"),
    "as many blocks as another pool has": ("max(each.num_blocks for each in sizes)", "sizes[0].num_blocks"),
    "no last tokens of a block": (
        "sizes.block_tokens // at_once,",
        "max(1, sizes.block_tokens // at_once - 1),",
    ),
    "tokens past the last": ("jnp.where(token < sizes.num_tokens, slot, -1)", "slot + token * 0"),
    "the block before": ("first, form = block *", "first, form = jnp.maximum(block - 1, 0) *"),
    "a pool that is left out": ("grid = len(sizes),", "grid = 1,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    put_fault((pallas_gpu, *FAULTS[fault]), monkeypatch)
    calls = [
        (("fp8_e4m3", "fp8_e5m2"), (80, 80), STEP, {}),
        (MIXED, (128, 16), CHUNK, {"num_heads": 5, "page_size": 32}),
        (INT8, (16, 16), LONG_CHUNK, {"num_heads": 1, "page_size": 32}),
        (INT8, (128, 128), LONG_CHUNK, {"num_heads": 1, "page_size": 32}),
        (INT8, (80, 80), PAST, {}),
        (INT8, (16, 16), [[33000, 67000]], {"num_heads": 1, "num_pages": 4200}),
    ]
    # The interpreter itself finds what is out of bounds.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        [assert_is_scattered(codecs, make_call(codecs, *given, **sizes)) for codecs, *given, sizes in calls]


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
        ({}, {"dtype": jnp.float16}, "heads in bfloat16, got float16"),
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
