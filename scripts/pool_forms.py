"""Measures which stored forms of a pool a decode loop updates in place; for docs/in-place.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/pool_forms.py [--machines v5e,v6e,h200]

Needs the compilers of jkv[aot], and nothing of the machines. A loop of 32 steps writes one token of each of
four sequences and reads four pages of each; a cell is the bytes of temporaries for each added byte of the
pool.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.in_place import added_temporaries
from jkv.targets import shapes_on, target
from kernels_pallas.page_write.xla import write_pages
from scripts.compilers import check_compilers

NUM_SEQS, NUM_HEADS, LANES = 4, 8, 128
# Bytes of the two pools: both past what a TPU keeps in its vector memory.
SIZES = (2**28, 2**29)
# Slots of a page, entries of a slot, dtype.
ARRAYS = {
    "bf16, heads of 128": (128, 128, jnp.bfloat16),
    "bf16, heads of 64": (128, 64, jnp.bfloat16),
    "int4, heads of 128": (128, 64, jnp.uint8),
    "int4's 4 scales a slot": (128, 4, jnp.bfloat16),
    "int8's scale, pages of 128": (128, 1, jnp.float32),
    "int8's scale, pages of 256": (256, 1, jnp.float32),
}


def write_slots(pool: jax.Array, rows: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Write into `[page, head, slot, entry]` by a scatter of its flat view."""
    page_size, *entry = pool.shape[2:]
    heads = jnp.arange(NUM_HEADS)[None]
    index = ((pages[:, None] * NUM_HEADS + heads) * page_size + slots[:, None]).reshape(-1)
    flat = pool.reshape(-1, *entry)
    flat = flat.at[index].set(rows.reshape(-1, *entry), mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)


def write_lanes(pool: jax.Array, rows: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Write into `[page, head, row, 128]` as jkv does."""
    width = rows.shape[-1]
    page_size = pool.shape[2] * LANES // width
    places = (pages * page_size + slots)[:, None]
    return write_pages(pool, rows[:, None], places, page_offset=0, page_size=page_size)


FORMS = {"[page, head, slot, entry]": write_slots, "[page, head, slot * entry / 128, 128]": write_lanes}


def loop(
    pool: jax.Array, query: jax.Array, table: jax.Array, *, write: Callable, page_size: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Take 32 steps, each of which writes what the last one has read."""

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, query = carry
        slots = jnp.full(NUM_SEQS, i, jnp.int32)
        pool = write(pool, query[..., :width].astype(pool.dtype), table[:, 0], slots)
        read = pool[table].reshape(NUM_SEQS, -1, NUM_HEADS, page_size, width).astype(jnp.float32)
        return pool, query + jnp.pad(read.sum((1, 3)), ((0, 0), (0, 0), (0, LANES - width)))

    return jax.lax.fori_loop(0, 32, step, (pool, query))


def measure(machine: str, form: str, array: str) -> float:
    page_size, width, dtype = ARRAYS[array]
    entries = (page_size * width // LANES, LANES)
    if FORMS[form] is write_slots:
        # A scale has no axis of its own.
        entries = (page_size, width) if width > 1 else (page_size,)
    page_bytes = NUM_HEADS * page_size * width * jnp.dtype(dtype).itemsize
    run = functools.partial(loop, write=FORMS[form], page_size=page_size, width=width)
    programs = []
    for nbytes in SIZES:
        shapes = (
            jax.ShapeDtypeStruct((nbytes // page_bytes, NUM_HEADS, *entries), dtype),
            jax.ShapeDtypeStruct((NUM_SEQS, NUM_HEADS, LANES), jnp.float32),
            jax.ShapeDtypeStruct((NUM_SEQS, 4), jnp.int32),
        )
        programs.append(jax.jit(run, donate_argnums=0).lower(*shapes_on(target(machine), shapes)).compile())
    return added_temporaries(*programs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", default="v5e,v6e,h200", help="names with commas")
    machines = parser.parse_args().machines.split(",")
    check_compilers(parser, machines)
    print("| array | stored as | " + " | ".join(machines) + " |")
    print("|" + "---|" * (2 + len(machines)))
    for array in ARRAYS:
        for form in FORMS:
            cells = [f"{measure(machine, form, array):.2f}" for machine in machines]
            print(f"| {array} | `{form}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
