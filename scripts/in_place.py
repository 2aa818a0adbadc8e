"""Measures what decode loops add to a cache's memory, by the compilers of machines; for docs/in-place.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/in_place.py [--machines v6e,h200] [--layouts dense]

Needs the compilers of jkv[aot], and nothing of the machines. A cell is the bytes of temporaries for each
added byte of the cache, and in parentheses the instructions that make an array of its size anew.
"""

import argparse

import jax

from jkv.in_place import added_temporaries, made_anew
from jkv.targets import TARGETS, shapes_on, target
from scripts.compilers import check_compilers
from tests.loops import CODECS, LAYOUTS, loop, make_arguments

# Bytes of the two caches: copies of larger ones would not fit a v5e.
SIZES = (2**30, 2**31)


def measure(machine: str, codec: str, layout: str, **sizes: int) -> str:
    mesh = target(machine)
    platform = mesh.devices.flat[0].platform
    arguments = [make_arguments(codec, layout, nbytes, platform=platform, **sizes) for nbytes in SIZES]
    jitted = jax.jit(loop, donate_argnums=0)
    small, large = (jitted.lower(*shapes_on(mesh, shapes)).compile() for shapes in arguments)
    num_made = len(made_anew(small, large))
    return f"{added_temporaries(small, large):.4f}" + (f" ({num_made})" if num_made else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, choices in (("machines", TARGETS), ("codecs", CODECS), ("layouts", LAYOUTS)):
        parser.add_argument(f"--{name}", default=",".join(choices), help="names with commas")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    arguments = parser.parse_args()
    machines, layouts = arguments.machines.split(","), arguments.layouts.split(",")
    sizes = {"page_size": arguments.page_size, "head_dim": arguments.head_dim}
    columns = [(machine, layout) for machine in machines for layout in layouts]
    check_compilers(parser, machines)
    print("| codec | " + " | ".join(" ".join(column) for column in columns) + " |")
    print("|" + "---|" * (1 + len(columns)))
    for codec in arguments.codecs.split(","):
        cells = [measure(machine, codec, layout, **sizes) for machine, layout in columns]
        print(f"| {codec} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
