"""The files of a tokenizer beside a model's weights, and how they go along to another folder.

Knows names of files; splits no text.
"""

import shutil
from pathlib import Path

from jkv.models.folder_tokenizer import read_encoder
from jkv.models.gguf_metadata import gguf_metadata
from jkv.models.tokenizer import Tokenizer
from jkv.models.weights.gguf_header import write_gguf_metadata

# In a checkpoint of jkv, the metadata of the GGUF file that it came from.
_GGUF = "tokenizer.gguf"
_FOLDER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def has_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file, or a model's folder with these files, describes a tokenizer."""
    file = _gguf_of(path)
    if file is not None:
        return "tokenizer.ggml.tokens" in gguf_metadata(file)
    return (path / _FOLDER[0]).is_file()


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file or of a model's folder.

    Raises:
        ValueError: there is none, or it is of a kind that jkv does not read.
    """
    file = _gguf_of(path)
    return Tokenizer.from_folder(path) if file is None else Tokenizer.from_gguf(gguf_metadata(file))


def tokenizer_kind(path: Path) -> str:
    """Return the algorithm of a tokenizer that can be read, in the file's own word."""
    file = _gguf_of(path)
    if file is not None:
        return gguf_metadata(file)["tokenizer.ggml.model"]
    return type(read_encoder(path).model).__name__


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy what describes the tokenizer of a GGUF file or of a model's folder, if anything does."""
    file = _gguf_of(path)
    if file is not None:
        write_gguf_metadata(folder / _GGUF, file)
        return
    for name in _FOLDER:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)


def _gguf_of(path: Path) -> Path | None:
    file = path / _GGUF if path.is_dir() else path
    return file if file.is_file() else None
