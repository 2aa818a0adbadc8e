"""Sums of a GPU's tensor cores, in the interpreter, which has no product that is added in registers.

There the state of an accumulator is emulated: it begins as zero, and what it was to begin as is added when it
is read. So what is multiplied, how its matrices lie, and that sums are kept are executed; that the hardware's
accumulator takes them as its beginning is not.
"""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import accumulators

from ..compare import assert_close
from ..machines import recording
from .test_latent_attention import make_arguments
from .test_latent_attention_gpu import DECODE, TILING, own_error, run_kernel, run_reference

ROWS, INNER, COLUMNS = 64, 128, 64


def run_state(body: Any) -> Any:
    """Emulate `pl.run_state` over one accumulator."""

    def run(sums: jax.Array) -> jax.Array:
        def scoped(sums_ref: Any) -> jax.Array:
            body(sums_ref)
            return sums + sums_ref[...]

        return pl.run_scoped(scoped, plgpu.WGMMAAccumulatorRef(sums.shape, jnp.float32))

    return run


@pytest.fixture
def _emulated(monkeypatch):
    monkeypatch.setattr(accumulators, "pl", SimpleNamespace(run_scoped=pl.run_scoped, run_state=run_state))
    monkeypatch.setattr(plgpu.WGMMAAccumulatorRef, "init", staticmethod(lambda sums: sums))


def add_twice(plus_product: Any, *, in_place: bool) -> tuple[np.ndarray, np.ndarray]:
    """Add a product to sums two times over, in a kernel; return what it gives and what is right."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal(shape) for shape in ((ROWS, INNER), (INNER, COLUMNS)))
    matrices = [jnp.asarray(each, jnp.bfloat16) for each in (left, right)]
    sums = jnp.asarray(random.standard_normal((ROWS, COLUMNS)), jnp.float32)

    def kernel(left_ref, right_ref, sums_ref, out_ref, left_shared, right_shared, barrier):
        plgpu.copy_gmem_to_smem(left_ref, left_shared, barrier)
        plgpu.copy_gmem_to_smem(right_ref, right_shared, barrier)
        plgpu.barrier_wait(barrier)
        found = plgpu.load(sums_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        for _ in range(2):
            found = plus_product(found, left_shared, right_shared, in_place=in_place)
        out_ref[...] = found

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        scratch_types=[
            accumulators.matrices((ROWS, INNER), jnp.dtype(jnp.bfloat16)),
            accumulators.matrices((INNER, COLUMNS), jnp.dtype(jnp.bfloat16)),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    with plgpu.force_gpu_interpret_mode(recording(plgpu.InterpretGPUParams)):
        out = jax.block_until_ready(call(*matrices, sums))
    exact = [np.asarray(each, np.float64) for each in (*matrices, sums)]
    return np.asarray(out), exact[2] + 2 * exact[0] @ exact[1]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out_of_place"])
def test_a_product_is_added_to_the_sums(in_place: bool):
    found, expected = add_twice(accumulators.plus_product, in_place=in_place)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


FAULTS = {
    "sums that are lost": (
        "plgpu.WGMMAAccumulatorRef.init(sums)",
        "plgpu.WGMMAAccumulatorRef.init(0 * sums)",
    ),
    "a product that is taken twice": (
        "        plgpu.wgmma(sums_ref, left_ref, right_ref)\n\n    initial",
        "        plgpu.wgmma(sums_ref, left_ref, right_ref)\n"
        "        plgpu.wgmma(sums_ref, left_ref, right_ref)\n\n    initial",
    ),
}


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_sums_in_place_is_found(fault: str):
    found, replacement = FAULTS[fault]
    source = inspect.getsource(accumulators.plus_product)
    assert source.count(found) == 1, f"{found!r} is to be in the source once"
    names = dict(vars(accumulators))
    exec(source.replace(found, replacement), names)
    got, expected = add_twice(names["plus_product"], in_place=True)
    assert not np.allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gate
@pytest.mark.usefixtures("_emulated")
def test_the_kernel_of_latents_equals_the_definition_with_its_sums_in_place():
    arguments, num_pages = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16)
    tiling = dataclasses.replace(TILING, is_interpreted=False)
    out, _ = run_kernel(DECODE, arguments, num_pages, tiling)
    expected, _ = run_reference(DECODE, jnp.float32)
    assert_close(out, expected, 2 * own_error(DECODE, jnp.bfloat16))


def registers_of(layout: Any, matrix: np.ndarray, thread: int) -> np.ndarray:
    """Return what a thread holds of a matrix, `[..., entry of a register]`, by a layout's definition."""
    tiled = matrix
    for tile in layout.tiling.tiles:
        rank = len(tile)
        lead, own = tiled.shape[:-rank], tiled.shape[-rank:]
        tiled = tiled.reshape(
            *lead, *(size for pair in zip(own, tile, strict=True) for size in (pair[0] // pair[1], pair[1]))
        )
        first = len(lead)
        order = [*range(first), *range(first, tiled.ndim, 2), *range(first + 1, tiled.ndim, 2)]
        tiled = tiled.transpose(order)
    for index, dims in zip(divmod(thread, 32), (layout.warp_dims, layout.lane_dims), strict=True):
        for dim in reversed(dims):
            index, place = divmod(index, dim.times if isinstance(dim, Replicated) else tiled.shape[dim])
            if not isinstance(dim, Replicated):
                tiled = np.take(tiled, [place], axis=dim)
    return np.moveaxis(tiled[..., None], layout.vector_dim - 1, -1)


@pytest.mark.parametrize(
    ("rows", "layout"),
    [(64, plgpu.Layout.WGMMA_8BIT), (4, accumulators.of_warps(4)), (2, accumulators.of_warps(2))],
    ids=["bytes", "four runs", "two runs"],
)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_registers_that_are_dealt_hold_dealt_columns(rows: int, layout: Any, is_faulty: bool):
    """As layouts define what a thread holds: there the compiled kernel and the interpreted may differ."""
    matrix = np.arange(rows * 32).reshape(rows, 32)
    product_layout = plgpu.Layout.WGMMA.to_mgpu()
    wanted = np.asarray(accumulators.dealt(jnp.asarray(np.repeat(matrix, 64 // rows, axis=0))))
    cuts = (slice(2, 4), slice(2)) if is_faulty else (slice(2), slice(2, 4))
    got, right = [], []
    for thread in range(128):
        fours = registers_of(layout.to_mgpu(), matrix, thread)
        held = np.empty(fours.shape[:-1], dtype=object)
        for index in np.ndindex(held.shape):
            held[index] = tuple(fours[index])
        shape = product_layout.registers_shape((64, 32))
        dealt = accumulators.dealt_registers(lambda four: [four[cut] for cut in cuts], held, shape)
        got.append(list(dealt.ravel()))
        right.append(registers_of(product_layout, wanted, thread).reshape(-1, 2))
    assert np.array_equal(got, right) != is_faulty


def test_gathered_columns_are_those_that_were_dealt():
    columns = jnp.arange(64).reshape(2, 32)
    np.testing.assert_array_equal(accumulators.gathered(accumulators.dealt(columns)), columns)
    assert np.asarray(accumulators.dealt(columns))[0, :4].tolist() == [0, 1, 4, 5]
