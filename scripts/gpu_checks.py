"""Compares the GPU kernels of attention with their definitions, on the device that is here.

A line for each shape and codec that a kernel takes: `error` is the relative error of the worst row, `allowed`
twice that of the definition over the same pool with queries and outputs in bfloat16, as the kernel has them,
or in float16 over a pool of that. Some are made again over a stripe of the pages, and with the pages at the
end of a pool of more than 2^31 entries.
"""

import dataclasses
import functools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jkv.cache import codec as codecs
from jkv.cache.encoding import encode as encode_heads
from jkv.cache.encoding import encode_run
from jkv.cache.runs import num_runs
from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.paged_attention import PagedArguments, Pages, Stripe, Tiling, pallas_gpu, reference
from kernels_pallas.paged_attention.reference import heads_of
from kernels_pallas.paged_attention.shapes import SHAPES, Shape
from scripts.gpu_cases import HEAD_DIM, LATENT_DIM, ROPE_DIM, Case, all_cases

CODECS = ("bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4_token", "int4")
# Of some shapes: float16, and scales of heads.
MORE_CODECS = ("f16", "int8_static", "fp8_e4m3_static", "fp8_e5m2_static")
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
LATENT_CODECS = ("bf16", "f16", "int8", "fp8_e4m3", "fp8_e5m2", "int4_token")
WITH_MORE_CODECS = ("head_256", "window", "prefill")
# Shapes and codecs that are checked again.
STRIPES = {"window": ("bf16", "int8"), "prefill": ("bf16",), "latent_16_heads": ("bf16",)}
LARGE_POOLS = {"window": ("bf16", "int8"), "prefill": ("bf16",), "latent_128_heads": ("bf16",)}
# What a large pool has at least before the pages that are attended to.
LARGE_PAGES, LARGE_ENTRIES = 2**16, 2**31
# That share the checks: their programs take seconds to compile, and no time to run. Each keeps what memory it
# had of the GPU.
MAX_PROCESSES = 6


class Check(NamedTuple):
    """A call that is compared with its definition.

    Attributes:
        shape: its sizes; those of latents are of keys, rotated part left out.
        codec: of keys and values, or of latents.
        base: name of the shape.
        is_latent: whether queries attend to latents.
        over: what of the pool: all that the shape needs; of two stripes the second; or pages at the end of a
            large one, with ids above 65,536.
    """

    shape: Shape
    codec: str
    base: str
    is_latent: bool = False
    over: Literal["pool", "stripe", "large_pool"] = "pool"

    @property
    def name(self) -> str:
        """Words by which it is asked for, but the codec."""
        return self.base if self.over == "pool" else f"{self.base}_{self.over}"

    def covers(self, case: Case) -> bool:
        """Return whether a kernel of a timed case is checked."""
        is_as_wide = self.is_latent or self.shape.head_dim == HEAD_DIM
        return is_as_wide and (self.is_latent, self.codec) == (case.is_latent, case.codec)


def encode(numbers: jax.Array, codec: str) -> Pages:
    """Return float32 pages in a codec, not rotated, with scales of tokens and heads, of heads, or of runs."""
    if codec in _FLOATS:
        return Pages(numbers.astype(_FLOATS[codec]))
    if codec == "int4_token":
        stored = encode_heads(dataclasses.replace(codecs.CODECS[codec], is_rotated=False), numbers)
        return Pages(stored.data, stored.scale, stored.zero, entry="int4")
    if codec == "int4":
        *pages, page_size, head_dim = numbers.shape
        span = codecs.CODECS[codec].span(page_size)
        stored = encode_run(numbers.reshape(*pages, -1, span, head_dim))
        return Pages(stored.data.reshape(*pages, page_size, -1), stored.scale, stored.zero, entry="int4")
    entry: Any = codec.removesuffix("_static")
    largest = 127 if entry == "int8" else float(jnp.finfo(_FP8[entry]).max)
    axes = -1 if codec == entry else (0, 2, 3)
    scale = jnp.abs(numbers).max(axes, keepdims=True) / largest
    shares, scale = numbers / scale, scale.squeeze(axes)
    if entry == "int8":
        return Pages(jnp.round(shares).astype(jnp.int8), scale)
    return Pages(jax.lax.bitcast_convert_type(shares.astype(_FP8[entry]), jnp.uint8), scale, entry=entry)


_FLOATS = {"bf16": jnp.bfloat16, "f16": jnp.float16}
_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def make_call(shape: Shape, codec: str) -> tuple[PagedArguments, int]:
    """Return a call over pages in random order, of the second of two layers, and the pages of a layer."""
    keys = jax.random.split(jax.random.key(0), 4)
    pages_of = [-(-total // shape.page_size) for total in shape.totals]
    num_pages = sum(pages_of) + 1
    order = iter(jax.random.permutation(keys[0], num_pages).tolist())
    # Even, for stripes.
    width = -(-(max(pages_of) + 2) // 2) * 2
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


def run(check: Check, tiling: Tiling) -> dict[str, Any] | None:
    """Compare one call with its definition; None where the kernel does not take it."""
    if check.is_latent:
        arguments, num_pages, options = _latent_call(check)
        kernel, definition = latent_gpu.latent_attention, latent_attention.reference
        refusal = latent_gpu.refusal(arguments, tiling)
    else:
        (arguments, num_pages), shape = make_call(check.shape, check.codec), check.shape
        kernel, definition = pallas_gpu.paged_attention, reference
        refusal = pallas_gpu.refusal(arguments, tiling)
        sinks = jnp.linspace(-1.0, 1.0, shape.num_heads) if shape.has_sinks else None
        options = {"scale": shape.head_dim**-0.5, "soft_cap": shape.soft_cap, "sinks": sinks}
    if refusal is not None:
        return None
    if check.over == "stripe":
        arguments = arguments._replace(
            page_table=arguments.page_table[:, 1::2], stripe=Stripe(jnp.int32(2), jnp.int32(1))
        )
    dtype = jnp.float16 if check.codec == "f16" else jnp.bfloat16
    own, num_own_pages = with_queries(arguments, dtype), num_pages
    if check.over == "large_pool":
        own, num_own_pages = in_large_pool(own, num_pages)
    options |= {"window": check.shape.window}
    kernel = jax.jit(functools.partial(kernel, num_pages=num_own_pages, tiling=tiling, **options))
    definition = jax.jit(functools.partial(definition, num_pages=num_pages, **options))
    return {"check": check.name, "codec": check.codec, **compare(kernel(own)[0], definition, arguments)}


def with_queries(arguments: Any, dtype: Any) -> Any:
    """Return a call with its queries in a dtype."""
    names = ("query", "rope_query") if isinstance(arguments, LatentArguments) else ("query",)
    return arguments._replace(**{name: getattr(arguments, name).astype(dtype) for name in names})


def _latent_call(check: Check) -> tuple[LatentArguments, int, dict[str, Any]]:
    """Return a call over latents, which are made as keys whose last part is rotated."""
    shape = dataclasses.replace(check.shape, head_dim=LATENT_DIM + ROPE_DIM)
    paged, num_pages = make_call(shape, "f16" if check.codec == "f16" else "bf16")
    query, keys = paged.query, paged.keys.data
    pages = encode(keys[..., :LATENT_DIM].astype(jnp.float32), check.codec), Pages(keys[..., LATENT_DIM:])
    arguments = LatentArguments(query[..., :LATENT_DIM], query[..., LATENT_DIM:], *pages, *paged[3:7])
    return arguments, num_pages, {"scale": shape.head_dim**-0.5}


def in_large_pool(arguments: Any, num_pages: int) -> tuple[Any, int]:
    """Return a call with its pages at the end of a large pool, one layer but for a page, and its pages.

    Args:
        arguments: over the second of two layers.
        num_pages: pages of each.
    """
    names = ("latents", "ropes") if isinstance(arguments, LatentArguments) else ("keys", "values")
    pools = [getattr(arguments, name) for name in names]
    num_empty = max(LARGE_PAGES, -(-LARGE_ENTRIES // pools[0].data[0].size))

    @jax.jit
    def enlarge(array: jax.Array) -> jax.Array:
        empty = jnp.zeros((num_empty, *array.shape[1:]), array.dtype)
        return jnp.concatenate([empty, array[num_pages:]])

    table = arguments.page_table
    own = arguments._replace(
        page_table=jnp.where(table >= 0, table + num_empty - 1, table),
        page_offset=jnp.int32(1),
        **dict(zip(names, jax.tree.map(enlarge, pools), strict=True)),
    )
    return own, num_empty + num_pages - 1


def compare(out: jax.Array, definition: Any, arguments: Any) -> dict[str, Any]:
    """Return a kernel's error, and twice that of the definition with queries and outputs in its dtype."""
    # One program for both, which computes in float32 whatever it is given.
    rounded = with_queries(with_queries(arguments, out.dtype), jnp.float32)
    (expected, _), (own, _) = definition(arguments), definition(rounded)
    error, allowed = worst_row(out, expected), 2 * worst_row(own.astype(out.dtype), expected)
    return {"error": error, "allowed": allowed, "passed": error <= allowed}


def checks(shapes: Mapping[str, Shape], latents: Mapping[str, Shape], only: str) -> list[Check]:
    """Return the checks that have `only` in their names, or are of what is timed by it; codecs take turns."""
    found = [
        Check(shape, codec, name, is_latent=is_latent)
        for group, of_group, is_latent in ((latents, LATENT_CODECS, True), (shapes, CODECS, False))
        for name, shape in group.items()
        for codec in of_group + (MORE_CODECS if name in WITH_MORE_CODECS else ())
    ]
    found += [
        check._replace(over=over)
        for over, asked in (("stripe", STRIPES), ("large_pool", LARGE_POOLS))
        for check in found
        if check.codec in asked.get(check.base, ())
    ]
    # One of every codec first: of those that no check has ended of nothing is timed.
    turns: Counter[tuple[bool, str]] = Counter()
    order = []
    for check in found:
        kind = check.is_latent, check.codec
        order.append((turns[kind], check))
        turns[kind] += 1
    found = [check for _, check in sorted(order, key=lambda turn: turn[0])]
    timed = [case for name, case in all_cases().items() if only in name]
    return [
        check
        for check in found
        if only in f"{check.name}_{check.codec}" or any(check.covers(case) for case in timed)
    ]


def named_checks(only: str, *, is_interpreted: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of all shapes; interpreted, of those of the tests alone: larger ones take minutes."""
    if is_interpreted:
        lines = (run(check, Tiling(is_interpreted=True)) for check in checks(SHAPES, {}, only))
        yield from (line for line in lines if line is not None)
        return
    count = min(MAX_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        ends = [
            processes.submit(run, check, Tiling())
            for check in checks(CHECKED | SHAPES, CHECKED_LATENTS, only)
        ]
        yield from (line for each in ends if (line := each.result()) is not None)
