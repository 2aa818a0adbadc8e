"""Time attention and page writes on the TPU that is here: one JSON line a model, codec and implementation.

Beside this library's kernels are its plain JAX and jax's own kernels, where they take the shape. `error` is
relative, to what plain JAX returns for the same pages: that of rounding. GB/s count the pages that a step
sees, scales included, or the entries that it writes; the share is of the chip's bandwidth. A step is repeated
in one program, each with the last one's output as its query, or its pool.

    PYTHONPATH=. python scripts/bench_kernel.py --models llama3_8b,deepseek_v3 --codecs bf16,int8
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.page_write import pallas_tpu as write_kernel
from kernels_pallas.page_write import xla as write_xla
from kernels_pallas.paged_attention.shapes import Shape
from scripts import jax_kernels
from scripts.attention_steps import ALL_MODELS, Step, checked, checked_codecs, filled, step_of

# Bytes a second of a chip's HBM, by the start of `jax.Device.device_kind`; from jax's own table of TPUs.
BANDWIDTHS = {"TPU v5 lite": 0.82e12, "TPU v5": 2.46e12, "TPU v6": 1.64e12, "TPU7x": 3.7e12}
_REPEATS = 32


def microseconds(call: Callable[[Any, jax.Array], jax.Array], operands: Any, x: jax.Array) -> float:
    """Return the time of one call, the least of five programs of `_REPEATS`; consumes `x`."""

    def repeated(operands: Any, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, x: call(operands, x), x)

    program = jax.jit(repeated, donate_argnums=1)
    x = jax.block_until_ready(program(operands, x))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        x = jax.block_until_ready(program(operands, x))
        times.append(time.perf_counter() - begin)
    return min(times) / _REPEATS * 1e6


def step_microseconds(step: Step, arguments: Any, call: Callable[[Any, Any], jax.Array]) -> float:
    """Return the time of a step of attention."""
    sinks = None if step.sinks is None else jnp.zeros(step.sinks.shape)

    def next_query(operands: Any, query: jax.Array) -> jax.Array:
        arguments, sinks = operands
        return call(arguments._replace(query=query), sinks)

    return microseconds(next_query, (arguments, sinks), jnp.array(arguments.query))


def attention(step: Step, codec: str, arguments: Any) -> Iterator[dict[str, Any]]:
    """Time a step's attention in each implementation that takes it."""
    refused = step.kernel.refusal(step.arguments)
    sinks = None if step.sinks is None else jnp.zeros(step.sinks.shape)
    expected = jax.jit(step.call("xla"))(arguments, sinks).astype(jnp.float32)
    for name in ("pallas_tpu", "xla"):
        if name == "pallas_tpu" and refused is not None:
            yield {"implementation": name, "refused": refused}
            continue
        out = jax.jit(step.call(name))(arguments, sinks).astype(jnp.float32)
        error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
        us = step_microseconds(step, arguments, step.call(name))
        yield {"implementation": name, "us": us, "bytes": step.seen_bytes, "error": round(error, 5)}
    peers = {"paged_attention": jax_kernels.of_decodes, "ragged_paged_attention": jax_kernels.of_ragged}
    for name, call_of in peers.items():
        call = call_of(step.shape, codec) if isinstance(step.shape, Shape) else None
        if call is None:
            continue
        try:
            us = microseconds(call.function, call.make_operands(), jnp.array(arguments.query))
        except Exception as error:  # Mosaic's errors have a private class.
            yield {"implementation": f"jax_{name}", "error": str(error).splitlines()[0]}
        else:
            yield {"implementation": f"jax_{name}", "us": us, "bytes": step.seen_bytes}


def writes(step: Step, arguments: Any) -> Iterator[dict[str, Any]]:
    """Time the write of a step's new entries of the first pool."""
    pages, page_size = arguments[step.arguments.index(step.pools[0])], step.shape.page_size
    past = arguments.starts[:, None] + jnp.arange(step.shape.time)
    page = jnp.take_along_axis(arguments.page_table, past // page_size, axis=1)
    slots = page * page_size + past % page_size
    rows = jnp.ones((*slots.shape, pages.data.shape[1], pages.data_shape[1]), pages.data.dtype)
    for name, write in (("pallas_tpu", write_kernel.write_pages), ("xla", write_xla)):
        refused = write_kernel.refusal(pages.data, rows) if name == "pallas_tpu" else None
        if refused is not None:
            yield {"implementation": name, "refused": refused}
            continue

        def call(operands: Any, pool: jax.Array, write: Any = write) -> jax.Array:
            return write(pool, *operands, page_offset=0, page_size=page_size)

        us = microseconds(call, (rows, slots), jnp.array(pages.data))
        yield {"implementation": name, "us": us, "bytes": rows.nbytes}


def shown(line: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Return a line whose bytes are a rate."""
    if "us" not in line:
        return line
    rate = line["bytes"] / line["us"] * 1e6
    rates = {"gb_per_s": round(rate / 1e9, 1), "share_of_bandwidth": round(rate / bandwidth, 4)}
    return line | {"us": round(line["us"], 1)} | rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--models", default=",".join(ALL_MODELS))
    options = parser.parse_args()
    models = checked("models", options.models, ALL_MODELS)
    codecs = checked_codecs(options.codecs)
    kind = jax.local_devices()[0].device_kind
    known = next((start for start in BANDWIDTHS if kind.startswith(start)), None)
    if known is None:
        raise SystemExit(f"a TPU of {', '.join(BANDWIDTHS)} is needed, got {kind!r}")
    for model in models:
        for codec in codecs:
            step = step_of(model, codec)
            arguments = filled(step)
            lines = {"attention": attention(step, codec, arguments), "page_write": writes(step, arguments)}
            for operation, found in lines.items():
                for line in found:
                    of_case = {"operation": operation, "model": model, "codec": codec}
                    print(json.dumps(of_case | shown(line, BANDWIDTHS[known])), flush=True)


if __name__ == "__main__":
    main()
