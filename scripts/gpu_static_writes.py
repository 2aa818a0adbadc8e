"""Counts the kernels by which XLA writes a step's heads on an H200 that is not here; for docs/kernels.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/gpu_static_writes.py

Needs the compilers of jkv[aot]. Compiles `jkv.ops.append` of one layer, 8 KV heads of 128 and pages of 64
slots, for bfloat16 heads, and counts the pool's arrays, the kernels that scatter into them, the threads of
the largest, and the other kernels, which encode. A pool that is not written in place is an error.
"""

import argparse
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.targets import shapes_on, target
from scripts.compilers import check_compilers

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 2, 8, 128, 64
# Sequences, and new tokens of each.
CALLS = {"64 decodes": (64, 1), "chunk of 512": (1, 512)}
PAGES_PER_SEQ = 32
COLUMNS = ["codec", "call", "arrays", "kernels that scatter", "threads at most", "other kernels"]


def write(cache: Cache, batch: TokenBatch, layer: Any, key: Any, value: Any) -> Cache:
    return ops.append(cache, (0, layer), batch, key, value)


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
    heads = jax.ShapeDtypeStruct((num_seqs, time, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    return [begun, batch, jax.ShapeDtypeStruct((), jnp.int32), heads, heads]


def kernels_of(mesh: Mesh, arguments: list[Any], folder: Path) -> list[tuple[str, int]]:
    """Compile a write for an H200 and return its kernels by name, with their threads."""
    compiler_options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    jitted = jax.jit(write, donate_argnums=0, compiler_options=compiler_options)
    program = jitted.lower(*shapes_on(mesh, arguments)).compile()
    memory: Any = program.memory_analysis()
    pools = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[0].pools))
    if memory.alias_size_in_bytes < pools:
        raise RuntimeError(f"{pools:,} bytes are to be written in place, got {memory.alias_size_in_bytes:,}")
    (listing,) = folder.glob("*thunk_sequence.txt")
    lines = re.findall(r"^\d+: .*?\] (\S+)(.*)", listing.read_text(), re.MULTILINE)
    # After a kernel's name: `grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes`.
    return [(name, math.prod(map(int, re.findall(r"(\d+)[],]", sizes)))) for name, sizes in lines]


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
            with tempfile.TemporaryDirectory() as folder:
                kernels = kernels_of(mesh, arguments, Path(folder))
            scatters = [threads for name, threads in kernels if "scatter" in name]
            pool = arguments[0].pools[0]
            arrays = jax.tree.leaves((pool.keys, pool.values, pool.recent))
            cells = [codec, call, len(arrays), len(scatters), max(scatters), len(kernels) - len(scatters)]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
