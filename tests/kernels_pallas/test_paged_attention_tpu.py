"""The TPU kernel of paged attention, interpreted: against its definition, and with faults in its source."""

import importlib.util
import inspect
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # its races are private
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import PagedArguments, Tiling, pallas_tpu
from kernels_pallas.paged_attention.shapes import Shape

from ..compare import assert_close, relative_errors
from .test_paged_attention import (
    assert_log_sums_close,
    dense_attention,
    make_arguments,
    make_options,
    run,
    run_reference,
)

# Several tiles for the longest row, and several pieces of a chunk.
TILING = Tiling(block_tokens=128, query_tokens=4)


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Forget what a failed run has left behind."""
    pltpu.reset_tpu_interpret_mode_state()


def run_kernel(
    shape: Shape, arguments: PagedArguments, num_pages: int, tiling: Tiling = TILING, module=pallas_tpu
) -> tuple[jax.Array, jax.Array]:
    """Run in the interpreter, where what was never written is NaN; races are looked for."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        results = run(module.paged_attention, arguments, num_pages, tiling=tiling, **make_options(shape))
        return jax.block_until_ready(results)


def has_races() -> bool:
    """Return whether the latest run had races."""
    assert interpreter.races is not None
    return interpreter.races.races_found


SMALL = {
    "decode": Shape(8, 2, 128, page_size=16, time=1, totals=(0, 1, 37, 300)),
    "decode_window": Shape(4, 2, 128, page_size=32, time=1, totals=(290, 0, 3), window=150, has_sinks=True),
    "chunk": Shape(4, 2, 128, page_size=16, time=7, totals=(0, 1, 37, 150), window=130, soft_cap=5.0),
}


@pytest.mark.parametrize("name", ["decode", "chunk", pytest.param("decode_window", marks=pytest.mark.gate)])
def test_bfloat16_pools_cost_at_most_twice_the_definitions_own_error(name: str):
    """Idle and empty rows, dead slots of NaN, partial pages, windows: with no race among the copies."""
    shape = SMALL[name]
    arguments, num_pages = make_arguments(shape, jnp.bfloat16)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    exact, _ = dense_attention(shape)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    assert_log_sums_close(log_sum, expected_log_sum)


def test_float32_pools_are_multiplied_as_they_are_and_what_has_no_page_is_not_seen():
    """The longest row's second page, in a tile among others, is none: the row is as if it were not there."""
    shape = Shape(4, 2, 128, page_size=16, time=1, totals=(150,))
    arguments, num_pages = make_arguments(shape)
    table = arguments.page_table.at[0, 1].set(num_pages)
    out, log_sum = run_kernel(shape, arguments._replace(page_table=table), num_pages)
    expected, expected_log_sum = run_reference(shape, arguments._replace(page_table=table), num_pages)
    assert_close(out, expected)
    assert_log_sums_close(log_sum, expected_log_sum)
    with pytest.raises(AssertionError):
        assert_close(out, run_reference(shape, arguments, num_pages)[0])


FAULTS = {
    "a copy that is not waited for": ("copy.wait()", "pass"),
    "a copy into a tile that is in use": ("range(sizes.num_buffers - 1)", "range(sizes.num_buffers)"),
    "a copy into another tile": ("tiles_ref.at[buffer, :, to]", "tiles_ref.at[next_buffer(buffer), :, to]"),
    "a mask that is off by one": ("is_seen = past <= row", "is_seen = past < row"),
    "a last page that is left out": ("+ lens_ref[piece] + page_size - 1", "+ lens_ref[piece]"),
    "a scale that is wrong by 2 %": ("logits * options.scale", "logits * (1.02 * options.scale)"),
    "a sum that is not rescaled": ("sum_ref[heads] * keep", "sum_ref[heads]"),
}


def with_fault(fault: str, monkeypatch):
    """Return the kernel's module with a fault in its source."""
    found, replacement = FAULTS[fault]
    source = inspect.getsource(pallas_tpu)
    assert source.count(found) == 1, f"{found!r} is to be in the source once"
    spec = importlib.util.spec_from_loader("faulty_pallas_tpu", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    exec(source.replace(found, replacement), module.__dict__)
    return module


@pytest.mark.parametrize(
    "fault",
    [fault if "wait" in fault else pytest.param(fault, marks=pytest.mark.gate) for fault in FAULTS],
)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(290, 21))
    arguments, num_pages = make_arguments(shape)
    out, _ = run_kernel(shape, arguments, num_pages, module=with_fault(fault, monkeypatch))
    expected, _ = run_reference(shape, arguments, num_pages)
    whole, row = relative_errors(out, expected)
    assert has_races() or not (whole < 1e-3 and row < 1e-3)


@pytest.mark.gate
def test_the_kernel_without_a_fault_passes_where_faults_are_found():
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(290, 21))
    arguments, num_pages = make_arguments(shape)
    out, _ = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    assert_close(out, run_reference(shape, arguments, num_pages)[0])


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (Shape(2, 1, 128, page_size=8, time=1), jnp.bfloat16, "page_size must be a multiple of 16, got 8"),
        (Shape(2, 1, 80, page_size=16, time=1), jnp.bfloat16, "head_dim must be 128, got 80"),
        (Shape(2, 1, 128, page_size=16, time=1), jnp.float16, "bfloat16 or float32, got float16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_its_sizes(shape: Shape, dtype, message: str):
    arguments, num_pages = make_arguments(shape, dtype)
    with pytest.raises(ValueError, match=f"paged attention on TPUs cannot run: .*{message}"):
        pallas_tpu.paged_attention(arguments, num_pages=num_pages, scale=1.0)


def test_a_page_table_that_does_not_fit_is_refused_with_its_sizes():
    arguments, _ = make_arguments(Shape(2, 1, 128, page_size=16, time=1), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1024, 1024), jnp.int32)
    refused = pallas_tpu.refusal(arguments._replace(page_table=table))
    assert refused is not None
    assert "at most 524,288 bytes, got 4,194,304 for 1024 sequences of 1024 pages" in refused


def test_a_tile_is_no_longer_than_what_may_be_seen():
    arguments, _ = make_arguments(Shape(32, 8, 128, page_size=16, time=1, totals=(2048,)), jnp.bfloat16)
    assert pallas_tpu.tiling_for(arguments, window=None).block_tokens == 256
    assert pallas_tpu.tiling_for(arguments, window=100).block_tokens == 116
