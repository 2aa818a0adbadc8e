"""Safetensors files: the reader, memory-mapped, of one file or a folder of shards; and the writer of one.

Knows the format alone: 8 bytes of length, a JSON header, the data. No dtype of it needs another package.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jkv.models.fields import read_json_object
from jkv.models.weights.source import TensorInfo

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_safetensors(path: Path) -> "SafetensorsSource":
    """Map a `.safetensors` file, or a folder's: those that its index names, or `model.safetensors`.

    Where two shards hold a tensor of one name, the index says which counts.

    Raises:
        ValueError: a file, or a tensor of the index, is missing, cut or damaged; the message names it.
    """
    if path.is_file():
        return SafetensorsSource({path: None})
    if (path / _INDEX).is_file():
        return _open_indexed(path)
    if (path / _SINGLE).is_file():
        return SafetensorsSource({path / _SINGLE: None})
    raise ValueError(f"{path} must hold {_INDEX} or {_SINGLE}, got neither; the download may not be complete")


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that a file keeps beside its tensors.

    Raises:
        ValueError: the file's header is cut or damaged.
    """
    return _read_header(path)[0]


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays and texts as one file."""
    encodings = {dtype: encoding for encoding, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        encoding = encodings[array.dtype]
        header[name] = {"dtype": encoding, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # The format has the data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _open_indexed(folder: Path) -> "SafetensorsSource":
    places = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{folder / _INDEX} must be JSON with a weight_map from tensors to files")
    foreign = sorted(file for file in set(places.values()) if Path(file).name != file)
    if foreign:
        raise ValueError(f"{folder / _INDEX} must name files of its own folder, got {foreign}")
    missing = sorted(file for file in set(places.values()) if not (folder / file).is_file())
    if missing:
        raise ValueError(f"{folder} lacks the shards {missing} of its index; download them")
    source = SafetensorsSource(
        {
            folder / file: {name for name, place in places.items() if place != file}
            for file in sorted(set(places.values()))
        }
    )
    lost = sorted(places.keys() - source.tensors.keys())
    if lost:
        raise ValueError(
            f"{folder} lacks the tensors {reprlib.repr(lost)} where its index has them; download it again"
        )
    return source


class SafetensorsSource:
    """Tensors of one or more safetensors files; `read` returns views of the mapped files.

    Args:
        shards: each file with the names in it to leave to other files; None leaves none.
    """

    def __init__(self, shards: Mapping[Path, set[str] | None]):
        self._views: dict[str, np.ndarray] = {}
        self._infos: dict[str, TensorInfo] = {}
        for path, elsewhere in shards.items():
            for name, (info, view) in _map_file(path).items():
                if name in (elsewhere or ()):
                    continue
                if name in self._infos:
                    raise ValueError(f"{path} has a second tensor {name!r}, which the index must place")
                self._infos[name], self._views[name] = info, view

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the files."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a view of a tensor's piece, whole along the axes that `index` leaves out."""
        return self._views[name][index]


def _map_file(path: Path) -> dict[str, tuple[TensorInfo, np.ndarray]]:
    _, header, start = _read_header(path)
    # A plain array over the map: a memmap's own slicing is ten times slower.
    data = np.asarray(np.memmap(path, np.uint8, "r"))[start:]
    mapped, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]], entry["dtype"])
        begin, stop = entry["data_offsets"]
        if begin != end or stop - begin != math.prod(info.shape) * info.dtype.itemsize:
            raise ValueError(
                f"{path} is damaged: tensor {name!r} of {info.encoding}{list(info.shape)} takes bytes "
                f"{begin} to {stop}, where the one before ends at {end}"
            )
        end = stop
        if end <= data.size:
            mapped[name] = (info, data[begin:stop].view(info.dtype).reshape(info.shape))
    if end != data.size:
        raise ValueError(f"{path} must hold {end} bytes of tensors, got {data.size}; download it again")
    return mapped


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, Any], int]:
    """Return the file's texts, the tensors' entries, each with known keys, and where the data starts."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path} must begin with a header, got {length} bytes of it in a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must have a safetensors header, got: {error}") from error
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict | None):
        raise ValueError(f"{path} must have a safetensors header, got other JSON")
    damaged = [name for name, entry in header.items() if not _is_sound(entry)]
    if damaged:
        raise ValueError(
            f"{path} must say dtype, shape and data_offsets of each tensor, got others of {damaged[0]!r}"
        )
    unknown = sorted({entry["dtype"] for entry in header.values()} - _DTYPES.keys())
    if unknown:
        raise ValueError(f"{path} must have tensors of {', '.join(_DTYPES)}, got {', '.join(unknown)}")
    return metadata or {}, header, 8 + length


def _is_sound(entry: Any) -> bool:
    match entry:
        case {"dtype": str(), "shape": list(shape), "data_offsets": [int(), int()] as offsets}:
            return all(isinstance(number, int) and number >= 0 for number in [*shape, *offsets])
    return False
