"""A run's losses as a picture. Needs matplotlib, the extra `plot`."""

from pathlib import Path

import numpy as np
from jaxtyping import Float


def draw_curve(file: Path, losses: Float[np.ndarray, " step"], *, label: str) -> None:
    """Draw each step's loss into a file whose suffix says its format, as .png.

    Raises:
        ValueError: matplotlib is not installed, or does not draw such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib, got none; pip install 'jkv[plot]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=label)
    figure.savefig(file, dpi=150)
