"""A checkpoint of a model that also sees, without its eyes: the tensors of its decoder.

Knows how the parts are named; knows no format and no model.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from jkv.models.weights.source import TensorInfo, TensorSource

_SIGHT = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
# As the hub's files and as transformers 5 name the decoder's parts, and as a model of text alone does.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


class TextTensors:
    """Reads another source's tensors of the decoder, by the names of a model of text alone."""

    def __init__(self, source: TensorSource):
        self._source = source
        self._names = {_text_name(name): name for name in source.tensors if not name.startswith(_SIGHT)}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the decoder; one of an unknown part has the name in the file."""
        return {name: self._source.tensors[stored] for name, stored in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out."""
        return self._source.read(self._names[name], index)


def _text_name(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
