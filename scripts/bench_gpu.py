"""Checks the GPU kernels of attention on a Hopper GPU, then times them beside peers; prints JSON lines.

    PYTHONPATH=. python scripts/bench_gpu.py [--out FILE] [--only decode_8_8192] [--interpret]

First every shape of `kernels_pallas.paged_attention.shapes` and `CHECKED` that the kernel takes is compared
with the float32 definition on the device, in every codec: `error` is the relative error of the worst row,
`allowed` twice that of the definition over the same pool with queries and outputs in bfloat16; so are
latents. Then decode steps of Llama 3's heads are timed, and of DeepSeek-V3's, all and those of one of eight
devices: `us` a call, the bytes of keys and values that a call must read a second, and their share of a copy
that is measured at the start. A loop in one program calls each kernel on another
layer every time, so that the L2 cache holds nothing of it; the shortest of `REPEATS` runs counts. A peer that
does not run says why. `--interpret` makes the checks of the named shapes alone, on a CPU.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.paged_attention import PagedArguments, Pages, pallas_gpu, reference, xla
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

NUM_KV_HEADS, HEAD_DIM = 8, 128
Codec = Literal["bf16", "int8", "fp8_e4m3", "fp8_e5m2"]
CODECS: tuple[Codec, ...] = get_args(Codec)
CHECKED = {
    "page_128": Shape(8, 2, 128, page_size=128, time=16, totals=(16, 2000, 0, 4097)),
    "head_192": Shape(8, 2, 192, page_size=64, time=1, totals=(1, 700, 5000)),
    "head_256": Shape(8, 2, 256, page_size=32, time=4, totals=(4, 700, 5000), soft_cap=30.0),
    "window": Shape(32, 8, 128, page_size=16, time=1, totals=(1, 700, 5000), window=1024),
    "large_batch": Shape(32, 8, 128, page_size=64, time=1, totals=tuple(range(0, 3072, 24))),
}
# Of DeepSeek-V3.
LATENT_DIM, ROPE_DIM = 512, 64
CHECKED_LATENTS = {
    "latent_128_heads": Shape(128, 1, LATENT_DIM, page_size=64, time=1, totals=(1, 700, 5000)),
    "latent_16_heads": Shape(16, 1, LATENT_DIM, page_size=16, time=4, totals=(4, 700, 0, 5000), window=1024),
}
REPEATS = 3
# Bytes that the layers of a timed pool take together, past an L2 cache of 50 MB.
POOL_BYTES = 2**31
# Bytes that a timed program reads, so that it takes at least some milliseconds.
READ_BYTES = 2**35


class Case(NamedTuple):
    """A decode step: rows of one length, and query heads on the KV heads."""

    batch: int
    context: int
    num_heads: int
    page_size: int
    codec: Codec


CASES = {
    f"decode_{batch}_{context}_heads_{heads}_page_{page_size}_{codec}": Case(
        batch, context, heads, page_size, codec
    )
    for heads, sizes in (
        (32, ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (64, 8192), (256, 1024))),
        (64, ((64, 8192),)),
    )
    for batch, context in sizes
    for page_size in (64, 16)
    for codec in CODECS[:3]
}
LATENT_CASES = {
    f"latent_{batch}_{context}_heads_{heads}_page_{page_size}": Case(batch, context, heads, page_size, "bf16")
    for heads in (128, 16)
    for batch, context in ((1, 8192), (1, 131072), (64, 8192), (256, 1024))
    for page_size in (64, 16)
}


def encode(numbers: jax.Array, codec: Codec) -> Pages:
    """Return float32 pages in a codec, with a scale for each token and head."""
    if codec == "bf16":
        return Pages(numbers.astype(jnp.bfloat16))
    if codec == "int8":
        scale = jnp.abs(numbers).max(-1) / 127
        return Pages(jnp.round(numbers / scale[..., None]).astype(jnp.int8), scale)
    dtype = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}[codec]
    scale = jnp.abs(numbers).max(-1) / float(jnp.finfo(dtype).max)
    shares = numbers / scale[..., None]
    return Pages(jax.lax.bitcast_convert_type(shares.astype(dtype), jnp.uint8), scale, entry=codec)


def make_call(shape: Shape, codec: Codec) -> tuple[PagedArguments, int]:
    """Return a call over pages in random order, of the second of two layers, and the pages of a layer."""
    keys = jax.random.split(jax.random.key(0), 4)
    pages_of = [-(-total // shape.page_size) for total in shape.totals]
    num_pages = sum(pages_of) + 1
    order = iter(jax.random.permutation(keys[0], num_pages).tolist())
    width = max(pages_of) + 2
    table = [[next(order) for _ in range(count)] + [-1] * (width - count) for count in pages_of]
    pool = (2 * num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    stored = [encode(jax.random.normal(key, pool), codec) for key in keys[1:3]]
    query = jax.random.normal(keys[3], (len(table), shape.time, shape.num_heads, shape.head_dim))
    totals = jnp.array(shape.totals, jnp.int32)
    lens = jnp.minimum(totals, shape.time)
    offset = jnp.int32(num_pages)
    arguments = PagedArguments(
        query, stored[0], stored[1], jnp.array(table, jnp.int32), totals - lens, lens, offset
    )
    return arguments, num_pages


def worst_row(got: jax.Array, expected: jax.Array) -> float:
    """Return the relative error of the worst row that is not zero; infinite where one that must be is not."""
    size = jnp.linalg.norm(expected, axis=-1)
    difference = jnp.linalg.norm(got.astype(jnp.float32) - expected, axis=-1)
    errors = jnp.where(
        size > 0, difference / jnp.where(size > 0, size, 1.0), jnp.where(difference > 0, jnp.inf, 0.0)
    )
    return float(errors.max())


def check(name: str, shape: Shape, codec: Codec) -> dict[str, Any] | None:
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
    errors = compare(
        pallas_gpu.paged_attention, reference, arguments, rounded, num_pages=num_pages, **options
    )
    return {"check": name, "codec": codec, **errors}


def check_latents(name: str, shape: Shape) -> dict[str, Any]:
    """Compare a call over latents with its definition; they are made as keys whose last part is rotated."""
    paged, num_pages = make_call(dataclasses.replace(shape, head_dim=LATENT_DIM + ROPE_DIM), "bf16")
    query, keys = paged.query, paged.keys.data
    pages = Pages(keys[..., :LATENT_DIM]), Pages(keys[..., LATENT_DIM:])
    arguments = LatentArguments(query[..., :LATENT_DIM], query[..., LATENT_DIM:], *pages, *paged[3:7])
    rounded = arguments._replace(
        query=arguments.query.astype(jnp.bfloat16), rope_query=arguments.rope_query.astype(jnp.bfloat16)
    )
    options = {"num_pages": num_pages, "scale": (LATENT_DIM + ROPE_DIM) ** -0.5, "window": shape.window}
    implementations = latent_gpu.latent_attention, latent_attention.reference
    return {
        "check": name,
        "codec": "bf16",
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


def seconds(program: Callable[..., Any], *arguments: Any) -> float:
    """Return the shortest time of `REPEATS` runs, after one that compiles."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def measure_copy() -> float:
    """Return the bytes a second that a copy of 4 GB reads and writes."""
    x = jnp.zeros(2**30, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def repeated(attend: Callable[[jax.Array, jax.Array], jax.Array], num_calls: int, num_layers: int) -> Any:
    """Return a program that attends again and again, each query made of what was attended before."""

    @jax.jit
    def program(query: jax.Array) -> jax.Array:
        def step(i: jax.Array, query: jax.Array) -> jax.Array:
            return query + attend(query, i % num_layers).astype(query.dtype)

        return jax.lax.fori_loop(0, num_calls, step, query)

    return program


def time_case(case: Case, copied: float) -> Iterator[dict[str, Any]]:
    """Time jkv's kernel, its plain JAX and, where a peer has the codec, peers."""
    width = -(-case.context // case.page_size)
    num_pages = case.batch * width
    token_bytes = 2 * NUM_KV_HEADS * (2 * HEAD_DIM if case.codec == "bf16" else HEAD_DIM + 4)
    call_bytes = case.batch * case.context * token_bytes
    num_layers = max(1, POOL_BYTES // call_bytes)
    num_calls = max(8, READ_BYTES // call_bytes // 8)
    keys = jax.random.split(jax.random.key(0), 2)
    pool = (num_layers * num_pages, NUM_KV_HEADS, case.page_size, HEAD_DIM)
    make = jax.jit(
        lambda key: encode(jax.random.normal(key, pool, jnp.bfloat16).astype(jnp.float32), case.codec)
    )
    stored = [make(key) for key in keys]
    table = jax.random.permutation(keys[0], num_pages).astype(jnp.int32).reshape(case.batch, width)
    ends = jnp.full(case.batch, case.context, jnp.int32)
    query = jax.random.normal(keys[1], (case.batch, 1, case.num_heads, HEAD_DIM), jnp.bfloat16)

    def ours(implementation: Any, query: jax.Array, layer: jax.Array) -> jax.Array:
        ones = jnp.ones_like(ends)
        arguments = PagedArguments(query, stored[0], stored[1], table, ends - ones, ones, layer * num_pages)
        return implementation(arguments, num_pages=num_pages, scale=HEAD_DIM**-0.5)[0]

    runners: dict[str, Callable[[], Any]] = {
        "jkv": lambda: functools.partial(ours, pallas_gpu.paged_attention),
        "jkv xla": lambda: functools.partial(ours, xla),
    }
    if case.codec == "bf16":
        data = [pages.data for pages in stored]
        runners["jax pallas triton"] = lambda: jax_triton(data, table, ends, num_pages)
        for name in ("cudnn", "xla"):
            runners[f"jax.nn {name}, contiguous"] = functools.partial(
                jax_nn, name, case, num_layers, token_bytes
            )
    yield from time_runners(runners, case, query, call_bytes, (num_calls, num_layers), copied)


def time_latent_case(case: Case, copied: float) -> Iterator[dict[str, Any]]:
    """Time jkv's kernel of latents, and its plain JAX."""
    width = -(-case.context // case.page_size)
    num_pages = case.batch * width
    call_bytes = case.batch * case.context * 2 * (LATENT_DIM + ROPE_DIM)
    num_layers, num_calls = max(1, POOL_BYTES // call_bytes), max(8, READ_BYTES // call_bytes // 8)
    keys = jax.random.split(jax.random.key(0), 4)
    pool = (num_layers * num_pages, 1, case.page_size)
    pages = [
        Pages(jax.random.normal(key, (*pool, dim), jnp.bfloat16))
        for key, dim in zip(keys[:2], (LATENT_DIM, ROPE_DIM), strict=True)
    ]
    table = jax.random.permutation(keys[2], num_pages).astype(jnp.int32).reshape(case.batch, width)
    ends = jnp.full(case.batch, case.context, jnp.int32)
    query = jax.random.normal(keys[3], (case.batch, 1, case.num_heads, LATENT_DIM), jnp.bfloat16)

    def ours(implementation: Any, query: jax.Array, layer: jax.Array) -> jax.Array:
        ones = jnp.ones_like(ends)
        arguments = LatentArguments(
            query, query[..., :ROPE_DIM], pages[0], pages[1], table, ends - ones, ones, layer * num_pages
        )
        return implementation(arguments, num_pages=num_pages, scale=(LATENT_DIM + ROPE_DIM) ** -0.5)[0]

    runners: dict[str, Callable[[], Any]] = {
        "jkv latent": lambda: functools.partial(ours, latent_gpu.latent_attention),
        "jkv latent xla": lambda: functools.partial(ours, latent_attention.xla),
    }
    yield from time_runners(runners, case, query, call_bytes, (num_calls, num_layers), copied)


def time_runners(
    runners: dict[str, Callable[[], Any]],
    case: Case,
    query: jax.Array,
    call_bytes: int,
    counts: tuple[int, int],
    copied: float,
) -> Iterator[dict[str, Any]]:
    """Time each of a case's runners, in as many calls over as many layers as `counts` says."""
    for name, make_attend in runners.items():
        line: dict[str, Any] = {"runs": name, **case._asdict()}
        try:
            took = seconds(repeated(make_attend(), *counts), query) / counts[0]
        # Whatever keeps a peer from running is reported in its line.
        except Exception as error:
            yield line | {"error": "".join(traceback.format_exception_only(error)).strip()[-300:]}
            continue
        rate = call_bytes / took
        yield line | {"us": took * 1e6, "gb_per_s": rate / 1e9, "share_of_copy": rate / copied}


def jax_triton(data: list[jax.Array], table: jax.Array, ends: jax.Array, num_pages: int) -> Any:
    """Return JAX's paged attention on Triton, over copies of the pools with heads first, as it takes them."""
    from jax.experimental.pallas.ops.gpu import paged_attention as peer

    heads_first = [jax.jit(lambda pool: pool.swapaxes(0, 1))(pool) for pool in data]
    block = math.gcd(table.shape[1], 8)
    cut = {"pages_per_compute_block": block, "k_splits": math.gcd(table.shape[1] // block, 16)}

    def attend(query: jax.Array, layer: jax.Array) -> jax.Array:
        scaled = query[:, 0] * jnp.asarray(HEAD_DIM**-0.5, query.dtype)
        return peer.paged_attention(scaled, *heads_first, table + layer * num_pages, ends, **cut)[:, None]

    return attend


def jax_nn(implementation: Any, case: Case, num_layers: int, token_bytes: int) -> Any:
    """Return `jax.nn.dot_product_attention` over a cache that lies whole, row by row."""
    shape = (num_layers, case.batch, case.context, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    ends = jnp.full(case.batch, case.context, jnp.int32)
    ones = jnp.ones_like(ends)

    def attend(query: jax.Array, layer: jax.Array) -> jax.Array:
        own = (jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (keys, values))
        lengths = {"query_seq_lengths": ones, "key_value_seq_lengths": ends}
        return jax.nn.dot_product_attention(query, *own, implementation=implementation, **lengths)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the lines, printed too")
    parser.add_argument("--only", default="", help="check and time only what has this in its name")
    parser.add_argument("--interpret", action="store_true", help="check in the interpreter, and time nothing")
    parser.add_argument("--limit-s", type=float, default=540, help="start no case after so many seconds")
    options = parser.parse_args()
    start = time.perf_counter()
    lines = []

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with contextlib.ExitStack() as stack:
        if options.interpret:
            from jax.experimental.pallas import mosaic_gpu as plgpu

            stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        for name, shape in (SHAPES if options.interpret else SHAPES | CHECKED).items():
            for codec in CODECS:
                if options.only in f"{name}_{codec}" and (line := check(name, shape, codec)) is not None:
                    say(line)
        for name, shape in CHECKED_LATENTS.items():
            if options.only in name and not options.interpret:
                say(check_latents(name, shape))
    if not all(line["passed"] for line in lines):
        sys.exit("the kernel is wrong: nothing is timed")
    if options.interpret:
        return
    # JAX's own kernel on Triton is deprecated, and says so.
    warnings.simplefilter("ignore", DeprecationWarning)
    copied = measure_copy()
    say({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "copy_gb_per_s": copied / 1e9})
    # Latents first: they are fewer, and what the time does not suffice for is said.
    for name, case in (LATENT_CASES | CASES).items():
        if options.only not in name:
            continue
        if time.perf_counter() - start > options.limit_s:
            say({"stopped_before": name})
            break
        for line in (time_latent_case if name in LATENT_CASES else time_case)(case, copied):
            say(line)
    print_table(line for line in lines if "us" in line)


def print_table(lines: Iterator[dict[str, Any]]) -> None:
    """Print the times for docs/performance.md."""
    columns = ("runs", *Case._fields, "us", "gb_per_s", "share_of_copy")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for line in lines:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in map(line.get, columns))
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
