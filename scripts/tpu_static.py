"""Set the cycles of TPU kernels for a tile of keys and values against the time that its bytes take to arrive.

Nothing is run: kernels are compiled for machines that are not here, and the compiler's final bundles, one a
cycle, are counted. A decode kernel is bound by memory where the share is below 1. Stalls are not in it.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/tpu_static.py --machines v6e --codecs bf16,int8
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.targets import shapes_on, target
from kernels_pallas.paged_attention import Tiling
from kernels_pallas.paged_attention.shapes import MODELS
from scripts import jax_kernels
from scripts.attention_steps import DECODES, Step, checked, checked_codecs, taken_step
from scripts.compilers import check_compilers

# Bytes a second of HBM, from jax's own table of TPUs, and cycles a second: v5e's follow from its 197 TFLOP/s
# on four units of 128 x 128; v6e's are not published, and a lower clock than the true one is the stricter.
MACHINES = {"v5e": (0.82e12, 1.5e9), "v6e": (1.64e12, 1.75e9)}
# A bundle: its depth in the nest of loops, and what it does.
_BUNDLE = re.compile(r"\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*(\{.*)")
_BRANCH = re.compile(r"sbr\.rel \(.*?\) target = \$region(\d+)")
PEERS = {"paged_attention": jax_kernels.of_decodes, "ragged_paged_attention": jax_kernels.of_ragged}


class Bundle(NamedTuple):
    """One cycle.

    Attributes:
        depth: loops around it.
        text: its instructions and remarks.
    """

    depth: int
    text: str


def bundles_of(program: str) -> list[Bundle]:
    """Return the bundles of a kernel's listing, in their order."""
    bundles: list[Bundle] = []
    for line in program.splitlines():
        if match := _BUNDLE.match(line):
            # An empty bundle, after a jump, is listed without its depth.
            is_listed = bool(match[1]) or not bundles or not match[2].startswith("{}")
            bundles.append(Bundle(len(match[1]) if is_listed else bundles[-1].depth, match[2]))
    return bundles


def taken(bundles: list[Bundle]) -> list[Bundle]:
    """Leave out what is jumped over unless something is amiss: blocks without a copy or a product."""
    kept, i = [], 0
    while i < len(bundles):
        kept.append(bundles[i])
        branch = _BRANCH.search(bundles[i].text)
        end = None if branch is None else _end(bundles, i, branch[1])
        inside = "" if end is None else " ".join(bundle.text for bundle in bundles[i + 1 : end])
        i = i + 1 if end is None or "dma." in inside or "vmatpush" in inside else end
    return kept


def _end(bundles: list[Bundle], begin: int, region: str) -> int | None:
    """Return where a jump forward ends; None for one that goes back."""
    label = re.compile(rf"Start/End empty region {region}\b")
    return next((i for i in range(begin + 1, len(bundles)) if label.search(bundles[i].text)), None)


def tile_cycles(bundles: list[Bundle]) -> int:
    """Return the cycles of a tile, or of those that are attended to at once: of their loop."""
    kept = taken(bundles)
    products = [i for i, bundle in enumerate(kept) if "vmatpush" in bundle.text]
    depth, begin, end = kept[products[0]].depth, products[0], products[-1]
    while begin > 0 and kept[begin - 1].depth >= depth:
        begin -= 1
    while end + 1 < len(kept) and kept[end + 1].depth >= depth:
        end += 1
    return end + 1 - begin


def compiled_bundles(call: Callable[..., Any], arguments: Any, machine: str, name: str, folder: Path) -> str:
    """Compile a call and return the listing of the kernel whose name contains `name`."""
    for path in folder.iterdir():
        path.unlink()
    with on_machine(machine):
        lowered = jax.jit(call).lower(*shapes_on(target(machine), arguments))
    lowered.compile()
    found = [path for path in folder.glob(f"*{name}*-final_bundles.txt") if "schedule" not in path.name]
    assert len(found) == 1, f"one listing of {name} is expected, got {len(found)}"
    return found[0].read_text()


def own_share(step: Step, tiling: Tiling, machine: str, folder: Path) -> float:
    """Return the cycles of a tile of this library's kernel for each cycle of its copies."""
    arguments = step.arguments, step.sinks
    listing = compiled_bundles(step.call("pallas_tpu", tiling), arguments, machine, "jkv_", folder)
    sizes = step.sizes_of(tiling)
    pages = sizes.block_pages * sizes.pieces_at_once
    return _share(tile_cycles(bundles_of(listing)), pages * step.page_bytes, machine)


def jax_share(peer: str, model: str, codec: str, machine: str, folder: Path) -> float | None:
    """Return the share of one of jax's kernels; None where it does not take the shape or compile."""
    shape = MODELS.get(model)
    call = None if shape is None else PEERS[peer](shape, codec)
    if shape is None or call is None:
        return None
    dims = (len(shape.totals), shape.time, shape.num_heads, shape.head_dim)
    arguments = jax.ShapeDtypeStruct(dims, jnp.bfloat16), jax.eval_shape(call.make_operands)
    try:
        listing = compiled_bundles(call.function, arguments, machine, peer, folder)
    except Exception as error:  # Mosaic's errors have a private class.
        why = str(error).splitlines()[0]
        print(f"jax's {peer} does not compile {model} in {codec}: {why}", file=sys.stderr)
        return None
    return _share(tile_cycles(bundles_of(listing)), call.block_bytes, machine)


def _share(cycles: int, nbytes: int, machine: str) -> float:
    bytes_per_second, cycles_per_second = MACHINES[machine]
    return cycles / (nbytes / bytes_per_second * cycles_per_second)


def on_machine(machine: str) -> Any:
    """Trace for a machine that need not be here."""
    return jax.sharding.use_abstract_mesh(target(machine).abstract_mesh)


@contextlib.contextmanager
def dumps() -> Iterator[Path]:
    """Have the compiler write its listings to a folder, which is there until the end."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true"
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", default="v6e", help=f"of {', '.join(MACHINES)}")
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--models", default=",".join(DECODES))
    parser.add_argument("--peers", default=",".join(PEERS), help="kernels of jax, beside this library's")
    options = parser.parse_args()
    codecs = checked_codecs(options.codecs)
    peers = checked("peers", options.peers, PEERS) if options.peers else []
    names = [*codecs, *(f"jax {peer}, {codec}" for peer in peers for codec in codecs)]
    models = checked("models", options.models, DECODES)
    machines = checked("machines", options.machines, MACHINES)
    with dumps() as folder:
        check_compilers(parser, machines)
        print("| model | machine | tokens | " + " | ".join(names) + " |")
        print("|" + "---|" * (3 + len(names)))
        for model in models:
            for machine in machines:
                steps = [taken_step(model, codec) for codec in codecs]
                with on_machine(machine):
                    tilings = [step.tiling_for() for step in steps]
                pairs = list(zip(steps, tilings, strict=True))
                shares = [own_share(*pair, machine, folder) for pair in pairs]
                shares += [
                    jax_share(peer, model, codec, machine, folder) for peer in peers for codec in codecs
                ]
                tokens = " / ".join(str(step.sizes_of(tiling).block) for step, tiling in pairs)
                cells = ["-" if share is None else f"{share:.2f}" for share in shares]
                print(f"| {model} | {machine} | {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
