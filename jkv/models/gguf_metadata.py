"""The metadata of a GGUF file as plain Python values.

Knows no key; reads no tensor.
"""

from pathlib import Path
from typing import Any

from jkv.models.weights.gguf_header import read_gguf_header


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Read a GGUF file's metadata: str, int, float, bool and lists of them, by key.

    A file that is no GGUF, that is one part of several, or that is cut, even within its tensors, is a
    ValueError.
    """
    return read_gguf_header(Path(path)).metadata
