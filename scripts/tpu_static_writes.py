"""Set the cycles of the TPU kernel of page writes against those of XLA's scatter, which is a loop.

Nothing is run: the compiler's final bundles, one a cycle, are counted as in `scripts/tpu_static.py`: of the
kernel for a window and for an entry, of the scatter for a turn. Waits are in neither.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/tpu_static_writes.py --machine v6e
"""

import argparse
import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jkv.targets import shapes_on, target
from kernels_pallas.page_write import pallas_tpu, xla
from scripts.compilers import check_compilers
from scripts.tpu_static import bundles_of, compiled_bundles

# Sequences, new tokens of each, KV heads, lanes of a head, slots of a page.
CALLS = {
    "chunk of 512": (1, 512, 8, 128, 128),
    "64 decodes": (64, 1, 8, 128, 128),
}


def shapes_of(call: tuple[int, ...], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Return pool, rows, slots and page offset of a call."""
    num_seqs, time, num_heads, head_dim, page_size = call
    shapes = [
        ((1024, num_heads, page_size * head_dim // 128, 128), dtype),
        ((num_seqs, time, num_heads, head_dim), dtype),
        ((num_seqs, time), jnp.int32),
        ((), jnp.int32),
    ]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def write(function: Any, page_size: int, pool: Any, rows: Any, slots: Any, page_offset: Any) -> Any:
    return function(pool, rows, slots, page_offset=page_offset, page_size=page_size)


def kernel_cycles(call: tuple[int, ...], dtype: Any, machine: str, folder: Path) -> tuple[int, int]:
    """Return the cycles of a window and of an entry: of the loop over entries, and of the loop around it."""
    function = functools.partial(write, pallas_tpu.write_pages, call[-1])
    listing = compiled_bundles(function, shapes_of(call, dtype), machine, "jkv_page_write", folder)
    depths = [bundle.depth for bundle in bundles_of(listing)]
    inner = max(depths)
    begin = depths.index(inner)
    end = len(depths) - depths[::-1].index(inner)
    num_entry = end - begin
    while depths[begin - 1] == inner - 1:
        begin -= 1
    while depths[end] == inner - 1:
        end += 1
    return end - begin - num_entry, num_entry


def scatter_cycles(call: tuple[int, ...], dtype: Any, machine: str, folder: Path) -> int:
    """Return the cycles of a turn of the scatter: of the programs that its loop names."""
    for path in folder.iterdir():
        path.unlink()
    function = functools.partial(write, xla, call[-1])
    jitted = jax.jit(function, donate_argnums=0)
    program = jitted.lower(*shapes_on(target(machine), shapes_of(call, dtype))).compile().as_text()
    assert program is not None
    (name,) = re.findall(r"while\(.*body=%?([\w.\-]+)", program)
    body = program[program.index(f"%{name} (") :].split("\n}\n")[0]
    names = re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) =", body, re.MULTILINE)
    listings = [path for each in names for path in folder.glob(f"*-{each}-*-final_bundles.txt")]
    assert listings, f"the listings of the loop {name} are expected, got none"
    return sum(len(bundles_of(path.read_text())) for path in listings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="v6e")
    machine = parser.parse_args().machine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        check_compilers(parser, [machine])
        print("| call | of | a window | an entry | a turn of the scatter | turns |")
        print("|---|---|---|---|---|---|")
        for call, sizes in CALLS.items():
            for dtype in (jnp.bfloat16, jnp.int8):
                window, entry = kernel_cycles(sizes, dtype, machine, folder)
                turn = scatter_cycles(sizes, dtype, machine, folder)
                cells = [call, jnp.dtype(dtype).name, window, entry, turn, sizes[0] * sizes[1] * sizes[2]]
                print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
