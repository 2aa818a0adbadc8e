"""Tilings from files: chosen where their calls are, refused where they are wrong."""

from pathlib import Path

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels_pallas.latent_attention import pallas_tpu as latent_kernel
from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.paged_attention import PagedArguments, Tiling, pallas_tpu
from kernels_pallas.paged_attention.shapes import MODELS
from kernels_pallas.tpu import sizes, tuned

from .models import latent_arguments, model_arguments

ENTRY = """
- calls:
    chip: v6e
    pools: int8/token x 128 + int8/token x 128
    num_kv_heads: 8
    group: 4
    page_size: 128
    window: null
    step: decode
  tiling:
    block_tokens: 1024
    query_tokens: 1
    num_buffers: 2
    evidence: none
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    file = tmp_path / "tuned.yaml"
    file.write_text(ENTRY)
    monkeypatch.setattr(pallas_tpu, "TUNED", file)
    return file


def tiling_on(device_kind: str, arguments: PagedArguments) -> Tiling:
    device = AbstractDevice(device_kind, "tpu", 1)
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        return pallas_tpu.tiling_for(arguments, window=None)


def test_an_entry_takes_the_place_of_the_formulas_tiling_on_its_chip(file: Path):
    arguments, _ = model_arguments(MODELS["llama3_8b"], "int8")
    formula = pallas_tpu.tiling_for(arguments, window=None)
    assert formula != Tiling(1024, 1, 2)
    assert tiling_on("TPU v6 lite", arguments) == Tiling(1024, 1, 2)
    assert tiling_on("TPU v5 lite", arguments) == formula
    assert tiling_on("TPU v6 lite", model_arguments(MODELS["llama3_70b"], "int8")[0]) != Tiling(1024, 1, 2)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("block_tokens", "block", "0.tiling.block_tokens: Field required"),
        ("evidence: none", "evidence: none\n    speed: 1", "0.tiling.speed: Unexpected keyword"),
        ("chip: v6e", "chip: v6", "0.calls.chip: Input should be .*'v6e'.* got 'v6'"),
        ("num_buffers: 2", "num_buffers: 1", "0.tiling.num_buffers: .*greater than or equal to 2, got 1"),
        ("tokens: 1024", "tokens: 8192", "8192 tokens for v6e: tiles and sums must take at most 33,554,432"),
        ("- calls", ENTRY + "- calls", "calls must have one tiling, got 2 of 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused(file: Path, right: str, wrong: str, message: str):
    file.write_text(ENTRY.replace(right, wrong))
    arguments, _ = model_arguments(MODELS["llama3_8b"], "int8")
    with pytest.raises(ValueError, match=f"/tuned.yaml: .*{message}"):
        tiling_on("TPU v6 lite", arguments)


def test_the_packages_tilings_are_of_named_calls_and_fit():
    found = {}
    for kernel, models, make in (
        (pallas_tpu, MODELS, model_arguments),
        (latent_kernel, LATENT_MODELS, latent_arguments),
    ):
        entries = tuned.read(kernel.TUNED)
        for shape in models.values():
            for codec in ("bf16", "int8", "fp8_e4m3"):
                of_call = kernel.shape_of(make(shape, codec)[0])
                for chip in ("v5e", "v5p", "v6e", "7x"):
                    calls = tuned.calls_of(of_call, chip, window=shape.window)
                    found |= {calls: of_call} if calls in entries else {}
        assert found.keys() >= entries.keys()
        for calls, entry in entries.items():
            tiling = Tiling(entry.block_tokens, entry.query_tokens, num_buffers=entry.num_buffers)
            assert sizes.vmem_refusal(found[calls], tiling) is None
