"""Counts the kernels by which XLA writes a step's heads on an H200 that is not here; for docs/kernels.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/gpu_static_writes.py

Needs the compilers of jkv[aot]. Compiles a layer's write of what a bfloat16 projection gives, 8 KV heads of
128 and pages of 64 slots: keys are rotated by position, heads encoded, and `jkv.ops.append` scatters them.
Counts the pool's arrays, the kernels that scatter into them, the threads of the largest, and all kernels.
Then it compiles the same with encoded rows in arrays of their own, as a kernel that encodes nothing would be
given them, and counts one kernel for all scatters; and with `page_write.pallas_gpu`, which encodes, where it
takes the codec. A pool that is not written in place is an error.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.layers.rope import Rotation, rotate
from jkv.targets import shapes_on, target
from kernels_pallas import page_write
from scripts.compilers import check_compilers
from scripts.gpu_launches import OF_PALLAS, Launch, compile_and_list

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 2, 8, 128, 64
# Sequences, and new tokens of each.
CALLS = {"64 decodes": (64, 1), "chunk of 512": (1, 512)}
PAGES_PER_SEQ = 32
COLUMNS = [
    "codec",
    "call",
    "arrays",
    "that scatter",
    "threads at most",
    "kernels",
    "of rows that are there",
    "with the one that encodes",
]


def write(
    implementation: ops.Implementation,
    cache: Cache,
    batch: TokenBatch,
    layer: Any,
    rotation: Rotation,
    heads: jax.Array,
) -> Cache:
    key, value = jnp.split(heads, 2, axis=2)
    return ops.append(cache, (0, layer), batch, rotate(key, *rotation), value, implementation=implementation)


@contextlib.contextmanager
def rows_that_are_there() -> Iterator[None]:
    """Let scatters take rows from arrays, and make none of them."""
    scatter = page_write.xla

    def write_given(pool: Any, rows: Any, *where: Any, **place: Any) -> Any:
        return scatter(pool, jax.lax.optimization_barrier(rows.astype(pool.dtype)), *where, **place)

    with mock.patch.object(page_write, "xla", write_given):
        yield


def make_arguments(codec: str, num_seqs: int, time: int) -> list[Any]:
    """Return the shapes of a write's arguments."""
    group = CacheGroup(NUM_LAYERS, NUM_HEADS, HEAD_DIM, codec)
    spec = CacheSpec.create([group], page_size=PAGE_SIZE, max_chunk=time, layout="plain")
    scales = jnp.ones((NUM_LAYERS, NUM_HEADS)) if CODECS[codec].scaling == "static" else None
    capacity = PAGES_PER_SEQ * PAGE_SIZE
    cache = jax.eval_shape(
        lambda: Cache.dense(spec, num_sequences=num_seqs, capacity=capacity, scales=[(scales, scales)])
    )
    lens = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    begun, batch = jax.eval_shape(lambda cache, lens: cache.begin(lens, time=time), cache, lens)
    heads = jax.ShapeDtypeStruct((num_seqs, time, 2 * NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((num_seqs, time, HEAD_DIM // 2), jnp.float32)
    return [begun, batch, jax.ShapeDtypeStruct((), jnp.int32), (angles, angles), heads]


def kernels_of(mesh: Mesh, arguments: list[Any], implementation: ops.Implementation = "xla") -> list[Launch]:
    """Compile a write for an H200 and return its kernels."""
    # Traced anew, whatever scatters.
    jitted = jax.jit(lambda *given: write(implementation, *given), donate_argnums=0)
    program, kernels = compile_and_list(jitted.lower(*shapes_on(mesh, arguments)))
    memory: Any = program.memory_analysis()
    pools = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[0].pools))
    if memory.alias_size_in_bytes < pools:
        raise RuntimeError(f"{pools:,} bytes are to be written in place, got {memory.alias_size_in_bytes:,}")
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    check_compilers(parser, ["h200"])
    mesh = target("h200")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for codec in ("bf16", "int8", "fp8_e4m3", "int8_static", "int4_token", "int4"):
        for call, (num_seqs, time) in CALLS.items():
            arguments = make_arguments(codec, num_seqs, time)
            kernels = kernels_of(mesh, arguments)
            with rows_that_are_there():
                others = [name for name, _ in kernels_of(mesh, arguments) if "scatter" not in name]
            scatters = [threads for name, threads in kernels if "scatter" in name]
            pool = arguments[0].pools[0]
            arrays = jax.tree.leaves((pool.keys, pool.values, pool.recent))
            encoding = [name for name, _ in kernels_of(mesh, arguments, "pallas_gpu")]
            counts = len(arrays), len(scatters), max(scatters), len(kernels), len(others) + 1
            cells = [codec, call, *counts, len(encoding) if OF_PALLAS in encoding else "-"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
