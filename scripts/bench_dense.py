"""Times the dense products of a decode step on the CPU, in the forms that docs/performance.md compares.

    python scripts/bench_dense.py [--seconds 2]

Each call takes the next of several copies of its weight, so that weights come from memory as in a model,
and the forms of one row take turns. `dense` is jkv's own form. A cell is the median in microseconds and the
speed-up over `x @ w`.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.decode.platform import COMPILER_OPTIONS
from jkv.layers.dense import dense
from jkv.layers.quantized import Int4Weight, Int8Weight

SHAPES = [(576, 576), (576, 1536), (1536, 576), (576, 49152)]
ROWS = [1, 4, 16, 64, 256]
COLD_BYTES = 128 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each shape and row count")
    seconds = parser.parse_args().seconds
    print(f"{os.cpu_count()} cores, jax {jax.__version__}; read {read_rate():.1f} GB/s")
    for inputs, outputs in SHAPES:
        weight = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32)
        for rows in ROWS:
            times = measure(forms(weight, rows), seconds)
            base = times["x @ w"]
            cells = [f"{name} {us:.0f} us ({base / us:.2f}x)" for name, us in times.items()]
            print(f"{inputs} x {outputs}, {rows} rows: " + ", ".join(cells), flush=True)


def forms(weight: np.ndarray, rows: int) -> dict[str, Callable[[], jax.Array]]:
    """Return, by name, calls that multiply `rows` rows by the weight."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 1, weight.shape[1]), np.float32))
    copies = max(1, COLD_BYTES // weight.nbytes)
    plain = [jnp.asarray(weight + 0) for _ in range(copies)]
    made = {
        "x @ w": cycle(lambda x, w: x[:, 0] @ w, x, [w.T + 0 for w in plain]),
        "x @ w.T": cycle(product, x, plain),
        # Half a round away, or it would find in the cache what the form before it has just read.
        "(w @ x.T).T": cycle(
            lambda x, w: jax.lax.optimization_barrier(w @ x[:, 0].T).T,
            x,
            plain[copies // 2 :] + plain[: copies // 2],
        ),
    }
    narrow, x16 = [w.astype(jnp.bfloat16) for w in plain], x.astype(jnp.bfloat16)
    made["bf16 x @ w.T"] = cycle(product, x16, narrow)
    made["bf16 dense"] = cycle(dense, x16, narrow)
    if rows == 1:
        for name, make in (("int8", Int8Weight), ("int4", Int4Weight)):
            graph, state = nnx.split(make(weight))
            packed = [jax.tree.map(lambda leaf: leaf + 0, state) for _ in range(copies)]
            made[name] = cycle(lambda x, w, graph=graph: nnx.merge(graph, w).product(x), x, packed)
    return made


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((2,), (1,)), ((), ())))


def cycle(function: Callable, x: jax.Array, weights: list) -> Callable[[], jax.Array]:
    options = COMPILER_OPTIONS.get(jax.default_backend())
    compiled = jax.jit(function).lower(x, weights[0]).compile(compiler_options=options)
    turn = itertools.cycle(weights)
    return lambda: compiled(x, next(turn))


def measure(calls: dict[str, Callable[[], jax.Array]], seconds: float) -> dict[str, float]:
    """Return the median microseconds of each call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["x @ w"]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def read_rate() -> float:
    """Return GB/s of summing 256 MB."""
    block = jnp.ones((64 << 20,), jnp.float32)
    add = jax.jit(jnp.sum)
    times = measure({"x @ w": lambda: add(block)}, 1.0)
    return block.nbytes / times["x @ w"] / 1e3


if __name__ == "__main__":
    main()
