"""Bounds the speed of the GPU kernels by their instructions, without a GPU; for docs/kernels.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/gpu_static.py --cuda FOLDER

Needs the compilers of jkv[aot], and a folder that holds bin/nvdisasm: that of CUDA, or `nvidia/cu13` of the
package nvidia-cuda-nvdisasm. Counts, for a block of 64 tokens of one KV head or latent, what a warp
issues in the loop over blocks, without what only blocks with dead slots run, or, of long steps, blocks that
some query does not see wholly; and the clocks of one of an H200's 132 multiprocessors that follow for a
block: of its memory traffic, of issue, of tensor cores and of special function units. Waiting is not counted:
programs that share a multiprocessor, two and more, or the warp groups of one, fill it.
"""

import argparse
import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jkv.cache.codec import CODECS, Codec, find_codecs
from jkv.targets import target
from kernels_pallas.hopper.blocks import BLOCK_TOKENS
from kernels_pallas.hopper.splits import PIECE_TOKENS
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention.shapes import Shape
from scripts.compilers import check_compilers
from tests.gpu_kernels import Report, compile_latent, compile_paged

# NVIDIA's data sheet of the H200: 4.8 TB/s and 132 multiprocessors; their clock, 1.98 GHz at most.
BYTES_PER_CLOCK = 4.8e12 / 132 / 1.98e9
# The left operand of a wgmma of 64 x 16 16-bit numbers comes from shared memory, 128 bytes a clock.
CLOCKS_PER_WGMMA = 64 * 16 * 2 / 128
# Of tensor cores, for each column of a product of 64 x 16: 989 TFLOP/s of 132 multiprocessors at 1.83 GHz.
CLOCKS_PER_COLUMN = 64 * 16 * 2 / 4096
# Four schedulers of a multiprocessor, each with a warp of 32 threads, share 16 results a clock (CUDA C++
# programming guide, arithmetic throughput of compute capability 9.0).
CLOCKS_PER_SPECIAL = 32 * 4 / 16
CLASSES = {
    "wgmma": r"HGMMA\.\d+",
    "TMA": "UTMALDG|UBLKCP",
    "conversions": "I2F|F2F|I2FP|F2FP|PRMT",
    "special": "MUFU",
    "shared": "LDS|STS|LDSM|STSM",
    "barriers": "BAR|SYNCS|MEMBAR",
}
# None of it is in code that masks logits and does nothing else.
_NO_MASK = "HGMMA|MUFU|LD|ST|UTMA|SYNCS|BAR"
# Of 128 query rows, 4 heads of 32 tokens: codec, head_dim, page_size
PREFILL = [
    ("bf16", 128, 64),
    ("bf16", 128, 16),
    ("bf16", 64, 64),
    ("bf16", 256, 64),
    ("int8", 128, 64),
    ("fp8_e4m3", 128, 64),
    ("int4_token", 128, 64),
]
PAGED = [
    # codec, head_dim, page_size, query heads of a KV head, tokens of a query
    ("bf16", 128, 64, 4, 1),
    ("bf16", 128, 16, 4, 1),
    ("bf16", 64, 64, 8, 1),
    ("bf16", 256, 64, 4, 1),
    ("int8", 128, 64, 4, 1),
    ("int8", 64, 64, 8, 1),
    ("fp8_e4m3", 128, 64, 4, 1),
    ("fp8_e4m3", 128, 16, 4, 1),
    ("bf16", 80, 64, 8, 1),
    ("fp8_e4m3", 80, 64, 8, 1),
    ("int8", 256, 64, 4, 1),
    ("int8/int4", 128, 64, 4, 1),
    ("int4_token", 128, 64, 4, 1),
    ("int4", 128, 64, 4, 1),
    ("bf16", 128, 64, 8, 4),
    *((*sizes, 4, 32) for sizes in PREFILL),
]
# Of DeepSeek-V3: codec, page_size, query heads
LATENT = [
    ("bf16", 64, 128),
    ("bf16", 16, 16),
    ("fp8_e4m3", 64, 128),
    ("int8", 64, 128),
    ("int4_token", 64, 128),
]
# Warp groups of the kernels of latents and of long steps.
GROUPS = 2
BOUNDS = ["memory", "issue", "tensor", "special"]


class Line(NamedTuple):
    """A line of code: a label, or an instruction, where it may jump to, and whether it always does.

    A wgmma's operation has the columns of its product in its name.
    """

    label: str | None
    operation: str = ""
    goal: str | None = None
    is_conditional: bool = False


def lines_of(code: str) -> list[Line]:
    """Return labels and instructions, in order."""
    lines = []
    for text in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", text):
            lines.append(Line(label[1]))
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9]+)(\S*)(.*)", text):
            goal = re.search(r"`\((\.L_x_\d+)\)", found[4])
            columns = re.match(r"\.64x(\d+)x16", found[3])
            operation = f"HGMMA.{columns[1]}" if columns else found[2]
            lines.append(Line(None, operation, goal[1] if goal else None, found[1] is not None))
    return lines


def inner_loop(code: str) -> Counter[str]:
    """Return how often a warp issues each instruction for a block all of whose slots are live."""
    lines = lines_of(code)
    places = {line.label: place for place, line in enumerate(lines) if line.label}
    jumps = [(place, places[line.goal]) for place, line in enumerate(lines) if line.goal in places]
    # Code that waits lies behind the kernel's end, and jumps back to where it was come from whatever happens.
    loops = [
        (begin, end)
        for end, begin in jumps
        if begin < end
        and "EXIT" not in {line.operation for line in lines[begin:end]}
        and _has_products(line.operation for line in lines[begin:end])
    ]
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    skipped = set()
    for place, goal in jumps:
        if not begin < place < goal < end:
            continue
        over = [line.operation for line in lines[place + 1 : goal]]
        is_fetch = "UTMALDG" in over
        if lines[place].is_conditional:
            zeroes = "STSM" in over and not is_fetch and not _has_products(over)
            masks = "FSEL" in over and not any(re.match(_NO_MASK, operation) for operation in over)
            is_skipped = zeroes or masks
        else:
            # What the other warp group does: it brings values, where this one has brought keys.
            is_skipped = is_fetch and lines[place + 1].label is not None
        if is_skipped:
            skipped |= set(range(place + 1, goal))
    kept = (lines[place] for place in range(begin, end + 1) if place not in skipped)
    return Counter(line.operation for line in kept if line.operation)


def _has_products(operations: Iterable[str]) -> bool:
    return any(operation.startswith("HGMMA") for operation in operations)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuda", type=Path, required=True, help="folder that holds bin/nvdisasm")
    parser.add_argument("--kernel", choices=["paged", "latent"], help="this one alone")
    options = parser.parse_args()
    check_disassembler(parser, options.cuda / "bin" / "nvdisasm")
    os.environ |= {"MOSAIC_GPU_CUDA_ROOT": str(options.cuda.resolve()), "MOSAIC_GPU_DUMP_SASS": "1"}
    check_compilers(parser, ["h200"])
    mesh = target("h200")
    columns = ["codec", "head", "page", "queries", "registers", "shared KB", "instructions", *CLASSES]
    print("| " + " | ".join([*columns, *(f"{bound} clocks" for bound in BOUNDS), "bound by"]) + " |")
    print("|" + "---|" * (len(columns) + len(BOUNDS) + 1))
    for codec, head_dim, page_size, group, time in PAGED if options.kernel != "latent" else ():
        shape = Shape(8 * group, 8, head_dim, page_size, time)
        compile_case = functools.partial(compile_paged, mesh, shape, codec)
        stored = token_bytes(find_codecs(*codec.split("/")), page_size, head_dim)
        num_groups = GROUPS if time > PIECE_TOKENS else 1
        print_row(compile_case, [codec, head_dim, page_size, group * time], stored, num_groups)
    for codec, page_size, num_heads in LATENT if options.kernel != "paged" else ():
        shape = LatentShape(num_heads, 512, 64, 128, 128, page_size, 1)
        compile_case = functools.partial(compile_latent, mesh, shape, codec)
        queries = min(num_heads, 64)
        stored = token_bytes([CODECS[codec]], page_size, 512) + token_bytes([CODECS["bf16"]], page_size, 64)
        print_row(compile_case, [codec, "512 + 64", page_size, queries], stored, num_groups=GROUPS)


def check_disassembler(parser: argparse.ArgumentParser, program: Path) -> None:
    """Refuse a disassembler that is not there or does not run, before anything is compiled."""
    try:
        ended = subprocess.run([program.resolve(), "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        parser.error(f"--cuda must be a folder whose bin/nvdisasm runs, got {program}: {error.strerror}")
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()
        parser.error(f"bin/nvdisasm must run, got {ended.returncode} of {program}: {said[-300:]}")


def token_bytes(codecs: Iterable[Codec], page_size: int, head_dim: int) -> float:
    """Return the bytes of a token and head, scales included."""
    shapes = (codec.page_shapes(page_size=page_size, head_dim=head_dim) for codec in codecs)
    return sum(array.nbytes for arrays in shapes for array in arrays.values()) / page_size


def print_row(
    compile_case: Callable[..., dict[str, Report]], sizes: list[Any], stored_bytes: float, num_groups: int
) -> None:
    """Compile a case and print what bounds it: its warp groups share a multiprocessor's units."""
    with tempfile.TemporaryDirectory() as folder:
        reports = compile_case(num_pages=2**16, folder=Path(folder), scale=0.1)
    (report,) = (report for name, report in reports.items() if "merge" not in name)
    if report.code is None:
        raise SystemExit(
            "bin/nvdisasm must read kernels of compute capability 9.0, got no instructions of one"
        )
    counts = inner_loop(report.code)
    classes = {
        name: sum(count for operation, count in counts.items() if re.fullmatch(pattern, operation))
        for name, pattern in CLASSES.items()
    }
    products = {int(name.removeprefix("HGMMA.")): n for name, n in counts.items() if "HGMMA." in name}
    tensor = sum(n * max(CLOCKS_PER_WGMMA, width * CLOCKS_PER_COLUMN) for width, n in products.items())
    clocks = {
        "memory": BLOCK_TOKENS * stored_bytes / BYTES_PER_CLOCK,
        "issue": num_groups * counts.total(),
        "tensor": num_groups * tensor,
        "special": num_groups * classes["special"] * CLOCKS_PER_SPECIAL,
    }
    said = [*sizes, report.registers, report.shared_bytes // 1024]
    cells = [*said, counts.total(), *classes.values(), *(f"{clocks[bound]:.0f}" for bound in BOUNDS)]
    print("| " + " | ".join(map(str, [*cells, max(clocks, key=clocks.__getitem__)])) + " |", flush=True)


if __name__ == "__main__":
    main()
