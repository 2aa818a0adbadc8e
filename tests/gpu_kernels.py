"""Kernels interpreted, and compiled for a GPU that is not here; what their assembler says of them."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.stages import Lowered

from jkv.cache.codec import CODECS, Codec, find_codecs
from jkv.cache.encoding import hadamard
from jkv.cache.runs import num_runs
from jkv.targets import shapes_on
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.page_write import pallas_gpu as page_write_gpu
from kernels_pallas.paged_attention import PagedArguments, Pages, Stripe, pallas_gpu
from kernels_pallas.paged_attention.shapes import Shape

from .kernels_pallas.models import make_pages
from .machines import find_target, recording


def interpret(call: Callable[..., Any], *arguments: Any, num_kernels: int = 2) -> Any:
    """Run a call of kernels, in memory that is NaN until it is written; assert that nothing races."""
    states = []

    def observed(*positional, **named):
        states.append(GPURaceDetectionState(*positional, **named))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        # Each kernel of a call has a state of its own, and the interpreter keeps the last one's alone.
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", observed)
        patch.setattr(gpu_callbacks, "wgmma", functools.partial(_observed_wgmma, gpu_callbacks.wgmma))
        with plgpu.force_gpu_interpret_mode(recording(plgpu.InterpretGPUParams)):
            out = jax.block_until_ready(call(*arguments))
    races = [state.races_found for state in states]
    assert races == [False] * num_kernels, f"races in kernels: {races}"
    return out


def _observed_wgmma(wgmma: Callable[..., Any], **named: Any) -> Any:
    """Look for races with what a product reads, which the interpreter does not.

    It reads as copies do, past a fence: what a warp group itself wrote is to be committed before.
    """
    shared, races, thread = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races(), named["thread"]
    for factor in ("a", "b"):
        key = HostAllocationKey.from_array(named[f"{factor}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(named[f"{factor}_transforms"])
        read = shared.access(key, jax.tree.map(int, transforms)).range
        clock = shared.get_clock(thread).async_smem_clock
        with races.lock:
            races.reads[key].append((thread, clock, read, "a product"))
            for _, written, where, _ in races.writes[key]:
                if _ranges_overlap(read, where) and (written.clock > clock.clock).any():
                    races.races_found = True
    return wgmma(**named)


class Report(NamedTuple):
    """What the assembler says of a kernel.

    Attributes:
        registers: of a thread.
        spilled_bytes: stores and loads of registers that there are not.
        shared_bytes: of shared memory.
        tensor_axes: how many axes the tensors have of which TMA copies parts.
        code: the instructions, where MOSAIC_GPU_DUMP_SASS and _CUDA_ROOT ask for them; else None.
        assembly: what the assembler is given.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_axes: set[int]
    code: str | None
    assembly: str


def compile_paged(
    mesh: Mesh,
    shape: Shape,
    codec: str,
    *,
    num_pages: int,
    folder: Path,
    is_striped: bool = False,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> dict[str, Report]:
    """Compile a call of paged attention, over two layers of pages, and return a report for each kernel.

    Args:
        mesh: from `jkv.targets.target`.
        shape: sizes; the page table is 64 pages wide.
        codec: of keys, and of values after a slash; or `f16`, which pools of caches are not.
        num_pages: pages of a layer.
        folder: an empty one, for what the compiler writes.
        is_striped: whether the table is that of a stripe.
        dtype: of queries.
        options: of the kernel.
    """
    num_seqs = len(shape.totals)
    of_pool = {"num_pages": 2 * num_pages, "num_kv_heads": shape.num_kv_heads}
    sizes = {"page_size": shape.page_size, "head_dim": shape.head_dim}

    def make() -> PagedArguments:
        keys, values = (_pages(each, of_pool, sizes) for each in _codecs_of(codec))
        query = jnp.zeros((num_seqs, shape.time, shape.num_heads, shape.head_dim), dtype)
        table, rows = jnp.zeros((num_seqs, 64), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
        stripe = Stripe(rows[0], rows[0]) if is_striped else None
        arguments = PagedArguments(query, keys, values, table, rows, rows, rows[0], stripe=stripe)
        if (span := keys.run_slots) is None:
            return arguments
        recent = (num_seqs, shape.num_kv_heads, num_runs(shape.time, span) * span, shape.head_dim)
        return arguments._replace(recent=jnp.zeros(recent, jnp.bfloat16))

    call = functools.partial(pallas_gpu.paged_attention, num_pages=num_pages, **options)
    return _compile(call, jax.eval_shape(make), mesh, folder)


def compile_large(
    mesh: Mesh,
    codec: str,
    head_dim: int,
    page_size: int,
    time: int,
    group: int,
    window: int | None,
    soft_cap: float | None,
    folder: Path,
) -> dict[str, Report]:
    """Compile over a pool of page ids above 65,536 and 2^31 entries or more; with a cap, with sinks too."""
    has_sinks = soft_cap is not None
    shape = Shape(
        8 * group, 8, head_dim, page_size, time, window=window, soft_cap=soft_cap, has_sinks=has_sinks
    )
    return compile_shape(mesh, shape, codec, folder)


def compile_shape(
    mesh: Mesh, shape: Shape, codec: str, folder: Path, dtype: Any = jnp.bfloat16
) -> dict[str, Report]:
    """Compile a shape over such a pool, with its options; see `compile_paged`."""
    of_page = shape.num_kv_heads * shape.page_size * shape.head_dim
    num_pages = max(2**16, 2**31 // (2 * of_page)) + 1
    sinks = jnp.zeros(shape.num_heads) if shape.has_sinks else None
    options = {"window": shape.window, "soft_cap": shape.soft_cap, "sinks": sinks, "dtype": dtype}
    scale = shape.head_dim**-0.5
    return compile_paged(mesh, shape, codec, num_pages=num_pages, folder=folder, scale=scale, **options)


def compile_latent(
    mesh: Mesh,
    shape: LatentShape,
    codec: str,
    *,
    num_pages: int,
    folder: Path,
    is_striped: bool = False,
    **options: Any,
) -> dict[str, Report]:
    """Compile an absorbed call of latent attention, rotated parts in bfloat16, as `compile_paged` does."""
    num_seqs = len(shape.totals)
    of_pool = {"num_pages": 2 * num_pages, "num_kv_heads": 1}
    dims = shape.latent_dim, shape.rope_dim

    def make() -> LatentArguments:
        latents, ropes = (
            _pages(_codecs_of(name)[0], of_pool, {"page_size": shape.page_size, "head_dim": dim})
            for name, dim in zip((codec, "bf16"), dims, strict=True)
        )
        query, rope_query = (
            jnp.zeros((num_seqs, shape.time, shape.num_heads, dim), jnp.bfloat16) for dim in dims
        )
        table, rows = jnp.zeros((num_seqs, 64), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
        stripe = Stripe(rows[0], rows[0]) if is_striped else None
        return LatentArguments(query, rope_query, latents, ropes, table, rows, rows, rows[0], stripe=stripe)

    call = functools.partial(latent_gpu.latent_attention, num_pages=num_pages, **options)
    return _compile(call, jax.eval_shape(make), mesh, folder)


def make_write(
    codec: str, sizes: tuple[int, int, int], tokens: tuple[int, int]
) -> tuple[tuple[Pages, Pages], tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Return what is written into pools of page ids above 65,536 and 2^31 entries or more, to be traced.

    Args:
        codec: of keys and values.
        sizes: KV heads, their entries, and slots of a page.
        tokens: sequences, and new tokens of each.
    """
    num_heads, head_dim, page_size = sizes
    of_page = num_heads * page_size * head_dim
    of_pool = {"num_pages": max(2**16, 2**31 // of_page) + 1, "num_kv_heads": num_heads}
    pages = _pages(CODECS[codec], of_pool, {"page_size": page_size, "head_dim": head_dim})
    heads = jnp.zeros((*tokens, num_heads, head_dim), jnp.bfloat16)
    return (pages, pages), (heads, heads), jnp.zeros(tokens, jnp.int32), jnp.int32(0)


def write(pools: Any, heads: Any, slots: jax.Array, page_offset: jax.Array) -> Any:
    """Write heads, rotated as the codecs of caches do, by the GPU kernel."""
    rotations = tuple(hadamard(own.shape[-1]) for own in heads)
    return page_write_gpu.write_heads(pools, heads, rotations, slots, page_offset=page_offset)


def compile_write(
    mesh: Mesh, codec: str, sizes: tuple[int, int, int], tokens: tuple[int, int], folder: Path
) -> dict[str, Report]:
    """Compile a write, as `make_write` has it, and return a report for its kernel."""
    arguments = jax.eval_shape(functools.partial(make_write, codec, sizes, tokens))
    return _compile(lambda given: write(*given), arguments, mesh, folder)


def _codecs_of(name: str) -> tuple[Codec | None, Codec | None]:
    """Return the codecs of keys and values; None is float16."""
    return (None, None) if name == "f16" else find_codecs(*name.split("/"))


def _pages(codec: Codec | None, of_pool: dict[str, int], sizes: dict[str, int]) -> Pages:
    pages = make_pages(codec or CODECS["bf16"], of_pool, sizes, "gpu")
    return pages if codec else dataclasses.replace(pages, data=pages.data.astype(jnp.float16))


def _compile(call: Callable[..., Any], arguments: Any, mesh: Mesh, folder: Path) -> dict[str, Report]:
    """Compile a call on arguments of such shapes, and return a report for each kernel.

    For an H200, assert that for an H100 Mosaic GPU's compiler is given the same kernels.
    """
    dumps = {
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    os.environ |= dumps
    try:
        lowered, modules = _lower(call, arguments, mesh)
        lowered.compile()
    finally:
        for name in dumps:
            del os.environ[name]
    if mesh.devices.flat[0].device_kind == "NVIDIA H200":
        assert modules
        assert _lower(call, arguments, find_target("h100"))[1] == modules, "an H100 has other kernels"
    return {file.stem: _report(file) for file in folder.glob("*.ptxas")}


def _lower(call: Callable[..., Any], arguments: Any, mesh: Mesh) -> tuple[Lowered, list[str]]:
    """Lower a call for a machine; return the program, and what Mosaic GPU's compiler is given, by kernel."""
    modules = []

    def observed(module, **options):
        # Kernels are counted in a process.
        modules.append(re.sub(r'dump_basename = "\w+"', "", str(module)))
        return serialize(module, **options)

    serialize = mosaic._run_serde_pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "_run_serde_pass", observed)
        lowered = jax.jit(call).lower(shapes_on(mesh, arguments))
    return lowered, modules


def _report(file: Path) -> Report:
    said, resources = file.read_text(), file.with_suffix(".resources.txt").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    assembly = file.with_suffix(".ptx").read_text()
    axes = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", assembly)
    code = file.with_suffix(".sass_ctrl")
    text = code.read_text() if code.exists() else None
    return Report(
        int(registers), sum(map(int, spilled)), int(shared), set(map(int, axes)), text or None, assembly
    )
