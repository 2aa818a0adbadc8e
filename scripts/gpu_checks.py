"""Compares the GPU kernels of attention with their definitions, on the device that is here.

A line for each shape and codec that a kernel takes: `error` is the relative error of the worst row, `allowed`
twice that of the definition over the same pool with queries and outputs in bfloat16.
"""

import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jkv.cache import codec as codecs
from jkv.cache.encoding import encode as encode_heads
from jkv.cache.encoding import encode_run
from jkv.cache.runs import num_runs
from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.paged_attention import PagedArguments, Pages, Tiling, pallas_gpu, reference
from kernels_pallas.paged_attention.reference import heads_of
from kernels_pallas.paged_attention.shapes import SHAPES, Shape
from scripts.gpu_cases import LATENT_DIM, ROPE_DIM

CODECS = ("bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4_token", "int4")
CHECKED = {
    "page_128": Shape(8, 2, 128, page_size=128, time=16, totals=(16, 2000, 0, 4097)),
    "head_96": Shape(8, 2, 96, page_size=16, time=4, totals=(4, 700, 5000), has_sinks=True),
    "head_192": Shape(8, 2, 192, page_size=64, time=1, totals=(1, 700, 5000)),
    "head_256": Shape(8, 2, 256, page_size=32, time=4, totals=(4, 700, 5000), soft_cap=30.0),
    "window": Shape(32, 8, 128, page_size=16, time=1, totals=(1, 700, 5000), window=1024),
    "prefill": Shape(32, 8, 128, page_size=64, time=512, totals=(512, 3000, 0)),
    "prefill_256": Shape(8, 2, 256, page_size=16, time=300, totals=(20, 2000), window=1024, soft_cap=30.0),
    "prefill_64": Shape(2, 2, 64, page_size=128, time=60, totals=(0, 700), has_sinks=True),
    "large_batch": Shape(32, 8, 128, page_size=64, time=1, totals=tuple(range(0, 1536, 12))),
}
CHECKED_LATENTS = {
    "latent_128_heads": Shape(128, 1, LATENT_DIM, page_size=64, time=1, totals=(1, 700, 5000)),
    "latent_16_heads": Shape(16, 1, LATENT_DIM, page_size=16, time=4, totals=(4, 700, 0, 5000), window=1024),
    "latent_prefill": Shape(16, 1, LATENT_DIM, page_size=64, time=100, totals=(100, 3000, 0)),
}
LATENT_CODECS = ("bf16", "int8", "fp8_e4m3", "int4_token")
# That share the checks: their programs take seconds to compile, and no time to run. Each keeps what memory it
# had of the GPU.
MAX_PROCESSES = 6


def encode(numbers: jax.Array, codec: str) -> Pages:
    """Return float32 pages in a codec, not rotated, with scales of tokens and heads, or of runs of int4."""
    if codec == "bf16":
        return Pages(numbers.astype(jnp.bfloat16))
    if codec == "int8":
        scale = jnp.abs(numbers).max(-1) / 127
        return Pages(jnp.round(numbers / scale[..., None]).astype(jnp.int8), scale)
    if codec == "int4_token":
        stored = encode_heads(dataclasses.replace(codecs.CODECS[codec], is_rotated=False), numbers)
        return Pages(stored.data, stored.scale, stored.zero, entry="int4")
    if codec == "int4":
        *pages, page_size, head_dim = numbers.shape
        span = codecs.CODECS[codec].span(page_size)
        stored = encode_run(numbers.reshape(*pages, -1, span, head_dim))
        return Pages(stored.data.reshape(*pages, page_size, -1), stored.scale, stored.zero, entry="int4")
    dtype = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}[codec]
    entry: Any = codec
    scale = jnp.abs(numbers).max(-1) / float(jnp.finfo(dtype).max)
    shares = numbers / scale[..., None]
    return Pages(jax.lax.bitcast_convert_type(shares.astype(dtype), jnp.uint8), scale, entry=entry)


def make_call(shape: Shape, codec: str) -> tuple[PagedArguments, int]:
    """Return a call over pages in random order, of the second of two layers, and the pages of a layer."""
    keys = jax.random.split(jax.random.key(0), 4)
    pages_of = [-(-total // shape.page_size) for total in shape.totals]
    num_pages = sum(pages_of) + 1
    order = iter(jax.random.permutation(keys[0], num_pages).tolist())
    width = max(pages_of) + 2
    table = [[next(order) for _ in range(count)] + [-1] * (width - count) for count in pages_of]
    pool = (2 * num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    raw_keys, raw_values = (jax.random.normal(key, pool) for key in keys[1:3])
    stored = encode(raw_keys, codec), encode(raw_values, codecs.OF_VALUES.get(codec, codec))
    query = jax.random.normal(keys[3], (len(table), shape.time, shape.num_heads, shape.head_dim))
    totals = jnp.array(shape.totals, jnp.int32)
    lens = jnp.minimum(totals, shape.time)
    offset = jnp.int32(num_pages)
    arguments = PagedArguments(
        query, stored[0], stored[1], jnp.array(table, jnp.int32), totals - lens, lens, offset
    )
    return arguments._replace(recent=recent_keys(arguments, Pages(raw_keys))), num_pages


def recent_keys(arguments: PagedArguments, raw: Pages) -> jax.Array | None:
    """Return the keys as they were given from each query's own run on; None where keys have no such runs."""
    if (span := arguments.keys.run_slots) is None:
        return None
    heads = heads_of(raw, jnp.maximum(arguments.page_table, 0) + arguments.page_offset)
    begins = arguments.starts - arguments.starts % span
    places = begins[:, None] + jnp.arange(num_runs(arguments.query.shape[1], span) * span, dtype=jnp.int32)
    recent = jnp.take_along_axis(heads, places[:, :, None, None], axis=1, mode="clip")
    return recent.swapaxes(1, 2).astype(jnp.bfloat16)


def worst_row(got: jax.Array, expected: jax.Array) -> float:
    """Return the relative error of the worst row that is not zero; infinite where one that must be is not."""
    size = jnp.linalg.norm(expected, axis=-1)
    difference = jnp.linalg.norm(got.astype(jnp.float32) - expected, axis=-1)
    errors = jnp.where(
        size > 0, difference / jnp.where(size > 0, size, 1.0), jnp.where(difference > 0, jnp.inf, 0.0)
    )
    return float(errors.max())


def check(name: str, shape: Shape, codec: str, tiling: Tiling) -> dict[str, Any] | None:
    """Compare one call with its definition; None where the kernel does not take it."""
    arguments, num_pages = make_call(shape, codec)
    if pallas_gpu.refusal(arguments) is not None:
        return None
    sinks = jnp.linspace(-1.0, 1.0, shape.num_heads) if shape.has_sinks else None
    options = {
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "soft_cap": shape.soft_cap,
        "sinks": sinks,
    }
    rounded = arguments._replace(query=arguments.query.astype(jnp.bfloat16))
    kernel = functools.partial(pallas_gpu.paged_attention, tiling=tiling)
    errors = compare(kernel, reference, arguments, rounded, num_pages=num_pages, **options)
    return {"check": name, "codec": codec, **errors}


def check_latents(name: str, shape: Shape, codec: str) -> dict[str, Any]:
    """Compare a call over latents with its definition; they are made as keys whose last part is rotated."""
    paged, num_pages = make_call(dataclasses.replace(shape, head_dim=LATENT_DIM + ROPE_DIM), "bf16")
    query, keys = paged.query, paged.keys.data
    pages = encode(keys[..., :LATENT_DIM].astype(jnp.float32), codec), Pages(keys[..., LATENT_DIM:])
    arguments = LatentArguments(query[..., :LATENT_DIM], query[..., LATENT_DIM:], *pages, *paged[3:7])
    rounded = arguments._replace(
        query=arguments.query.astype(jnp.bfloat16), rope_query=arguments.rope_query.astype(jnp.bfloat16)
    )
    options = {"num_pages": num_pages, "scale": (LATENT_DIM + ROPE_DIM) ** -0.5, "window": shape.window}
    implementations = latent_gpu.latent_attention, latent_attention.reference
    return {
        "check": name,
        "codec": codec,
        **compare(*implementations, arguments, rounded, **options),
    }


def compare(kernel: Any, definition: Any, arguments: Any, rounded: Any, **options: Any) -> dict[str, Any]:
    """Return a kernel's error, and twice that of the definition of rounded arguments."""
    kernel, definition = (jax.jit(functools.partial(each, **options)) for each in (kernel, definition))
    expected, _ = definition(arguments)
    own, _ = definition(rounded)
    out, _ = kernel(arguments)
    error, allowed = worst_row(out, expected), 2 * worst_row(own.astype(jnp.float32), expected)
    return {"error": error, "allowed": allowed, "passed": error <= allowed}


def checks(
    shapes: Mapping[str, Shape], latents: Mapping[str, Shape], only: str, tiling: Tiling
) -> list[Callable[[], dict[str, Any] | None]]:
    """Return what compares each call that has `only` in its name, latents first."""
    calls = [
        (f"{name}_{codec}", functools.partial(check_latents, name, shape, codec))
        for name, shape in latents.items()
        for codec in LATENT_CODECS
    ] + [
        (f"{name}_{codec}", functools.partial(check, name, shape, codec, tiling))
        for name, shape in shapes.items()
        for codec in CODECS
    ]
    return [call for name, call in calls if only in name]


def named_checks(only: str, *, is_interpreted: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of all shapes; interpreted, of those of the tests alone: larger ones take minutes."""
    if is_interpreted:
        calls = checks(SHAPES, {}, only, Tiling(is_interpreted=True))
        yield from (line for call in calls if (line := call()) is not None)
        return
    calls = checks(CHECKED | SHAPES, CHECKED_LATENTS, only, Tiling())
    count = min(MAX_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        lines = [processes.submit(call) for call in calls]
        yield from (line for each in lines if (line := each.result()) is not None)
