"""A checkpoint without the layers that predict tokens past the next one (DeepSeek-V3, section 2.2).

Knows how layers are named; knows no format and no model.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from jkv.models.weights.source import TensorInfo, TensorSource


class LeadingLayers:
    """Reads another source's tensors, but those of layers past the decoder's.

    Args:
        source: the checkpoint.
        num_layers: layers of the decoder.
        num_past: layers after them that are left out, as the model's description counts them.
        stem: what the names of a layer's tensors start with, before its number.
    """

    def __init__(self, source: TensorSource, num_layers: int, num_past: int, *, stem: str):
        self._source = source
        past = tuple(f"{stem}{layer}." for layer in range(num_layers, num_layers + num_past))
        self._infos = {name: info for name, info in source.tensors.items() if not name.startswith(past)}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that is left, by its name in the file."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out."""
        return self._source.read(name, index)
