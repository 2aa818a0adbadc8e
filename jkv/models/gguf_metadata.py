"""The metadata of a GGUF file as plain Python values.

Knows the header's layout (GGUF 2 and 3, little endian); reads no tensor.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The format's type codes.
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Read a GGUF file's metadata: str, int, float, bool and lists of them, by key.

    Reads the header only, so a vocabulary of 50,000 tokens takes a tenth of a second. A file that is no GGUF,
    or that ends within its metadata, is a ValueError.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} must be a GGUF file, but it does not begin with {_MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(data).read()
            except (EOFError, UnicodeDecodeError, KeyError) as error:
                raise ValueError(
                    f"{path} must hold whole GGUF metadata, but is cut or damaged: {error}"
                ) from error


class _Header:
    """Reads one value after the other, from behind the magic bytes."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._position = len(_MAGIC)

    def read(self) -> dict[str, Any]:
        version, _, num_entries = struct.unpack("<IQQ", self._take(20))
        if version not in _VERSIONS:
            raise ValueError(f"a GGUF file must be little-endian, of version 2 or 3, got version {version}")
        return {self._strings(1)[0]: self._value(self._code()) for _ in range(num_entries)}

    def _code(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _value(self, code: int) -> Any:
        if code == _ARRAY:
            return self._values(*struct.unpack("<IQ", self._take(12)))
        return self._values(code, 1)[0]

    def _values(self, code: int, length: int) -> list[Any]:
        if code == _ARRAY:
            return [self._value(code) for _ in range(length)]
        if code == _STRING:
            return self._strings(length)
        dtype = _SCALARS[code]
        return np.frombuffer(self._take(length * dtype.itemsize), dtype).tolist()

    def _strings(self, length: int) -> list[str]:
        # A vocabulary is a few hundred thousand strings, so this loop makes no calls of its own.
        texts = []
        for _ in range(length):
            start = self._position + 8
            end = start + int.from_bytes(self._data[self._position : start], "little")
            if end > len(self._data):
                raise EOFError(f"byte {end} is due where {len(self._data)} are there")
            texts.append(self._data[start:end].decode())
            self._position = end
        return texts

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            raise EOFError(f"byte {end} is due where {len(self._data)} are there")
        taken, self._position = self._data[self._position : end], end
        return taken
