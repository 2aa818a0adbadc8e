"""A run's losses as a picture. Needs matplotlib, the extra `plot`."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float


def check_curve(file: Path) -> None:
    """Refuse what `draw_curve` would, before a run instead of after it.

    Raises:
        ValueError: matplotlib is not installed, or does not draw such a file.
    """
    formats = sorted(_figure().canvas.get_supported_filetypes())
    if file.suffix[1:].lower() not in formats:
        raise ValueError(f"a curve's file must end in one of {formats} after a dot, got {file.name}")


def draw_curve(file: Path, losses: Float[np.ndarray, " step"], *, label: str) -> None:
    """Draw each step's loss into a file whose suffix says its format, as .png.

    Raises:
        ValueError: as `check_curve`.
    """
    check_curve(file)
    figure = _figure()
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=label)
    figure.savefig(file, dpi=150)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib, got none; pip install 'jkv[plot]'") from error
    return Figure(figsize=(7, 4), layout="constrained")
