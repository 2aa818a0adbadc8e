"""What a device holds and sends in a decode step, for 1 to 256 devices and each layout; for docs/scaling.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/scaling.py

Sums of array sizes, by the arithmetic of `jkv plan`: nothing is compiled or run. A cell has the gigabytes of
weights, those of cache with how many times an even share they are, and the megabytes that a ring has to send.
"""

from dataclasses import dataclass, replace

from jkv.cache.spec import CacheSpec
from jkv.collectives import Collective
from jkv.config import MeshRules, MeshSection, SizesSection, load_config
from jkv.plan.capacity import Deployment
from jkv.plan.decoder import cache_groups
from jkv.plan.lengths import one_length

NUM_DEVICES = tuple(2**power for power in range(9))
NUM_SEQUENCES, CONTEXT, PAGE_SIZE = 256, 8192, 64
# Activations are bfloat16; what attention leaves of a stripe, and its log-sum-exp, are float32.
_ACTIVATION_BYTES, _PARTIAL_BYTES = 2, 4
# A token's choice of an expert: its number and its weight.
_CHOICE_BYTES = 4 + 4


@dataclass(frozen=True)
class Layout:
    """One way to use devices: the product of the numbers, each of a mesh axis.

    Attributes:
        model: that split heads and widths.
        data: that split sequences.
        context: that each hold a stripe of every sequence.
        expert: that split experts, each group with the whole batch.
        has_travel: experts are split over `data`, and tokens travel to them.
    """

    model: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    has_travel: bool = False

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.model * self.data * self.context * self.expert


def dense_layouts(num_devices: int, num_kv_heads: int) -> dict[str, Layout]:
    """Return the layouts of a model with KV heads."""
    model = min(num_devices, num_kv_heads)
    rest = num_devices // model
    return {
        "heads, then copies of KV heads": Layout(num_devices),
        "heads, then sequences": Layout(model, data=rest),
        "heads, then stripes of context": Layout(model, context=rest),
        "sequences alone": Layout(data=num_devices),
    }


def latent_layouts(num_devices: int) -> dict[str, Layout]:
    """Return the layouts of a model with latents, which no axis of heads splits."""
    model = min(num_devices, 8)
    rest = num_devices // model
    return {
        "heads, then experts; latents whole": Layout(model, expert=rest),
        "heads, then sequences": Layout(model, data=rest),
        "heads, experts and sequences": Layout(model, data=max(1, rest // 8), expert=min(rest, 8)),
        "sequences, experts over the same": Layout(data=num_devices, has_travel=True),
    }


def device_bytes(sizes: SizesSection, layout: Layout) -> tuple[int, int]:
    """Return the bytes of weights and of cache that a device holds."""
    copies = 1 if sizes.latent else max(1, layout.model // sizes.num_kv_heads)
    sizes = replace(sizes, num_kv_heads=sizes.num_kv_heads * copies)
    heads = dict.fromkeys(("q_head", "kv_head", "mlp", "vocab"), "model")
    rules = MeshRules(seq="data", page="data", expert="data" if layout.has_travel else "expert", **heads)
    axes = (("data", layout.data), ("expert", layout.expert), ("model", layout.model))
    spec = CacheSpec.create(cache_groups(sizes, "bf16"), page_size=PAGE_SIZE)
    mesh = MeshSection(axes, "auto", rules, kv_copies=copies)
    memory = Deployment(spec, one_length(CONTEXT), mesh, sizes).memory(NUM_SEQUENCES)
    # Stripes are pages of one sequence, dealt out one by one.
    return memory.weights, memory.cache // layout.context


def sent_bytes(sizes: SizesSection, layout: Layout) -> int:
    """Return the bytes that a device has to send in a decode step, sampling aside.

    Attention's output and the MLP's are each summed over their devices, once a layer, and so is the
    embedding; a mixture's sum, shared experts included, goes over the experts' axis too. Tokens that travel
    are gathered with their choices, and their sums scattered. Stripes leave partial outputs and
    their weights, and before these the largest log-sum-exps.
    """
    rows = NUM_SEQUENCES // layout.data
    stream = rows * sizes.embed_dim * _ACTIVATION_BYTES
    num_mixtures = sizes.num_layers - sizes.num_dense_layers
    partial = rows * sizes.num_heads // layout.model * (1 + sizes.head_dim + 1) * _PARTIAL_BYTES
    sums = [
        (2 * sizes.num_layers + 1 - num_mixtures, stream, layout.model),
        (num_mixtures, stream, layout.model * layout.expert),
        (sizes.num_layers, partial, layout.context),
    ]
    sent = sum(count * Collective("all-reduce", size, ways).sent_bytes for count, size, ways in sums)
    if layout.has_travel and sizes.experts is not None:
        back = NUM_SEQUENCES * sizes.embed_dim * _ACTIVATION_BYTES
        there = back + NUM_SEQUENCES * sizes.experts.num_active * _CHOICE_BYTES
        sent += num_mixtures * Collective("all-gather", there, layout.data).sent_bytes
        sent += num_mixtures * Collective("reduce-scatter", back, layout.data).sent_bytes
    return sent


def table(sizes: SizesSection) -> str:
    """Return the table of a model, in Markdown."""

    def layouts(num_devices: int) -> dict[str, Layout]:
        if sizes.latent is None:
            return dense_layouts(num_devices, sizes.num_kv_heads)
        return latent_layouts(num_devices)

    _, whole = device_bytes(sizes, Layout())
    names = list(layouts(1))
    lines = ["| devices | " + " | ".join(names) + " |", "|" + "---|" * (1 + len(names))]
    for num_devices in NUM_DEVICES:
        cells = [_cell(sizes, layout, whole // num_devices) for layout in layouts(num_devices).values()]
        lines.append(f"| {num_devices} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(sizes: SizesSection, layout: Layout, share: int) -> str:
    if sizes.num_heads % layout.model or NUM_SEQUENCES % layout.data:
        return "-"
    weights, cache = device_bytes(sizes, layout)
    times = "" if cache == share else f" ({cache / share:.0f}x)"
    return f"{weights / 1e9:.1f} + {cache / 1e9:.1f}{times}, {sent_bytes(sizes, layout) / 1e6:.0f}"


def main() -> None:
    for name in ("llama-3.1-70b", "deepseek-v3"):
        sizes = load_config("smollm2-cpu", ["--model", name]).model.sizes
        assert sizes is not None
        print(f"{name}:\n\n{table(sizes)}\n")


if __name__ == "__main__":
    main()
