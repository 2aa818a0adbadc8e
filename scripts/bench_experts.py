"""Times the product of rows with their experts' weights beside XLA's ragged dot, for docs/performance.md.

JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/bench_experts.py [--experts 64] [--repeats 5]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.layers.grouped import grouped_dense

INPUTS, OUTPUTS = 576, 1536
ROWS = (1, 2, 16, 128)


def time_ms(function: Callable[..., Any], arguments: tuple, repeats: int) -> float:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    weight = jax.random.normal(keys[0], (options.experts, INPUTS, OUTPUTS))
    print(f"{options.experts} experts, {INPUTS} x {OUTPUTS}, float32\n")
    print("| rows | experts in use | one expert's product, ms | grouped_dense, ms | ragged dot, ms |")
    print("|---|---|---|---|---|")
    for num_rows in ROWS:
        x = jax.random.normal(keys[1], (num_rows, INPUTS))
        experts = jnp.sort(jax.random.randint(keys[2], (num_rows,), 0, options.experts))
        sizes = jnp.bincount(experts, length=options.experts)
        cells = [
            time_ms(lambda x, weight: x @ weight[0], (x, weight), options.repeats),
            time_ms(grouped_dense, (x, weight, sizes), options.repeats),
            time_ms(jax.lax.ragged_dot, (x, weight, sizes), options.repeats),
        ]
        print(
            f"| {num_rows} | {int((sizes > 0).sum())} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"
        )


if __name__ == "__main__":
    main()
