"""What every file of weights offers: named tensors, read in pieces.

Knows no format, no model and no device.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped


@dataclass(frozen=True)
class TensorInfo:
    """Describes a tensor without reading it.

    Attributes:
        shape: logical sizes, rows first.
        dtype: of what `read` returns.
        encoding: how it is stored, in the file's own word ("BF16", "Q4_1").
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    encoding: str


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that stay on disk until a piece of one is asked for."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the file."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out.

        The result may be a view of the file: read-only, not aligned, and gone when the file is cut.
        """
        ...


def fingerprint(source: TensorSource) -> str:
    """Return 32 hexadecimal digits that name these weights.

    They cover every tensor's name, shape and encoding and the values of its first, middle and last row; how
    the tensors are spread over files does not matter.
    """
    digest = hashlib.sha256()
    for name, info in sorted(source.tensors.items()):
        digest.update(f"{name}\0{info.encoding}\0{info.shape}\n".encode())
        length = info.shape[0] if info.shape else 1
        for row in (0, length // 2, length - 1):
            index = (slice(row, row + 1),) if info.shape else ()
            digest.update(source.read(name, index).tobytes())
    return digest.hexdigest()[:32]
