"""The GPU kernel of paged attention: interpreted, with races looked for, and compiled for a GPU not here."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax.experimental.pallas import mosaic_gpu as plgpu

from jkv.in_place import assert_updates_in_place
from jkv.targets import shapes_on
from kernels_pallas.paged_attention import PagedArguments, Pages, Tiling, pallas_gpu
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

from ..compare import assert_close, relative_errors
from ..loops import LARGE, LAYOUTS, SMALL, loop
from ..loops import make_arguments as make_loop_arguments
from ..machines import find_target
from .test_paged_attention import (
    assert_log_sums_close,
    change_scale,
    dense_attention,
    drop_last_page,
    make_arguments,
    make_options,
    run_reference,
    shift_mask,
)

# Several splits a row, and several of them for a program.
TILING = Tiling(split_tokens=64, num_programs=2)
DECODE = Shape(8, 2, 64, page_size=16, time=1, totals=(0, 1, 100))
CASES = {
    "decode": (DECODE, jnp.bfloat16),
    "chunk_of_a_window": (
        Shape(16, 1, 64, page_size=32, time=5, totals=(3, 180), window=70, soft_cap=5.0, has_sinks=True),
        jnp.float16,
    ),
    "wide_chunk_of_large_pages": (Shape(8, 1, 128, page_size=128, time=16, totals=(16, 200)), jnp.bfloat16),
}
GATE_CASES = {
    name: (shape, jnp.bfloat16)
    for name, shape in SHAPES.items()
    if shape.head_dim % 64 == 0 and shape.page_size % 8 == 0
}


@functools.cache
def compiled(shape: Shape, num_pages: int):
    """Return the interpreted kernel for a shape, compiled once for all calls."""
    options = make_options(shape)
    return jax.jit(
        functools.partial(pallas_gpu.paged_attention, num_pages=num_pages, tiling=TILING, **options)
    )


def run_kernel(shape: Shape, arguments: PagedArguments, num_pages: int):
    """Run in the interpreter, whose memory is NaN until it is written; assert that nothing races."""
    states = []

    def observed(*positional, **named):
        states.append(GPURaceDetectionState(*positional, **named))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        # Each kernel of a call has a state of its own, and the interpreter keeps the last one's alone.
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", observed)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out = jax.block_until_ready(compiled(shape, num_pages)(arguments))
    assert [state.races_found for state in states] == [False, False]
    return out


def assert_equals_the_definition(shape: Shape, dtype) -> None:
    arguments, num_pages = make_arguments(shape, dtype)
    exact, exact_log_sum = dense_attention(shape)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    is_seen = np.isfinite(exact_log_sum)
    seen = (np.where(is_seen, x, 0) for x in (expected_log_sum, exact_log_sum))
    assert_log_sums_close(log_sum, exact_log_sum, 2 * max(relative_errors(*seen)))


@pytest.mark.parametrize(("shape", "dtype"), CASES.values(), ids=CASES)
def test_the_kernel_equals_the_definition(shape: Shape, dtype):
    assert_equals_the_definition(shape, dtype)


@pytest.mark.gate
@pytest.mark.parametrize(("shape", "dtype"), GATE_CASES.values(), ids=GATE_CASES)
def test_the_kernel_equals_the_definition_in_named_shapes(shape: Shape, dtype):
    assert_equals_the_definition(shape, dtype)


@pytest.mark.parametrize("fault", [shift_mask, drop_last_page, change_scale])
def test_a_faulty_call_fails_the_comparison(fault):
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16, dead=0.0)
    out, _ = run_kernel(DECODE, fault(arguments), num_pages)
    expected, _ = run_reference(DECODE, arguments, num_pages)
    exact, _ = dense_attention(DECODE)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


def test_a_wait_that_is_left_out_is_a_race(monkeypatch):
    shape = Shape(1, 1, 64, page_size=64, time=1, totals=(60,))
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises(AssertionError, match=r"assert \[True, False\] == \[False, False\]"):
        run_kernel(shape, *make_arguments(shape, jnp.bfloat16))


def test_a_rows_bits_do_not_depend_on_the_other_rows():
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16)
    together, _ = run_kernel(DECODE, arguments, num_pages)
    alone = jnp.arange(len(DECODE.totals)) == 2
    idle = arguments._replace(lens=jnp.where(alone, arguments.lens, 0))
    out, log_sum = run_kernel(DECODE, idle, num_pages)
    np.testing.assert_array_equal(out[2], together[2])
    assert (np.asarray(out[:2]) == 0).all()
    assert (np.asarray(log_sum[:2]) == -np.inf).all()


@pytest.mark.parametrize("page", [-1, 2**31 - 1])
def test_a_page_id_outside_the_layer_is_not_read(page: int):
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16)
    arguments = arguments._replace(page_table=arguments.page_table.at[2, 3].set(page))
    out, _ = run_kernel(DECODE, arguments, num_pages)
    expected, _ = run_reference(DECODE, arguments, num_pages)
    exact, _ = dense_attention(DECODE)
    untouched, _ = make_arguments(DECODE, jnp.bfloat16)
    own = relative_errors(run_reference(DECODE, untouched, num_pages)[0], exact)
    assert_close(out, expected, 2 * max(own))


def test_what_dead_slots_hold_changes_no_bit():
    outs = [run_kernel(DECODE, *make_arguments(DECODE, jnp.bfloat16, dead=dead))[0] for dead in (np.nan, 1e4)]
    np.testing.assert_array_equal(*outs)


def make_pool(head_dim: int = 64, page_size: int = 16, dtype=jnp.bfloat16) -> PagedArguments:
    rows = jnp.zeros(1, jnp.int32)
    pages = Pages(jnp.zeros((2, 1, page_size, head_dim), dtype))
    query = jnp.zeros((1, 1, 1, head_dim))
    return PagedArguments(query, pages, pages, jnp.zeros((1, 2), jnp.int32), rows, rows, page_offset=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (make_pool(head_dim=80), "takes heads of 64, 128, 192 or 256 entries, got 80; use 'xla'"),
        (make_pool(page_size=4), "takes pages of 8, 16, 32 or a multiple of 64 tokens, got 4; use 'xla'"),
        (make_pool(page_size=96), "takes pages of 8, 16, 32 or a multiple of 64 tokens, got 96; use 'xla'"),
        (make_pool(dtype=jnp.float32), "takes pools of bfloat16 or of float16 .*, got float32 and float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(arguments: PagedArguments, message: str):
    with pytest.raises(ValueError, match=message):
        pallas_gpu.paged_attention(arguments, num_pages=2, scale=1.0)


class Report(NamedTuple):
    """What the assembler says of a kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_for(machine: str, shape: Shape, dtype, num_pages: int, folder: Path) -> dict[str, Report]:
    """Compile a call for a GPU that is not here, and return the reports on its kernels."""
    mesh = find_target(machine)
    rows = len(shape.totals)
    pool = ((2 * num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim), dtype)
    arrays = [
        ((rows, shape.time, shape.num_heads, shape.head_dim), dtype),
        *(pool, pool),
        ((rows, 64), jnp.int32),
        *[((rows,), jnp.int32)] * 2,
        ((), jnp.int32),
    ]

    def call(query, keys, values, *others):
        arguments = PagedArguments(query, Pages(keys), Pages(values), *others)
        return pallas_gpu.paged_attention(arguments, num_pages=num_pages, **make_options(shape))

    shapes = shapes_on(mesh, [jax.ShapeDtypeStruct(*array) for array in arrays])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        jax.jit(call).lower(*shapes).compile()
    reports = {}
    for file in folder.glob("*.ptxas"):
        said = file.read_text()
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
        (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", file.with_suffix(".resources.txt").read_text())
        (registers,) = re.findall(r"Used (\d+) registers", said)
        reports[file.stem] = Report(int(registers), sum(map(int, spills)), int(shared))
    return reports


AOT_SHAPES = {
    f"{head_dim}_page_{page_size}_rows_{time * group}{'_window' if window else ''}": Shape(
        8 * group,
        8,
        head_dim,
        page_size=page_size,
        time=time,
        window=window,
        soft_cap=cap,
        has_sinks=bool(cap),
    )
    for head_dim, page_size, time, group, window, cap in (
        (128, 64, 1, 4, None, None),
        (128, 128, 16, 8, 1024, 30.0),
        (64, 16, 1, 8, 128, None),
        (64, 32, 16, 8, None, 30.0),
        (192, 64, 4, 8, 1024, 50.0),
        (256, 16, 16, 4, 1024, 50.0),
    )
}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("shape", AOT_SHAPES.values(), ids=AOT_SHAPES)
def test_kernels_for_hopper_spill_nothing_and_fit(shape: Shape, tmp_path: Path):
    """Page ids above 65,536, and 2^31 entries a pool and more."""
    entries = 2 * shape.num_kv_heads * shape.page_size * shape.head_dim
    num_pages = max(2**16, 2**31 // entries) + 1
    reports = compile_for("h200", shape, jnp.bfloat16, num_pages, tmp_path)
    assert len(reports) == 2
    for name, report in reports.items():
        print(name, report)
        assert report.spilled_bytes == 0
        assert report.shared_bytes <= 227 * 1024


@pytest.mark.gpu_aot
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_over_the_kernel_updates_the_cache_in_place(layout: str):
    mesh = find_target("h200")
    arguments = [shapes_on(mesh, make_loop_arguments("bf16", layout, nbytes)) for nbytes in (SMALL, LARGE)]
    own = functools.partial(loop, implementation="pallas_gpu")
    assert_updates_in_place(own, *arguments, max_growth=0.03)
