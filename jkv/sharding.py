"""A mesh and the rules that place logical axes on it.

Knows axis names and sizes; owns no array.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.axes import AXES


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
            if axis not in AXES:
                near = difflib.get_close_matches(axis, AXES, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"sharding rules name logical axes {sorted(AXES)}, got {axis!r}{hint}")
            if mesh_axis is not None and mesh_axis not in mesh.axis_names:
                raise ValueError(
                    f"rule {axis!r} must name one of the mesh axes {mesh.axis_names}, got {mesh_axis!r}"
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
        if any(rules.get(axis) is not None for axis in ("head_dim", "slot", "latent", "rope")):
            raise ValueError("'head_dim', 'slot', 'latent' and 'rope' are never split; drop their rules")
        return cls(mesh, tuple((axis, to) for axis, to in rules.items() if to is not None))

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the PartitionSpec of an array whose dimensions are the logical `axes`.

        Raises:
            ValueError: two of the dimensions would be split over one mesh axis.
        """
        rules = dict(self.rules)
        parts = [rules.get(axis) if axis else None for axis in axes]
        used = [part for part in parts if part]
        if len(used) != len(set(used)):
            raise ValueError(f"axes {axes} would use a mesh axis twice: {parts}")
        return PartitionSpec(*parts)

    def named(self, *axes: str | None) -> NamedSharding:
        """Return the NamedSharding of an array whose dimensions are the logical `axes`."""
        return NamedSharding(self.mesh, self.spec(*axes))

    def size(self, axis: str | None) -> int:
        """Return how many parts the logical `axis` is split into; a dimension without a name is whole."""
        mesh_axis = dict(self.rules).get(axis) if axis else None
        return self.mesh.shape[mesh_axis] if mesh_axis else 1

    def check_divides(self, axis: str | None, size: int) -> None:
        """Refuse a dimension that its mesh axis does not divide.

        Raises:
            ValueError: names the axis and both sizes.
        """
        if size % self.size(axis):
            raise ValueError(
                f"{axis!r} has {size} entries, which {self.size(axis)} shards of mesh axis "
                f"{dict(self.rules).get(axis or '')!r} do not divide"
            )

    @property
    def device(self) -> Any:
        """A device of the mesh; it may be one that programs are compiled for and that is not here."""
        return self.mesh.devices.flat[0]

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh's axes carry shardings in array types."""
        return any(kind == jax.sharding.AxisType.Explicit for kind in self.mesh.axis_types)
