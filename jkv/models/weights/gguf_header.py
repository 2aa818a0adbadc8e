"""The header of a GGUF file: its metadata and where its tensors lie.

Knows the layout of GGUF 2 and 3, little-endian; reads no tensor.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# The format's codes of scalar types; 8 is a string and 9 an array.
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype(np.bool_),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: logical sizes, rows first (the file has them last).
        type: how its rows are encoded.
        start: first byte in the file.
        num_bytes: encoded size.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (str, int, float, bool and lists of them) and tensors, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header.

    Raises:
        ValueError: the file is not GGUF, is cut, or is one part of several.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path} must be a GGUF file, but does not begin with {_MAGIC.decode()!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data))
            except (_Damage, UnicodeDecodeError, RecursionError) as damage:
                raise ValueError(f"{path} must be a whole GGUF file, but {damage}") from None


def write_gguf_metadata(path: Path, source: Path) -> None:
    """Write a GGUF file with the metadata of another and no tensor.

    Raises:
        ValueError: as `read_gguf_header`.
    """
    read_gguf_header(source)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        version, _, num_values = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
        start = cursor.position
        for _ in range(num_values):
            cursor.string()
            cursor.value(cursor.number("<I"))
        values = data[start : cursor.position]
    path.write_bytes(_MAGIC + struct.pack("<IQQ", version, 0, num_values) + values)


class _Damage(Exception):  # noqa: N818 - it never leaves this module
    """What is wrong with a file, as the end of a sentence."""


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = len(_MAGIC)

    def take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        self._check_end()
        return self.data[start : self.position]

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, length: int) -> list[str]:
        """Read strings that follow one another; a vocabulary has so many that calls for each would show."""
        texts, data = [], self.data
        for _ in range(length):
            start = self.position + 8
            self.position = start + int.from_bytes(data[start - 8 : start], "little")
            if self.position > len(data):
                break
            texts.append(data[start : self.position].decode())
        self._check_end()
        return texts

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            element, length = self.number("<I"), self.number("<Q")
            if element == _STRING:
                return self.strings(length)
            if element in _SCALARS:
                return self.scalars(element, length)
            return [self.value(element) for _ in range(length)]
        return self.scalars(code, 1)[0]

    def scalars(self, code: int, length: int) -> list[Any]:
        if code not in _SCALARS:
            raise _Damage(f"its header has a value of the unknown type {code}")
        dtype = _SCALARS[code]
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()

    def _check_end(self) -> None:
        if self.position > len(self.data):
            raise _Damage(f"its header ends at byte {len(self.data)} of at least {self.position}")


def _read(cursor: _Cursor) -> GgufHeader:
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise _Damage(f"its version is {version}, and little-endian {_VERSIONS} are read")
    num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise _Damage(f"it has two values of {key!r}")
        metadata[key] = cursor.value(cursor.number("<I"))
    if metadata.get("split.count", 1) != 1:
        raise _Damage(f"it is one of {metadata['split.count']} parts; merge them with llama-gguf-split")
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damage(f"its general.alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise _Damage(f"it has two tensors {name!r}")
        tensors[name] = _place(name, shape, kind, start + offset)
    _check_places(tensors, len(cursor.data))
    return GgufHeader(metadata, tensors)


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    shape = tuple(cursor.number("<Q") for _ in range(cursor.number("<I")))
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _place(name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    try:
        encoding = GGMLQuantizationType(kind)
    except ValueError:
        raise _Damage(f"tensor {name!r} has the unknown type {kind}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[encoding]
    if not shape or shape[-1] % block_size:
        raise _Damage(
            f"tensor {name!r} of {list(shape)} does not fit {encoding.name}'s blocks of {block_size}"
        )
    return GgufTensor(shape, encoding, start, math.prod(shape) // block_size * block_bytes)


def _check_places(tensors: dict[str, GgufTensor], size: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise _Damage(f"tensor {name!r} overlaps the one before it")
        end = tensor.start + tensor.num_bytes
        if end > size:
            raise _Damage(f"tensor {name!r} ends at byte {end} of {size}; download it again")
