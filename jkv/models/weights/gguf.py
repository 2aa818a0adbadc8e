"""The reader of a GGUF file's tensors, memory-mapped and dequantized piece by piece.

Knows how rows are encoded, through the gguf package; knows no model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from jaxtyping import Shaped

from jkv.models.weights.gguf_header import GgufTensor, read_gguf_header
from jkv.models.weights.source import TensorInfo

# Types that need no decoding; all others become float32.
_PLAIN = {
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.I8: np.dtype("<i1"),
    GGMLQuantizationType.I16: np.dtype("<i2"),
    GGMLQuantizationType.I32: np.dtype("<i4"),
    GGMLQuantizationType.I64: np.dtype("<i8"),
}


class GgufSource:
    """Tensors of one GGUF file; only the blocks that a piece touches are dequantized.

    Attributes:
        metadata: the file's keys and values.

    Raises:
        ValueError: the file is not GGUF, is cut, or is one part of several.
    """

    def __init__(self, path: Path):
        header = read_gguf_header(path)
        self.metadata: dict[str, Any] = header.metadata
        self._places = header.tensors
        self._infos = {name: _info(place) for name, place in header.tensors.items()}
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the file."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out."""
        place = self._places[name]
        stored = self._data[place.start : place.start + place.num_bytes]
        if place.type in _PLAIN:
            return stored.view(_PLAIN[place.type]).reshape(place.shape)[index]
        full = (slice(None),) * (len(place.shape) - len(index))
        *outer, columns = (*index, *full)
        start, stop, _ = columns.indices(place.shape[-1])
        block_size, block_bytes = GGML_QUANT_SIZES[place.type]
        first, last = start // block_size, -(-stop // block_size)
        blocks = stored.reshape(*place.shape[:-1], -1)[
            (*outer, slice(first * block_bytes, last * block_bytes))
        ]
        try:
            values = dequantize(np.ascontiguousarray(blocks), place.type)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {name!r} must be of a type that the gguf package decodes, got {place.type.name}"
            ) from error
        return values[..., start - first * block_size : stop - first * block_size]


def _info(place: GgufTensor) -> TensorInfo:
    return TensorInfo(place.shape, _PLAIN.get(place.type, np.dtype(np.float32)), place.type.name)
