"""The mesh section: devices by name, and which logical axis is split over which.

Knows names and sizes; jkv.sharding makes the mesh and its shardings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from jkv.axes import clashes
from jkv.config.errors import did_you_mean
from jkv.config.section import Conflict, Count, Section, Text
from jkv.config.target import Target, read_target


def _pairs(value: Any) -> Any:
    """Turn the mapping that a file holds into what hashes."""
    return tuple(value.items()) if isinstance(value, dict) else value


MeshSizes = Annotated[tuple[tuple[Text, Count], ...], BeforeValidator(_pairs), PlainSerializer(dict)]
MeshAxis = Text | None

# Sequences own pages, and KV heads serve query heads.
EQUAL_RULES = (("seq", "page"), ("q_head", "kv_head"))


@dataclass(frozen=True)
class MeshRules(Section):
    """The mesh axis that splits each axis of `jkv.axes.AXES`; null replicates.

    Axes that have none are never split, and `latent` can only be said to be replicated.
    """

    seq: MeshAxis = None
    q_head: MeshAxis = None
    kv_head: MeshAxis = None
    page: MeshAxis = None
    latent: MeshAxis = None
    embed: MeshAxis = None
    mlp: MeshAxis = None
    expert: MeshAxis = None
    vocab: MeshAxis = None
    context: MeshAxis = None


@dataclass(frozen=True)
class MeshSection(Section):
    """The devices and how arrays are split over them.

    Attributes:
        axes: name and devices of each mesh axis, outermost first.
        axis_types: auto lets the compiler propagate shardings; explicit makes them part of types.
        rules: the mesh axis of each logical axis.
        kv_copies: devices that hold each KV head, where the KV heads' axis has more devices than heads.
        target: the machine and its chips, as `v6e:2x4`, for `jkv plan --compile`; null where it is only run.
    """

    axes: MeshSizes
    axis_types: Literal["auto", "explicit"] = "auto"
    rules: MeshRules = field(default_factory=MeshRules)
    kv_copies: Count = 1
    target: Text | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return prod(size for _, size in self.axes)

    def spec(self, logical_axes: Sequence[str | tuple[str, ...]]) -> tuple[str | tuple[str, ...] | None, ...]:
        """Return the entries of the PartitionSpec of an array with these logical axes."""
        parts = [self._mesh_axes(axis) for axis in logical_axes]
        return tuple(part[0] if len(part) == 1 else part or None for part in parts)

    def _mesh_axes(self, axis: str | tuple[str, ...]) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else axis
        return tuple(name for one in names if (name := getattr(self.rules, one, None)) is not None)

    def shards(self, logical_axis: str) -> int:
        """Return how many parts the logical axis is split into."""
        name = getattr(self.rules, logical_axis, None)
        return 1 if name is None else dict(self.axes)[name]

    def gathered(self, *logical_axes: str) -> int:
        """Return how many devices' tokens each part of these axes gets: where sequences are split so too."""
        owner = self.rules.seq
        is_shared = owner is not None and owner in [getattr(self.rules, axis, None) for axis in logical_axes]
        return self.shards("seq") if is_shared else 1

    @property
    def machine(self) -> Target | None:
        """The machine that the mesh is for, if it names one."""
        return None if self.target is None else read_target(self.target)

    def conflicts(self) -> list[Conflict]:
        """Mesh axes are named once, rules name ones that exist, and none splits an array twice."""
        conflicts = [*_doubled(self.axes), *_strangers(self.rules, [name for name, _ in self.axes])]
        if not conflicts and self.shards("kv_head") % self.kv_copies:
            reason = f"must divide the {self.shards('kv_head')} devices of kv_head's axis"
            conflicts.append((("kv_copies",), f"{reason}, got {self.kv_copies}"))
        if self.rules.latent is not None:
            reason = "must be null: each device of a mesh axis has latents whole, or those of its sequences"
            conflicts.append((("rules", "latent"), f'{reason}, got "{self.rules.latent}"'))
        return [*conflicts, *self._target_conflicts(), *_unequal(self.rules), *_clashes(self.rules)]

    def _target_conflicts(self) -> list[Conflict]:
        """The machine is known and has as many devices as the mesh."""
        try:
            machine = self.machine
        except ValueError as error:
            return [(("target",), str(error))]
        if machine is None or machine.num_devices == self.num_devices:
            return []
        reason = f"must have the {self.num_devices} devices of the mesh's axes, got {machine.num_devices}"
        return [(("target",), f"{reason} of {self.target}")]


def _doubled(axes: tuple[tuple[str, int], ...]) -> Iterator[Conflict]:
    """Find mesh axes that are named twice."""
    names = [name for name, _ in axes]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield (
                ("axes",),
                f'must name each mesh axis once, got "{name}" {names.count(name)} times; keep one',
            )


def _strangers(rules: MeshRules, names: list[str]) -> Iterator[Conflict]:
    """Find rules that name no axis of the mesh."""
    for axis, name in asdict(rules).items():
        if name is not None and name not in names:
            known = ", ".join(names) or "it has none"
            yield (
                ("rules", axis),
                f'must name an axis of the mesh ({known}), got "{name}"{did_you_mean(name, names)}',
            )


def _unequal(rules: MeshRules) -> Iterator[Conflict]:
    """Find axes that must be split alike and are not."""
    for first, second in EQUAL_RULES:
        wanted, got = getattr(rules, first) or "null", getattr(rules, second) or "null"
        if wanted != got:
            yield ("rules", second), f"must equal the rule of {first} ({wanted}), got {got}; set both alike"


def _clashes(rules: MeshRules) -> Iterator[Conflict]:
    """Find mesh axes that split two axes of one array; each pair of axes is said once."""
    for array, axes, first, second in clashes(asdict(rules)):
        reason = f'must not be "{getattr(rules, second)}", which splits {first} of the same array'
        yield ("rules", second), f"{reason} ({array}: {' '.join(axes)}); drop one"
