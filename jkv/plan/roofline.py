"""The least time of a step on one device: what it computes, reads and sends, at a machine's full rates.

The three may run at once, so a step takes at least the longest of them (Williams et al. 2009). Latencies are
not in it. Knows sums over a deployment; imports no JAX.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from jkv.plan.capacity import Deployment
from jkv.plan.decoder import Parameters, parameters
from jkv.plan.machines import Machine

Bound = Literal["compute", "memory", "network"]


@dataclass(frozen=True)
class Step:
    """What a step takes on the device that has most of it.

    Attributes:
        num_tokens: new tokens of all devices.
        flops: of products with weights and of attention, a multiplication and an addition each.
        read_bytes: weights that the tokens need, each once, and what their sequences hold.
        sent_bytes: the least that collectives send; see `Collective.sent_bytes`.
        compute_seconds: `flops` at the machine's rate.
        memory_seconds: `read_bytes` at it.
        network_seconds: `sent_bytes` at it.
    """

    num_tokens: int
    flops: int
    read_bytes: int
    sent_bytes: int
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        """The least time of the step."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def bound(self) -> Bound:
        """What that time is spent on."""
        times: dict[Bound, float] = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "network": self.network_seconds,
        }
        return max(times, key=lambda name: times[name])

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all devices in a second, at most."""
        return self.num_tokens / self.seconds


def step(deployment: Deployment, machine: Machine, num_sequences: int, width: int, sent_bytes: int) -> Step:
    """Return what a step of `width` new tokens for each sequence takes when all are at their full length."""
    rows = -(-num_sequences // deployment.mesh.shards("page"))
    flops, read_bytes = step_flops(deployment, rows, width), step_bytes(deployment, num_sequences, width)
    return Step(
        num_tokens=num_sequences * width,
        flops=flops,
        read_bytes=read_bytes,
        sent_bytes=sent_bytes,
        compute_seconds=flops / machine.flops,
        memory_seconds=read_bytes / machine.hbm_bandwidth,
        network_seconds=sent_bytes / machine.link_bandwidth,
    )


def step_flops(deployment: Deployment, rows: int, width: int) -> int:
    """Return the operations of a device's `rows` sequences, of `width` new tokens each.

    Logits are those of each sequence's last token. A token goes through a few of a mixture's experts.
    """
    mesh, (head, *others) = deployment.mesh, _matrices(deployment)
    products = rows * head.num_parameters(mesh)
    products += sum(
        rows * width * _gathered(deployment, part) * _share(deployment, part) * part.num_parameters(mesh)
        for part in others
    )
    return round(2 * products + rows * _attention_flops(deployment, width))


def step_bytes(deployment: Deployment, num_sequences: int, width: int) -> int:
    """Return the bytes that a device reads: weights, and keys and values that its sequences' queries see.

    Of experts those that a token was sent to, if tokens choose alike among all (balls into bins).
    """
    memory = deployment.memory(num_sequences)
    tokens = -(-num_sequences // deployment.mesh.shards("page")) * width
    weights = sum(
        (1 - (1 - _share(deployment, part)) ** (tokens * _gathered(deployment, part)))
        * part.num_bytes(deployment.weights, deployment.mesh)
        for part in _matrices(deployment)
    )
    return round(weights + memory.cache + memory.padding)


def _matrices(deployment: Deployment) -> list[Parameters]:
    """Return the weights that are multiplied by, the output head first; an embedding is looked up."""
    assert deployment.sizes is not None
    parts = [part for part in parameters(deployment.sizes) if len(part.axes) > 1]
    return parts if deployment.sizes.is_tied else parts[1:]


def _gathered(deployment: Deployment, part: Parameters) -> int:
    """Return how many devices' tokens are multiplied by a device's part of the weights."""
    return deployment.mesh.gathered(*(axis for axis, _ in part.axes if axis in ("mlp", "expert")))


def _share(deployment: Deployment, part: Parameters) -> float:
    """Return the share of the weights that one token is multiplied by."""
    experts = deployment.sizes and deployment.sizes.experts
    is_expert = any(axis == "expert" for axis, _ in part.axes)
    return experts.num_active / experts.num_experts if experts and is_expert else 1.0


def _attention_flops(deployment: Deployment, width: int) -> Fraction:
    """Return the operations of one sequence's attention in all layers, at its full length, or of its stripe.

    Latents are attended with the up-projections absorbed, of which `_matrices` has the products.
    """
    sizes = deployment.sizes
    assert sizes is not None
    heads = sizes.num_heads // deployment.mesh.shards("q_head")
    total: int | Fraction = 0
    for group in deployment.spec.groups:
        key, value = group.head_dim, group.head_dim
        if group.kind == "latent":
            key += group.rope_dim

        def seen(length: int, window: int | None = group.window) -> int:
            return length if window is None else min(length, window)

        total += 2 * width * group.num_layers * heads * (key + value) * deployment.mix.mean(seen)
    return Fraction(total) / deployment.mesh.shards("context")
