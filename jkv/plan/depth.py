"""What a program of many layers costs, from programs of one and two of each kind.

Layers of a kind compile alike, so every sum over them is linear in their number:

    cost(model) = cost(one of each) + sum over kinds of (layers - 1) * (cost(two of it) - cost(one of each))

Temporaries are no sum: a layer's are free when the next one runs. They are the most of any of these programs;
gates hold that against libtpu's programs of full depth. Knows no compiler.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.stages import Compiled

from jkv.collectives import Collective, find_collectives
from jkv.models.model_config import ModelConfig


class LayerKind(NamedTuple):
    """Layers that compile alike.

    Attributes:
        window: latest positions that they see; None is all.
        has_experts: in place of an MLP.
    """

    window: int | None
    has_experts: bool


def layer_kinds(config: ModelConfig) -> Counter[LayerKind]:
    """Return how many layers there are of each kind; those with an MLP come first, as in the model."""
    num_dense = config.num_layers if config.mixture is None else config.mixture.num_dense_layers
    return Counter(LayerKind(window, layer >= num_dense) for layer, window in enumerate(config.windows))


def with_layers(config: ModelConfig, layers: Mapping[LayerKind, int]) -> ModelConfig:
    """Return the model with so many layers of each kind."""
    kinds = sorted((kind for kind, count in layers.items() for _ in range(count)), key=lambda kind: kind[1])
    mixture = config.mixture
    if mixture is not None:
        num_dense = sum(not kind.has_experts for kind in kinds)
        mixture = replace(mixture, num_dense_layers=num_dense)
    windows = tuple(kind.window for kind in kinds)
    return replace(config, num_layers=len(kinds), windows=windows, mixture=mixture)


@dataclass(frozen=True)
class Costs:
    """What a compiled program takes on one device, each time it is called.

    Attributes:
        arguments: bytes of what goes in.
        outputs: bytes of what comes out.
        aliased: bytes of outputs that lie where arguments lay.
        temporaries: bytes beside them.
        code: bytes of the program.
        flops: operations that the compiler counts: none in a kernel, and one turn of a loop.
        accessed: bytes that the compiler counts, as `flops`.
        collectives: what is sent, and how often.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    flops: float
    accessed: float
    collectives: Counter[Collective]

    @property
    def total(self) -> int:
        """The most bytes that are taken at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


_SUMS = ("arguments", "outputs", "aliased", "code", "flops", "accessed")


def costs_of(program: Compiled) -> Costs:
    """Return what a program takes."""
    memory, counted = program.memory_analysis(), program.cost_analysis() or {}
    assert memory is not None, "a compiler of accelerators says what memory a program takes"
    return Costs(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(counted.get("flops", 0)),
        accessed=float(counted.get("bytes accessed", 0)),
        collectives=Counter(find_collectives(program)),
    )


def shallow_models(config: ModelConfig) -> tuple[ModelConfig, dict[LayerKind, ModelConfig]]:
    """Return the model with one layer of each kind, and with a second one of each kind that has more."""
    kinds = layer_kinds(config)
    one = dict.fromkeys(kinds, 1)
    deeper = {kind: with_layers(config, one | {kind: 2}) for kind, count in kinds.items() if count > 1}
    return with_layers(config, one), deeper


def at_full_depth(config: ModelConfig, one: Costs, deeper: Mapping[LayerKind, Costs]) -> Costs:
    """Return what the whole model's program takes, from those of `shallow_models`."""
    kinds = layer_kinds(config)

    def extrapolate(name: str) -> Any:
        base = getattr(one, name)
        return base + sum((kinds[kind] - 1) * (getattr(two, name) - base) for kind, two in deeper.items())

    collectives = Counter(one.collectives)
    for kind, two in deeper.items():
        for collective in two.collectives | one.collectives:
            more = two.collectives[collective] - one.collectives[collective]
            collectives[collective] += (kinds[kind] - 1) * more
    return Costs(
        **{name: extrapolate(name) for name in _SUMS},
        temporaries=max(costs.temporaries for costs in (one, *deeper.values())),
        collectives=collectives,
    )
