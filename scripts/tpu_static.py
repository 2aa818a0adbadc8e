"""Set the cycles of TPU kernels for a tile of keys and values against the time that its bytes take to arrive.

Nothing is run: kernels are compiled for machines that are not here, and the compiler's final bundles, one a
cycle, are counted. A decode kernel is bound by memory where the share is below 1. Stalls are not in it.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/tpu_static.py --machines v6e --codecs bf16,int8
"""

import argparse
import functools
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention

from jkv.targets import shapes_on, target
from kernels_pallas.latent_attention import pallas_tpu as latent_kernel
from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention.shapes import MODELS, Shape
from tests.kernels_pallas.models import latent_arguments, model_arguments

# Bytes a second of HBM, from jax's own table of TPUs, and cycles a second: v5e's follow from its 197 TFLOP/s
# on four units of 128 x 128; v6e's are not published, and a lower clock than the true one is the stricter.
MACHINES = {"v5e": (0.82e12, 1.5e9), "v6e": (1.64e12, 1.75e9)}
# A bundle: its depth in the nest of loops, and what it does.
_BUNDLE = re.compile(r"\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*(\{.*)")
_BRANCH = re.compile(r"sbr\.rel \(.*?\) target = \$region(\d+)")
# Tokens of a block of jax's kernel.
_JAX_BLOCK = 512


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


def tile_cycles(bundles: list[Bundle], num_pages: int) -> int:
    """Return the cycles of a tile: of its loop, and of the loops over its pages inside."""
    kept = taken(bundles)
    products = [i for i, bundle in enumerate(kept) if "vmatpush" in bundle.text]
    depth, begin, end = kept[products[0]].depth, products[0], products[-1]
    while begin > 0 and kept[begin - 1].depth >= depth:
        begin -= 1
    while end + 1 < len(kept) and kept[end + 1].depth >= depth:
        end += 1
    tile = kept[begin : end + 1]
    return sum(1 if bundle.depth == depth else num_pages for bundle in tile)


def compiled_bundles(call: Callable[..., Any], arguments: Any, machine: str, name: str, folder: Path) -> str:
    """Compile a call and return the listing of the kernel whose name contains `name`."""
    for path in folder.iterdir():
        path.unlink()
    jax.jit(call).lower(*shapes_on(target(machine), arguments)).compile()
    found = [path for path in folder.glob(f"*{name}*-final_bundles.txt") if "schedule" not in path.name]
    assert len(found) == 1, f"one listing of {name} is expected, got {len(found)}"
    return found[0].read_text()


def own_share(model: str, codec: str, machine: str, folder: Path) -> tuple[int, float]:
    """Return the tokens of a tile of this library's kernel, and its cycles for each cycle of its copies."""
    if model in LATENT_MODELS:
        shape = LATENT_MODELS[model]
        arguments, num_pages = latent_arguments(shape, codec)
        attend = functools.partial(latent_kernel.latent_attention, num_pages=num_pages, scale=0.1)
        block = latent_kernel.block_tokens(arguments, window=None)
        return block, _own_share(
            attend, (arguments,), arguments[2:4], (block, shape.page_size), machine, folder
        )
    shape = MODELS[model]
    arguments, num_pages = model_arguments(shape, codec)
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32) if shape.has_sinks else None

    def call(arguments: Any, sinks: Any) -> Any:
        options = {"scale": 0.1, "window": shape.window, "soft_cap": shape.soft_cap, "sinks": sinks}
        return pallas_tpu.paged_attention(arguments, num_pages=num_pages, **options)

    block = pallas_tpu.block_tokens(arguments, window=shape.window)
    of_tile = (block, shape.page_size)
    return block, _own_share(call, (arguments, sinks), arguments[1:3], of_tile, machine, folder)


def _own_share(
    call: Callable[..., Any],
    arguments: Any,
    pools: Any,
    of_tile: tuple[int, int],
    machine: str,
    folder: Path,
) -> float:
    listing = compiled_bundles(call, arguments, machine, "jkv_", folder)
    arrays = [array for array in jax.tree.leaves(pools) if array.ndim == 4]
    page_bytes = sum(array.size // array.shape[0] * array.dtype.itemsize for array in arrays)
    block, page_size = of_tile
    pages = block // page_size
    return _share(tile_cycles(bundles_of(listing), pages), pages * page_bytes, machine)


def jax_share(shape: Shape | None, machine: str, folder: Path) -> float | None:
    """Return the share of jax's `paged_attention`; None where it does not take the shape."""
    if shape is None or shape.time > 1 or shape.window or shape.has_sinks or shape.head_dim % 128:
        return None
    num_seqs, width = len(shape.totals), -(-max(shape.totals) // shape.page_size)
    pool = (shape.num_kv_heads, num_seqs * width, shape.page_size, shape.head_dim)
    shapes = [((num_seqs, shape.num_heads, shape.head_dim), jnp.bfloat16), (pool, jnp.bfloat16)]
    shapes += [(pool, jnp.bfloat16), ((num_seqs,), jnp.int32), ((num_seqs, width), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*each) for each in shapes]
    pages = _JAX_BLOCK // shape.page_size
    call = functools.partial(jax_paged_attention, pages_per_compute_block=pages)
    listing = compiled_bundles(call, arguments, machine, "paged_attention", folder)
    nbytes = 2 * _JAX_BLOCK * shape.head_dim * 2
    return _share(tile_cycles(bundles_of(listing), 1), nbytes, machine)


def _share(cycles: int, nbytes: int, machine: str) -> float:
    bytes_per_second, cycles_per_second = MACHINES[machine]
    return cycles / (nbytes / bytes_per_second * cycles_per_second)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", default="v6e")
    parser.add_argument("--codecs", default="bf16,int8")
    decodes = [name for name, shape in (MODELS | LATENT_MODELS).items() if shape.time == 1]
    parser.add_argument("--models", default=",".join(decodes))
    options = parser.parse_args()
    codecs = options.codecs.split(",")
    print("| model | machine | tokens | " + " | ".join(codecs) + " | jax paged_attention, bf16 |")
    print("|" + "---|" * (4 + len(codecs)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        for model in options.models.split(","):
            for machine in options.machines.split(","):
                own = [own_share(model, codec, machine, folder) for codec in codecs]
                peer = jax_share(MODELS.get(model), machine, folder)
                tokens = " / ".join(str(block) for block, _ in own)
                cells = [f"{share:.2f}" for _, share in own] + ["-" if peer is None else f"{peer:.2f}"]
                print(f"| {model} | {machine} | {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
