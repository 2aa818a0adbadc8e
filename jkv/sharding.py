"""A mesh and the rules that place logical axes on it.

Knows axis names and sizes; owns no array.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.axes import AXES, NEVER_SPLIT, clashes

# A dimension's logical axis, or several that split it, outermost first.
Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Sharding:
    """A device mesh with one rule for each logical axis that is split; hashable.

    Attributes:
        mesh: the devices and their axis names.
        rules: pairs of a logical axis and the mesh axis that splits it.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str], ...]

    @classmethod
    def create(cls, mesh: Mesh, rules: Mapping[str, str | None]) -> "Sharding":
        """Check the rules against the glossary and the mesh; an axis that is None or absent is replicated.

        Raises:
            ValueError: a name is unknown, or two axes of one array are split alike.
        """
        for axis, mesh_axis in rules.items():
            _check_known(axis)
            if mesh_axis is not None and mesh_axis not in mesh.axis_names:
                raise ValueError(
                    f"rule {axis!r} must name one of the mesh axes {mesh.axis_names}, got {mesh_axis!r}"
                    f"{_did_you_mean(mesh_axis, mesh.axis_names)}"
                )
        if rules.get("page") != rules.get("seq"):
            raise ValueError(
                "pages belong to their sequences, so the rules for 'page' and 'seq' must be equal, "
                f"got {rules.get('page')!r} and {rules.get('seq')!r}"
            )
        if rules.get("q_head") != rules.get("kv_head"):
            raise ValueError(
                "query heads are split with their KV heads, so the rules for 'q_head' and 'kv_head' must be "
                f"equal, got {rules.get('q_head')!r} and {rules.get('kv_head')!r}"
            )
        for axis in ("seq", "q_head"):
            if rules.get("context") is not None and rules.get("context") == rules.get(axis):
                raise ValueError(
                    "devices that share a sequence's pages have the same queries, so the rules for 'context' "
                    f"and {axis!r} must differ, got {rules.get(axis)!r} for both"
                )
        whole = [axis for axis in NEVER_SPLIT if rules.get(axis) is not None]
        if whole:
            raise ValueError(
                f"axes {', '.join(NEVER_SPLIT)} are never split, got a rule for {whole}; drop it"
            )
        for array, axes, first, second in clashes(rules):
            raise ValueError(
                f"no two axes of an array may be split alike, got {rules[first]!r} for {first!r} and "
                f"{second!r} of {array} {axes}; drop one"
            )
        return cls(mesh, tuple((axis, to) for axis, to in rules.items() if to is not None))

    def spec(self, *axes: Axis) -> PartitionSpec:
        """Return the PartitionSpec of an array whose dimensions are the logical `axes`.

        Raises:
            ValueError: a name is unknown, or two of the dimensions would be split over one mesh axis.
        """
        rules = dict(self.rules)
        for axis in axes:
            for name in _names(axis):
                _check_known(name)
        parts = [[rules[one] for one in _names(axis) if one in rules] for axis in axes]
        used = [name for part in parts for name in part]
        if len(used) != len(set(used)):
            raise ValueError(f"axes {axes} would use a mesh axis twice: {used}")
        return PartitionSpec(*(part[0] if len(part) == 1 else tuple(part) or None for part in parts))

    def named(self, *axes: Axis) -> NamedSharding:
        """Return the NamedSharding of an array whose dimensions are the logical `axes`."""
        return NamedSharding(self.mesh, self.spec(*axes))

    def mesh_axis(self, axis: str | None) -> str | None:
        """Return the mesh axis that splits the logical `axis`; None where it is whole."""
        return dict(self.rules).get(axis) if axis else None

    def size(self, axis: str | None) -> int:
        """Return how many parts the logical `axis` is split into; a dimension without a name is whole."""
        mesh_axis = self.mesh_axis(axis)
        return self.mesh.shape[mesh_axis] if mesh_axis else 1

    def index(self, axis: str) -> jax.Array | int:
        """Return which part of the logical axis this device has, inside `shard_map`."""
        mesh_axis = self.mesh_axis(axis)
        return jax.lax.axis_index(mesh_axis) if mesh_axis else 0

    def check_divides(self, axis: str | None, size: int) -> None:
        """Refuse a dimension that its mesh axis does not divide.

        Raises:
            ValueError: names the axis and both sizes.
        """
        if size % self.size(axis):
            raise ValueError(
                f"{axis!r} has {size} entries, which {self.size(axis)} shards of mesh axis "
                f"{self.mesh_axis(axis)!r} do not divide; {would_divide(size, self.size(axis))} would"
            )

    @property
    def device(self) -> Any:
        """A device of the mesh; it may be one that programs are compiled for and that is not here."""
        return self.mesh.devices.flat[0]

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh's axes carry shardings in array types."""
        return any(kind == jax.sharding.AxisType.Explicit for kind in self.mesh.axis_types)


def would_divide(size: int, count: int) -> str:
    """Return the numbers nearest to `count`, below and above, that divide `size`, in words."""
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    below = [number for number in divisors if number < count]
    return " or ".join(map(str, below[-1:] + divisors[len(below) : len(below) + 1]))


def _names(axis: Axis) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,) if axis else ()


def _check_known(axis: str) -> None:
    if axis not in AXES:
        raise ValueError(f"logical axes are {', '.join(AXES)}, got {axis!r}{_did_you_mean(axis, AXES)}")


def _did_you_mean(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
