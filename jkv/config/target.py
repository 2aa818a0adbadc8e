"""Accelerators by name and number: what a mesh is for where its devices are not here.

Knows names and chips; `jkv.targets` has the compilers, `jkv.plan.machines` what a device can do.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple


class _Form(NamedTuple):
    """How chips of a machine come.

    Attributes:
        num_axes: of the torus that links them; 1 where all are linked alike.
        devices_per_chip: as JAX counts: the two halves of a TPU7x are a device each.
    """

    num_axes: int
    devices_per_chip: int = 1


_FORMS = {
    "v5e": _Form(2),
    "v5p": _Form(3),
    "v6e": _Form(2),
    "tpu7x": _Form(3, devices_per_chip=2),
    "h100": _Form(1),
    "h200": _Form(1),
}
MACHINES = tuple(_FORMS)


@dataclass(frozen=True)
class Target:
    """A number of one machine's chips, linked.

    Attributes:
        machine: one of `MACHINES`.
        chips: along each axis of a TPU's torus; of GPUs, how many there are.
    """

    machine: str
    chips: tuple[int, ...]

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        """Of the devices, as JAX names it."""
        return "gpu" if _FORMS[self.machine].num_axes == 1 else "tpu"

    @property
    def num_devices(self) -> int:
        """Devices, as JAX counts them."""
        return prod(self.chips) * _FORMS[self.machine].devices_per_chip


def read_target(text: str) -> Target:
    """Return the target that a text as `v6e:2x4` or `h200:8` names.

    Raises:
        ValueError: it names none.
    """
    machine, _, shape = text.partition(":")
    is_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) is not None
    if machine not in _FORMS or not is_shape or shape.count("x") + 1 != _FORMS[machine].num_axes:
        raise ValueError(
            f"must be one of {', '.join(MACHINES)} and its chips, as v6e:2x4 or h200:8, got {text!r}"
        )
    return Target(machine, tuple(map(int, shape.split("x"))))
