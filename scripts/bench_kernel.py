"""Time paged attention on the TPU that is here: one JSON line a model, codec and implementation.

A step is repeated in one program, each with the last one's output as its query. GB/s count the pages that the
step sees, scales included; the share is of the chip's bandwidth.

    PYTHONPATH=. python scripts/bench_kernel.py --models llama3_8b,llama3_70b --codecs bf16,int8
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention

from jkv.cache.codec import CODECS
from kernels_pallas.paged_attention import PagedArguments, pallas_tpu, xla
from kernels_pallas.paged_attention.shapes import MODELS, Shape
from tests.kernels_pallas.models import make_pages

# Bytes a second of a chip's HBM, by the start of `jax.Device.device_kind`; from jax's own table of TPUs.
BANDWIDTHS = {"TPU v5 lite": 0.82e12, "TPU v5": 2.46e12, "TPU v6": 1.64e12, "TPU7x": 3.7e12}
_REPEATS, _JAX_BLOCK = 32, 512


def make_arguments(shape: Shape, codec: str) -> tuple[PagedArguments, int]:
    """Return a call whose pages lie in a random order, and the pages of its layer."""
    random = np.random.default_rng(0)
    width = -(-max(shape.totals) // shape.page_size)
    num_pages = len(shape.totals) * width
    table = jnp.asarray(random.permutation(num_pages).reshape(-1, width), jnp.int32)
    query = random.standard_normal(
        (len(shape.totals), shape.time, shape.num_heads, shape.head_dim), np.float32
    )
    of_pool = {"num_pages": num_pages, "num_kv_heads": shape.num_kv_heads}
    sizes = {"page_size": shape.page_size, "head_dim": shape.head_dim}
    keys, values = (make_pages(CODECS[codec], of_pool, sizes) for _ in range(2))
    lens = jnp.full(len(shape.totals), shape.time, jnp.int32)
    starts = jnp.asarray(shape.totals, jnp.int32) - lens
    return PagedArguments(jnp.asarray(query, jnp.bfloat16), keys, values, table, starts, lens, 0), num_pages


def seen_bytes(shape: Shape, arguments: PagedArguments) -> int:
    """Return the bytes of the pages that a step sees."""
    pools = jax.tree.leaves((arguments.keys, arguments.values))
    page_bytes = sum(pool.nbytes // pool.shape[0] for pool in pools if pool.ndim == 4)
    pages = 0
    for total in shape.totals:
        first = (
            0 if shape.window is None else max(0, total - shape.time - shape.window + 1) // shape.page_size
        )
        pages += -(-total // shape.page_size) - first
    return pages * page_bytes


def jax_operands(shape: Shape, arguments: PagedArguments) -> tuple[jax.Array, ...] | None:
    """Return what jax's own kernel takes for the same sizes; None where it does not take them."""
    is_taken = shape.time == 1 and shape.window is None and not shape.has_sinks and shape.head_dim == 128
    if not is_taken or arguments.keys.data.dtype != jnp.bfloat16:
        return None
    keys, values = (pages.data.swapaxes(0, 1) for pages in (arguments.keys, arguments.values))
    return keys, values, arguments.starts + arguments.lens, arguments.page_table


def microseconds(call: Callable[[Any, jax.Array], jax.Array], operands: Any, query: jax.Array) -> float:
    """Return the time of one call, the least of five programs of `_REPEATS`."""

    @jax.jit
    def program(operands: Any, query: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, x: call(operands, x), query)

    program(operands, query).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        program(operands, query).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times) / _REPEATS * 1e6


def bench(name: str, codec: str, bandwidth: float) -> None:
    """Print a line for each implementation that takes the model's step."""
    shape = MODELS[name]
    arguments, num_pages = make_arguments(shape, codec)
    sinks = jnp.zeros(shape.num_heads) if shape.has_sinks else None
    options = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
    jax_pages = max(1, _JAX_BLOCK // shape.page_size)

    def own(compute: Any) -> Callable[[PagedArguments, jax.Array], jax.Array]:
        compute = functools.partial(compute, num_pages=num_pages, sinks=sinks, **options)
        return lambda arguments, query: compute(arguments._replace(query=query))[0]

    def of_jax(operands: tuple[jax.Array, ...], query: jax.Array) -> jax.Array:
        return jax_paged_attention(query[:, 0], *operands, pages_per_compute_block=jax_pages)[:, None]

    calls = {
        "pallas_tpu": (own(pallas_tpu.paged_attention), arguments),
        "xla": (own(xla), arguments),
        "jax_paged_attention": (of_jax, jax_operands(shape, arguments)),
    }
    nbytes = seen_bytes(shape, arguments)
    for which, (call, operands) in calls.items():
        if operands is None:
            continue
        us = microseconds(call, operands, arguments.query)
        rate = nbytes / us * 1e6
        line = {"model": name, "codec": codec, "implementation": which, "us": round(us, 1)}
        line |= {"gb_per_s": round(rate / 1e9, 1), "share_of_bandwidth": round(rate / bandwidth, 3)}
        line["shape"] = dataclasses.asdict(shape) | {"totals": max(shape.totals), "rows": len(shape.totals)}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    kind = jax.local_devices()[0].device_kind
    known = next((start for start in BANDWIDTHS if kind.startswith(start)), None)
    if known is None:
        raise SystemExit(f"a TPU of {', '.join(BANDWIDTHS)} is needed, got {kind!r}")
    for model in options.models.split(","):
        for codec in options.codecs.split(","):
            bench(model, codec, BANDWIDTHS[known])


if __name__ == "__main__":
    main()
