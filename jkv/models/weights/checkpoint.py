"""jkv's own checkpoints: parameters in Orbax's format with the model's configuration beside them.

Knows the folder's layout; the arrays are Orbax's.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from pydantic import BaseModel, ConfigDict, ValidationError

from jkv.models.model_config import ModelConfig
from jkv.models.weights.load import is_castable, placed

_DESCRIPTION = "jkv.json"
_PARAMETERS = "parameters"
# Bytes at the head and the tail of each file that the fingerprint covers.
_SAMPLE_BYTES = 4096


class _Description(BaseModel):
    """What jkv.json holds; `version` counts the folder's layouts."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    config: ModelConfig


def is_checkpoint(path: Path) -> bool:
    """Return whether the folder is a checkpoint of jkv, whole or not."""
    return (path / _DESCRIPTION).is_file() or (path / _PARAMETERS).is_dir()


def check_new(path: Path) -> None:
    """Refuse a folder that is there, for a checkpoint overwrites nothing, or that cannot be made."""
    if path.exists():
        raise ValueError(f"a checkpoint must go to a new folder, got {path}; remove it or choose another")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(
            f"a checkpoint must go to a folder that can be made, got {path}; {nearest} is none to write to"
        )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that takes the name `path` when all is in it.

    It is beside `path` under a hidden name until then: an error removes it, and a kill leaves it there.

    Raises:
        ValueError: as `check_new`, or the system wrote no more.
    """
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = f".{path.name}-"
    try:
        # What keeps it from being removed must not hide why it is removed.
        with tempfile.TemporaryDirectory(
            prefix=hidden, dir=path.parent, ignore_cleanup_errors=True
        ) as unfinished:
            folder = Path(unfinished) / path.name
            yield folder
            folder.rename(path)
    except (OSError, ValueError) as error:
        reason = _system_reason(error)
        if reason is None or str(path.parent / hidden) not in str(error):
            raise
        raise ValueError(f"{path} must be written whole, got: {reason}; nothing of it was kept") from error


def _system_reason(error: OSError | ValueError) -> str | None:
    """Return what the system said, to Python or to TensorStore, which puts its code into the text."""
    if isinstance(error, OSError):
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else os.strerror(int(code[1]))


@contextlib.contextmanager
def errors_once() -> Iterator[None]:
    """Keep Orbax from logging an error in each of its threads; the caller gets it too."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_no_thread_error)
    yield
    # Not after an error: other threads may meet it later than the one that was waited for.
    logger.removeFilter(_is_no_thread_error)


def _is_no_thread_error(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in record.getMessage()


def save_checkpoint(path: Path, config: ModelConfig, parameters: Mapping[str, jax.Array]) -> None:
    """Write a checkpoint; on several hosts, every one calls this with its shards.

    Args:
        path: a folder that is not there yet.
        config: the model's sizes.
        parameters: arrays by dotted path, as `load_parameters` returns them.

    Raises:
        ValueError: as `check_new`.
    """
    check_new(path)
    with errors_once():
        _orbax().save(_folder(path), dict(parameters))
    # Written last: a folder without it was not finished.
    if jax.process_index() == 0:
        (path / _DESCRIPTION).write_text(_Description(config=config).model_dump_json(indent=2) + "\n")


def _folder(path: Path) -> str:
    """Return where Orbax keeps the arrays; it takes absolute paths alone."""
    return str(path.absolute() / _PARAMETERS)


def _orbax() -> Any:
    """Return Orbax, which takes a second to import, so only who saves or restores does."""
    from orbax.checkpoint import v1

    return v1


def read_checkpoint_config(path: Path) -> ModelConfig:
    """Return a checkpoint's configuration.

    Raises:
        ValueError: the folder is missing, not a checkpoint of jkv, not finished, or of another version.
    """
    if not path.is_dir():
        raise ValueError(f"a checkpoint must be a folder, got {path}, which is none")
    if not (path / _DESCRIPTION).is_file():
        raise ValueError(f"{path} must hold {_DESCRIPTION}; it is no checkpoint of jkv, or was not finished")
    try:
        return _Description.model_validate_json((path / _DESCRIPTION).read_bytes()).config
    except ValidationError as error:
        wrong = sorted({".".join(map(str, problem["loc"])) for problem in error.errors()})
        raise ValueError(
            f"{path / _DESCRIPTION} must describe a model of this jkv, got other {wrong}"
        ) from error


def checkpoint_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of each parameter by its dotted path, whatever devices saved it.

    Raises:
        ValueError: the folder is no checkpoint, or lacks its parameters.
    """
    read_checkpoint_config(path)
    folder, ocp = _folder(path), _orbax()
    try:
        stored = ocp.metadata(folder).metadata
    except (ocp.errors.InvalidLayoutError, FileNotFoundError) as error:
        raise ValueError(f"{folder} must hold the parameters of the checkpoint, got {error!r}") from error
    # Their shardings are of the devices that saved them, which need not be here.
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in stored.items()}


def restore_checkpoint(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read a checkpoint's parameters onto any mesh and floating-point dtype.

    Args:
        path: the folder.
        targets: shape, dtype and sharding of each parameter, by its dotted path; as for `load_parameters`.

    Raises:
        ValueError: as `match_checkpoint`.
    """
    match_checkpoint(path, targets)
    return _orbax().load(_folder(path), {name: placed(target) for name, target in targets.items()})


def match_checkpoint(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuse a checkpoint of other parameters than `targets`; none is read.

    Raises:
        ValueError: the folder is no checkpoint, or its parameters are not those of `targets`.
    """
    stored = checkpoint_shapes(path)
    differing = sorted(stored.keys() ^ targets.keys())
    if differing:
        raise ValueError(f"{path} must hold the model's parameters, got others or none for {differing}")
    unfit = [
        f"{name} {stored[name].dtype}{list(stored[name].shape)} for {target.dtype}{list(target.shape)}"
        for name, target in targets.items()
        if stored[name].shape != target.shape or not is_castable(stored[name].dtype, target.dtype)
    ]
    if unfit:
        raise ValueError(f"{path} must hold parameters of the model's shapes and kinds, got {unfit}")


def checkpoint_fingerprint(path: Path) -> str:
    """Return 32 hexadecimal digits that name these files; the same weights saved again have others."""
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:32]
