"""A plan as a picture: a device's memory against the sequences it holds, and what fits in each codec.

Needs matplotlib, the extra `plot`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jkv.plan.capacity import Choice, Deployment

_NUM_POINTS = 64


def plot(file: Path, deployment: Deployment, *, memory: int, budget: int, found: Sequence[Choice]) -> None:
    """Draw a plan into a file whose suffix says its format, as .png.

    Args:
        file: is overwritten.
        deployment: what is planned.
        memory: bytes of a device.
        budget: those without the reserve.
        found: what fits in `budget`; each codec is drawn with its best page size.

    Raises:
        ValueError: matplotlib is not installed, or does not draw such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib, got none; pip install 'jkv[plot]'") from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    causes, fitting = figure.subplots(1, 2)

    most = max(8, deployment.sequences_in(budget) * 5 // 4)
    counts = sorted({1 + step * (most - 1) // (_NUM_POINTS - 1) for step in range(_NUM_POINTS)})
    parts = [asdict(deployment.memory(count)) for count in counts]
    layers = {name: [part[name] / 1e9 for part in parts] for name in parts[0]}
    drawn = {name: sizes for name, sizes in layers.items() if max(sizes) > memory / 1e9 / 200}
    causes.stackplot(counts, list(drawn.values()), labels=list(drawn))
    causes.axhline(memory / 1e9, color="black", label="memory")
    causes.axhline(budget / 1e9, color="black", linestyle="--", label="without the reserve")
    causes.set(xlabel="sequences", ylabel="GB on a device", title=f"{deployment.spec.groups[0].codec} cache")
    causes.legend(loc="lower right", fontsize="small")

    best: dict[str, int] = {}
    for choice in found:
        best[choice.codec] = max(best.get(choice.codec, 0), choice.num_sequences or 0)
    bars = fitting.barh(list(best), list(best.values()))
    fitting.bar_label(bars, padding=3)
    fitting.invert_yaxis()
    fitting.margins(x=0.15)
    fitting.set(xlabel="sequences that fit", title="by codec, at its best page size")
    figure.savefig(file, dpi=150)
