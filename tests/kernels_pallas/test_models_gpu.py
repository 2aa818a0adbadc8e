"""The GPU kernels of attention, compiled for every named shape in every codec: what their assembler says.

All are compiled for an H200: an H100 has other memory and the same multiprocessors, as many of them. All are
lowered for both, to the same kernels (`gpu_kernels`); that the assembler is given the same is tested of some.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.latent_attention.shapes import SHAPES as LATENT_SHAPES
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention.shapes import MODELS, SHAPES, Shape

from .. import gpu_kernels
from ..gpu_kernels import Report, compile_latent, compile_shape
from ..machines import find_target

pytestmark = pytest.mark.gpu_aot

STATIC = ("int8_static", "fp8_e4m3_static", "fp8_e5m2_static")
CODECS = ("bf16", "f16", "int8", "fp8_e4m3", "fp8_e5m2", *STATIC, "int4_token", "int4", "int8/int4")
LATENT_CODECS = ("bf16", "f16", "int8", "fp8_e4m3", "fp8_e5m2", *STATIC, "int4_token")


def compile_any(
    machine: str, shape: Shape | LatentShape, codec: str, folder: Path, dtype: Any = jnp.bfloat16
) -> dict[str, Report]:
    """Compile a shape over a pool of 2^31 entries or more."""
    mesh = find_target(machine)
    if isinstance(shape, Shape):
        return compile_shape(mesh, shape, codec, folder, dtype)
    num_pages = 2**31 // (2 * shape.page_size * shape.latent_dim) + 1
    scale = (shape.head_dim + shape.rope_dim) ** -0.5
    return compile_latent(
        mesh, shape, codec, num_pages=num_pages, folder=folder, scale=scale, window=shape.window
    )


def assert_fits(reports: dict[str, Report]) -> None:
    assert reports
    for name, report in reports.items():
        print(name, report[:3])
        assert report.spilled_bytes == 0
        assert report.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_kernel_spills_nothing_and_fits(name: str, codec: str, tmp_path: Path):
    assert_fits(compile_any("h200", MODELS[name], codec, tmp_path))


@pytest.mark.parametrize("codec", LATENT_CODECS)
@pytest.mark.parametrize("name", LATENT_MODELS)
def test_a_model_s_kernel_of_latents_spills_nothing_and_fits(name: str, codec: str, tmp_path: Path):
    assert_fits(compile_any("h200", LATENT_MODELS[name], codec, tmp_path))


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8_e4m3", "int4_token"])
def test_latents_in_small_pages_spill_nothing_and_fit(codec: str, tmp_path: Path):
    shape = dataclasses.replace(LATENT_MODELS["deepseek_v3"], page_size=16)
    assert_fits(compile_any("h200", shape, codec, tmp_path))


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "int4_token"])
@pytest.mark.parametrize("name", [name for name, shape in MODELS.items() if shape.time > 16])
def test_a_long_step_s_results_in_float16_cost_no_registers(name: str, codec: str, tmp_path: Path):
    """Those of short steps are float32, whatever queries are."""
    assert_fits(compile_any("h200", MODELS[name], codec, tmp_path, jnp.float16))


# Those of tests, in one codec of each form: a float, one converted to bfloat16, one to float16, and runs.
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        (name, codec)
        for name, shape in SHAPES.items()
        for codec in ("bf16", "int8", "fp8_e4m3", "int4")
        if shape.head_dim >= 64 and shape.page_size % 8 == 0 and (codec != "int4" or shape.head_dim % 64 == 0)
    ],
)
def test_a_test_s_kernel_spills_nothing_and_fits(name: str, codec: str, tmp_path: Path):
    assert_fits(compile_any("h200", SHAPES[name], codec, tmp_path))


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["deepseek_decode", "deepseek_chunk"])
def test_a_test_s_kernel_of_latents_spills_nothing_and_fits(name: str, codec: str, tmp_path: Path):
    assert_fits(compile_any("h200", LATENT_SHAPES[name], codec, tmp_path))


@pytest.mark.parametrize(
    ("shape", "codec"),
    [
        (MODELS["llama3_8b"], "fp8_e4m3"),
        (MODELS["llama3_8b_chunk"], "bf16"),
        (LATENT_MODELS["deepseek_v3"], "int4_token"),
    ],
    ids=["heads", "long_step", "latents"],
)
def test_an_h100_is_given_the_kernels_of_an_h200(shape: Shape | LatentShape, codec: str, tmp_path: Path):
    """The assembler, which makes instructions for both as `sm_90a`, is given the same and says the same."""
    reports = []
    for machine in ("h100", "h200"):
        folder = tmp_path / machine
        folder.mkdir()
        of_machine = compile_any(machine, shape, codec, folder)
        reports.append({name.rstrip("0123456789"): report for name, report in of_machine.items()})
    assert reports[0] == reports[1]
    assert all(".target sm_90a" in report.assembly for report in reports[0].values())


def test_kernels_that_an_h100_would_not_have_are_found(tmp_path: Path, monkeypatch):
    """Over a table of another width."""
    own = gpu_kernels.shapes_on

    def faulty(mesh: Mesh, arguments: Any) -> Any:
        if mesh.devices.flat[0].device_kind == "NVIDIA H100":
            rows, width = arguments.page_table.shape
            arguments = arguments._replace(page_table=jax.ShapeDtypeStruct((rows, 2 * width), jnp.int32))
        return own(mesh, arguments)

    monkeypatch.setattr(gpu_kernels, "shapes_on", faulty)
    with pytest.raises(AssertionError, match="an H100 has other kernels"):
        compile_any("h200", MODELS["llama3_8b"], "bf16", tmp_path)
