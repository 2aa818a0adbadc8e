"""Kernels interpreted, and compiled for a GPU that is not here; what their assembler says of them."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from jkv.targets import shapes_on
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention import PagedArguments, Pages, pallas_gpu
from kernels_pallas.paged_attention.shapes import Shape

# Of codecs other than fp8, which is stored as its bits.
STORED = {"bf16": jnp.bfloat16, "int8": jnp.int8}


def interpret(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run a call of two kernels, in memory that is NaN until it is written; assert that nothing races."""
    states = []

    def observed(*positional, **named):
        states.append(GPURaceDetectionState(*positional, **named))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        # Each kernel of a call has a state of its own, and the interpreter keeps the last one's alone.
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", observed)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out = jax.block_until_ready(call(*arguments))
    races = [state.races_found for state in states]
    assert races == [False, False], f"races in kernels: {races}"
    return out


class Report(NamedTuple):
    """What the assembler says of a kernel.

    Attributes:
        registers: of a thread.
        spilled_bytes: stores and loads of registers that there are not.
        shared_bytes: of shared memory.
        tensor_axes: how many axes the tensors have of which TMA copies parts.
        code: the instructions, where MOSAIC_GPU_DUMP_SASS and _CUDA_ROOT ask for them; else None.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_axes: set[int]
    code: str | None


def compile_paged(
    mesh: Mesh, shape: Shape, codec: str, *, num_pages: int, folder: Path, **options: Any
) -> dict[str, Report]:
    """Compile a call of paged attention, over two layers of pages, and return a report for each kernel.

    Args:
        mesh: from `jkv.targets.target`.
        shape: sizes; the page table is 64 pages wide.
        codec: `bf16`, or `int8`, `fp8_e4m3` or `fp8_e5m2` with scales of tokens and heads.
        num_pages: pages of a layer.
        folder: an empty one, for what the compiler writes.
        options: of the kernel.
    """
    rows = len(shape.totals)
    slots = (2 * num_pages, shape.num_kv_heads, shape.page_size)
    pool, scale = ((*slots, shape.head_dim), STORED.get(codec, jnp.uint8)), (slots, jnp.float32)
    arrays = [
        ((rows, shape.time, shape.num_heads, shape.head_dim), jnp.bfloat16),
        *(pool, scale, pool, scale),
        ((rows, 64), jnp.int32),
        *[((rows,), jnp.int32)] * 2,
        ((), jnp.int32),
    ]

    def call(query, keys, key_scale, values, value_scale, *others):
        pages = make_pages(codec, keys, key_scale), make_pages(codec, values, value_scale)
        return pallas_gpu.paged_attention(
            PagedArguments(query, *pages, *others), num_pages=num_pages, **options
        )

    return _compile(call, arrays, mesh, folder)


def compile_latent(
    mesh: Mesh, shape: LatentShape, codec: str, *, num_pages: int, folder: Path, **options: Any
) -> dict[str, Report]:
    """Compile an absorbed call of latent attention, rotated parts in bfloat16, as `compile_paged` does."""
    rows, slots = len(shape.totals), (2 * num_pages, 1, shape.page_size)
    dims = shape.latent_dim, shape.rope_dim
    arrays = [
        *[((rows, shape.time, shape.num_heads, dim), jnp.bfloat16) for dim in dims],
        ((*slots, shape.latent_dim), STORED.get(codec, jnp.uint8)),
        (slots, jnp.float32),
        ((*slots, shape.rope_dim), jnp.bfloat16),
        ((rows, 64), jnp.int32),
        *[((rows,), jnp.int32)] * 2,
        ((), jnp.int32),
    ]

    def call(query, rope_query, latents, scale, ropes, *others):
        pages = make_pages(codec, latents, scale), Pages(ropes)
        arguments = LatentArguments(query, rope_query, *pages, *others)
        return latent_gpu.latent_attention(arguments, num_pages=num_pages, **options)

    return _compile(call, arrays, mesh, folder)


def make_pages(codec: str, data: Any, scale: Any) -> Pages:
    """Return pages of a codec; bfloat16 has no scales."""
    entry: Any = codec if codec.startswith("fp8") else "number"
    return Pages(data, None if codec == "bf16" else scale, entry=entry)


def _compile(
    call: Callable[..., Any], arrays: list[tuple[Any, Any]], mesh: Mesh, folder: Path
) -> dict[str, Report]:
    """Compile a call on arrays of such shapes and dtypes, and return a report for each kernel."""
    dumps = {
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    os.environ |= dumps
    try:
        jax.jit(call).lower(*shapes_on(mesh, [jax.ShapeDtypeStruct(*array) for array in arrays])).compile()
    finally:
        for name in dumps:
            del os.environ[name]
    return {file.stem: _report(file) for file in folder.glob("*.ptxas")}


def _report(file: Path) -> Report:
    said, resources = file.read_text(), file.with_suffix(".resources.txt").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    axes = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", file.with_suffix(".ptx").read_text())
    code = file.with_suffix(".sass_ctrl")
    text = code.read_text() if code.exists() else None
    return Report(int(registers), sum(map(int, spilled)), int(shared), set(map(int, axes)), text or None)
