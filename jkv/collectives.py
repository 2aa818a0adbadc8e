"""What devices send each other in a compiled program, for tests of shardings and for plans.

Reads programs only: nothing is run or allocated.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from jax.stages import Compiled

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]

_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(get_args(Kind))})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
# Groups are listed, counted ([groups, devices] of a reshaped range), or axes of a mesh or parts of them.
_LISTED, _COUNTED = re.compile(r"replica_groups=\{\{([\d,]+)\}"), re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}")
_AXIS_SIZE, _AXIS = re.compile(r"'(\w+)'=(\d+)"), re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_ALL = re.compile(r"(?:num_partitions|replica_count)=(\d+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\{$")
_CALLED = re.compile(r"(body|condition|calls|to_apply|\w*computations?)=(?:\{([^}]*)\}|([%\w.-]+))")


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices send each other data.

    Attributes:
        kind: XLA's name of it.
        num_bytes: of the whole that a group shares, on each device: what is reduced, gathered, scattered,
            exchanged or passed on.
        num_devices: of a group; 2 of a permutation, a sender and a receiver.
        num_loops: loops around it; the instruction runs once a turn.
    """

    kind: Kind
    num_bytes: int
    num_devices: int
    num_loops: int = 0

    @property
    def sent_bytes(self) -> int:
        """The least that a device has to send (Thakur et al. 2005, section 4)."""
        others = (self.num_devices - 1) * self.num_bytes / self.num_devices
        match self.kind:
            case "all-reduce":
                return math.ceil(2 * others)
            case "collective-permute" | "collective-broadcast":
                return self.num_bytes
            case _:
                return math.ceil(others)


def find_collectives(program: Compiled | str) -> list[Collective]:
    """Return the collectives of a compiled program, or of its text, each as often as it stands there.

    An asynchronous one counts where it starts. One whose groups are single devices sends nothing, and is left
    out.

    Raises:
        ValueError: the text names groups of devices in a form that is not known here.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    everywhere = math.prod(int(size) for size in _ALL.findall(text.partition("\n")[0]))
    loops = _loops(text)
    found = [
        Collective(cast(Kind, match[2]), *_size(match, line, everywhere), loops.get(computation, 0))
        for computation, line in _instructions(text)
        if (match := _COLLECTIVE.search(line))
    ]
    return [collective for collective in found if collective.num_devices > 1]


def traffic(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """Return how many there are of each kind, and their bytes in all."""
    kinds = dict.fromkeys(collective.kind for collective in collectives)
    own = {kind: [each.num_bytes for each in collectives if each.kind == kind] for kind in kinds}
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in own.items()}


def assert_collectives(program: Compiled | str, expected: Mapping[str, tuple[int, int]]) -> None:
    """Assert what devices send each other in a compiled program, and that they send nothing else.

        step = jax.jit(model).lower(shapes).compile()
        assert_collectives(step, {"all-reduce": (2, 2 * batch * embed_dim * 4)})

    Args:
        program: compiled for several devices.
        expected: for each kind, how many there are and the bytes of all (`Collective.num_bytes`); no kind is
            left out.

    Raises:
        AssertionError: lists what is there where it is not as expected.
        ValueError: a kind is unknown, or as `find_collectives`.
    """
    for kind in expected:
        if kind not in get_args(Kind):
            raise ValueError(f"a collective's kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    found = find_collectives(program)
    if traffic(found) != dict(expected):
        listed = "\n".join(map(str, found)) or "none"
        raise AssertionError(f"collectives must be {dict(expected)}, got {traffic(found)}:\n{listed}")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's line with the name of the computation that it stands in."""
    computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        else:
            yield computation, line


def _loops(text: str) -> dict[str, int]:
    """Return the loops around each computation of a program."""
    edges: dict[str, set[tuple[str, int]]] = {}
    for computation, line in _instructions(text):
        for role, several, one in _CALLED.findall(line):
            turns = int(role in ("body", "condition"))
            called = {(name.strip("% "), turns) for name in (one or several).split(",")}
            edges.setdefault(computation, set()).update(called)
    # A computation is printed before what calls it, so callers' depths are known in reverse.
    order = list(dict.fromkeys(computation for computation, _ in _instructions(text)))
    depths: dict[str, int] = {}
    for computation in reversed(order):
        for name, turns in edges.get(computation, ()):
            depths[name] = max(depths.get(name, 0), depths.get(computation, 0) + turns)
    return depths


def _size(match: re.Match[str], line: str, everywhere: int) -> tuple[int, int]:
    """Return the bytes of the whole that a group shares, and the devices of a group."""
    made, kind, start = match.groups()
    num_devices = 2 if kind == "collective-permute" else _group_size(line, everywhere)
    # What starts makes its operand too, and handles of 32 bits; but an all-reduce makes its result alone.
    has_operand = bool(start) and kind != "all-reduce"
    total = sum(
        _num_bytes(array) for array in _ARRAY.finditer(made) if not (has_operand and array[0] == "u32[]")
    )
    if kind in ("all-gather", "reduce-scatter") and has_operand:
        return total * num_devices // (num_devices + 1), num_devices
    if kind == "reduce-scatter":
        return total * num_devices, num_devices
    return total // 2 if has_operand else total, num_devices


def _group_size(line: str, everywhere: int) -> int:
    if match := _LISTED.search(line):
        return match[1].count(",") + 1
    if match := _COUNTED.search(line):
        return int(match[1])
    if match := _MESH.search(line):
        sizes = dict(_AXIS_SIZE.findall(match[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in _AXIS.findall(match[2]))
    if "replica_groups={}" in line:
        return everywhere
    raise ValueError(f"a collective must list, count or name its groups of devices, got {line.strip()}")


def _num_bytes(array: re.Match[str]) -> int:
    kind, bits, sizes = array.groups()
    entries = math.prod(int(size) for size in sizes.split(",") if size)
    # A predicate takes a byte; names of other types begin with their bits.
    return math.ceil(entries * (8 if kind == "pred" else int(bits or 0)) / 8)
