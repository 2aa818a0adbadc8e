"""What the GPU kernel of paged attention takes, and what the compiler makes of it for a GPU not here."""

import functools
from pathlib import Path

import jax.numpy as jnp
import pytest

from jkv.in_place import assert_updates_in_place
from jkv.targets import shapes_on
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes, pallas_gpu
from kernels_pallas.paged_attention.shapes import Shape

from ..gpu_kernels import compile_large, compile_paged
from ..loops import LARGE, LAYOUTS, SMALL, loop
from ..loops import make_arguments as make_loop_arguments
from ..machines import find_target
from .test_paged_attention import make_options
from .test_paged_attention_gpu import encode


def make_pool(
    head_dim: int = 64, page_size: int = 16, dtype=jnp.bfloat16, has_scales: bool = False
) -> PagedArguments:
    rows = jnp.zeros(1, jnp.int32)
    pages = Pages(jnp.zeros((2, 1, page_size, head_dim), dtype), jnp.ones(1) if has_scales else None)
    query = jnp.zeros((1, 1, 1, head_dim))
    return PagedArguments(query, pages, pages, jnp.zeros((1, 2), jnp.int32), rows, rows, page_offset=0)


def make_pool_in_rows_of_128() -> PagedArguments:
    pages = Pages(jnp.zeros((2, 1, 8, 128), jnp.bfloat16), stated=PageSizes(16, 64))
    return make_pool()._replace(keys=pages, values=pages)


def make_int4_pool(head_dim: int) -> PagedArguments:
    pages = encode(Pages(jnp.zeros((2, 1, 16, head_dim))), "int4", "channels")
    return make_pool(head_dim)._replace(keys=pages, values=pages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            make_pool(head_dim=72),
            "takes heads of one of 64, 80, 96, 128, 192, 256 entries, got 72; use 'xla'",
        ),
        (make_pool(page_size=4), "takes pages of 8, 16, 32 or a multiple of 64 tokens, got 4; use 'xla'"),
        (make_pool(page_size=96), "takes pages of 8, 16, 32 or a multiple of 64 tokens, got 96; use 'xla'"),
        (
            make_pool(256, 8, jnp.int8, has_scales=True),
            "heads of 256 in 4 or 8 bits in pages of 16 tokens or more, got 8",
        ),
        (make_pool(dtype=jnp.float32), "takes bfloat16 and float16 .* of number in float32 with no scale"),
        (make_pool_in_rows_of_128(), "takes pools of layout 'plain', got pages of 16 slots in rows .*8, 128"),
        (
            make_pool()._replace(
                query=jnp.zeros((1056, 16, 2, 64)),
                page_table=jnp.zeros((1056, 8192), jnp.int32),
                starts=jnp.zeros(1056, jnp.int32),
                lens=jnp.zeros(1056, jnp.int32),
            ),
            "at most 1073741824 bytes, got 1115947008 of 1056 sequences, or pieces of them, in 129 splits",
        ),
        (
            make_pool(dtype=jnp.int8),
            "those of tokens or heads, .* got entries of number in int8 with no",
        ),
        (
            make_int4_pool(80),
            "int4 in heads of a multiple of 64 .*, got entries of int4 in uint8 with scales",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(arguments: PagedArguments, message: str):
    with pytest.raises(ValueError, match=message):
        pallas_gpu.paged_attention(arguments, num_pages=2, scale=1.0)


AOT_CASES = [
    # machine, codec, head_dim, page_size, time, query heads of a KV head, window, soft cap
    ("h200", "bf16", 128, 64, 1, 4, None, None),
    ("h200", "bf16", 128, 128, 16, 8, 1024, 30.0),
    ("h200", "bf16", 64, 16, 16, 8, 128, 30.0),
    ("h200", "bf16", 192, 64, 4, 8, 1024, None),
    ("h200", "bf16", 256, 16, 16, 4, 1024, 50.0),
    ("h200", "bf16", 80, 16, 16, 8, None, None),
    ("h200", "int8", 128, 64, 1, 4, None, None),
    ("h200", "int8", 64, 16, 16, 8, 128, 30.0),
    ("h200", "fp8_e4m3", 128, 32, 16, 8, 1024, 30.0),
    ("h100", "fp8_e5m2", 64, 128, 4, 8, None, None),
    ("h200", "fp8_e4m3", 256, 16, 16, 8, 1024, 50.0),
    ("h200", "fp8_e4m3", 192, 8, 16, 8, 1024, 50.0),
    ("h100", "fp8_e4m3", 80, 16, 16, 8, 128, 30.0),
    ("h200", "int8/int4", 128, 64, 1, 4, None, None),
    ("h200", "int4_token", 256, 16, 16, 8, 1024, 50.0),
    ("h200", "int4", 64, 16, 16, 8, 128, 30.0),
    ("h100", "int4", 192, 128, 4, 8, None, None),
    ("h200", "int8", 192, 64, 512, 4, None, None),
]


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("machine", "codec", "head_dim", "page_size", "time", "group", "window", "soft_cap"), AOT_CASES
)
def test_kernels_for_hopper_spill_nothing_and_fit(
    machine: str,
    codec: str,
    head_dim: int,
    page_size: int,
    time: int,
    group: int,
    window,
    soft_cap,
    tmp_path: Path,
):
    """Page ids above 65,536, and 2^31 entries a pool and more."""
    sizes = head_dim, page_size, time, group
    reports = compile_large(find_target(machine), codec, *sizes, window, soft_cap, tmp_path)
    assert len(reports) == 2
    for name, report in reports.items():
        print(name, report[:3])
        assert report.spilled_bytes == 0
        assert report.shared_bytes <= 227 * 1024
    # Those of matrices, in tiles or without: scales, of fewer axes, need not begin where a tensor's copy may.
    assert set().union(*(report.tensor_axes for report in reports.values())) <= {4, 5}


@pytest.mark.gpu_aot
def test_a_kernel_over_a_stripe_spills_nothing(tmp_path: Path):
    shape = Shape(64, 8, 128, page_size=16, time=4, window=1024)
    options = {**make_options(shape), "num_pages": 2**16, "is_striped": True}
    reports = compile_paged(find_target("h200"), shape, "int8", folder=tmp_path, **options)
    assert [report.spilled_bytes for report in reports.values()] == [0, 0]


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("codec", "layout"),
    list(zip(("bf16", "int8", "fp8_e4m3", "int8_static", "int4"), (*LAYOUTS, "paged", "dense"), strict=True)),
)
def test_a_loop_over_the_kernels_updates_the_cache_in_place(codec: str, layout: str):
    """Of heads in bfloat16, which the kernel takes that encodes int8 and fp8."""
    mesh, arguments = find_target("h200"), []
    for nbytes in (SMALL, LARGE):
        cache, query = make_loop_arguments(codec, layout, nbytes)
        arguments.append(shapes_on(mesh, (cache, query.update(dtype=jnp.bfloat16))))
    own = functools.partial(loop, implementation="pallas_gpu")
    assert_updates_in_place(own, *arguments, max_growth=0.03)
