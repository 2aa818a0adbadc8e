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
