"""The kernels of a program compiled for a GPU that is not here, as XLA lists them."""

import math
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from jax.stages import Compiled, Lowered

# What Mosaic GPU makes of a kernel of Pallas.
OF_PALLAS = "kCustomCall"


class Launch(NamedTuple):
    """A kernel.

    Attributes:
        name: XLA's, or `OF_PALLAS`.
        num_threads: of all its blocks; 1 where the list does not say.
    """

    name: str
    num_threads: int


def compile_and_list(lowered: Lowered) -> tuple[Compiled, list[Launch]]:
    """Compile a program, and return its kernels and copies in the order in which they are launched.

    Raises:
        RuntimeError: there is a loop among them, of how many turns the list does not say.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (listing,) = Path(folder).glob("*thunk_sequence.txt")
        said = listing.read_text()
    if "kWhile" in said:
        raise RuntimeError(f"kernels are counted where none is in a loop, got\n{said}")
    lines = re.findall(r"^\d+: .*?\] (\S+)(.*)", said, re.MULTILINE)
    # After a kernel's name: `grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes`.
    return program, [
        Launch(name, math.prod(map(int, re.findall(r"(\d+)[],]", sizes)))) for name, sizes in lines
    ]
