"""What a conversion gives, and how its errors are measured.

Knows arrays; no kind of attention.
"""

from dataclasses import dataclass

import jax
import numpy as np

from jkv.models.model_config import ModelConfig


@dataclass(frozen=True)
class Converted:
    """A model whose attention was changed.

    Attributes:
        config: its sizes.
        parameters: by dotted path; those that stayed are the original's.
        errors: of each layer, what each step lost: a relative error by the step's name.
    """

    config: ModelConfig
    parameters: dict[str, jax.Array]
    errors: tuple[dict[str, float], ...]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the Frobenius norm of the difference over that of what was wanted."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
