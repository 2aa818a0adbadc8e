"""A sum that devices of a mesh hold parts of, and tokens that travel to the parts.

Where an axis of the sum splits sequences too, each device gathers the tokens of all, adds its part for them,
and gets the sums of its own. Knows logical axes; inside `shard_map`.
"""

from dataclasses import dataclass

import jax

from jkv.sharding import Sharding


@dataclass(frozen=True)
class SplitSum:
    """The mesh axes that a layer's output is summed over; hashable.

    Attributes:
        sharding: the mesh and its rules; None is one device, on which nothing is split.
        axes: logical axes that the sum goes over.
    """

    sharding: Sharding | None
    axes: tuple[str, ...]

    def mesh_axis(self, axis: str) -> str | None:
        """Return the mesh axis that splits the logical `axis`."""
        return None if self.sharding is None else self.sharding.mesh_axis(axis)

    def travels(self, axis: str) -> bool:
        """Return whether tokens travel to the parts of the logical `axis`."""
        return self.mesh_axis(axis) is not None and self.mesh_axis(axis) == self.mesh_axis("seq")

    @property
    def travels_over(self) -> str | None:
        """The mesh axis that splits the sum and sequences alike, if any."""
        return self.mesh_axis("seq") if any(map(self.travels, self.axes)) else None

    def gather(self, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Return the rows of all devices that tokens travel between; without such, those given."""
        if self.travels_over is None:
            return rows
        return tuple(jax.lax.all_gather(each, self.travels_over, tiled=True) for each in rows)

    def scatter(self, parts: jax.Array) -> jax.Array:
        """Add up the parts of gathered rows, and return the sums of this device's own."""
        if self.travels_over is None:
            return parts
        return jax.lax.psum_scatter(parts, self.travels_over, tiled=True)

    def add_up(self, parts: jax.Array) -> jax.Array:
        """Add up the parts of the devices whose rows are alike."""
        axes = tuple(name for name in map(self.mesh_axis, self.axes) if name not in (None, self.travels_over))
        return jax.lax.psum(parts, axes) if axes else parts

    def part(self, axis: str) -> jax.Array | int:
        """Return which part of the logical `axis` this device has."""
        return 0 if self.sharding is None else self.sharding.index(axis)
