"""One stored model, whatever its format: its configuration, its parameters, its identity.

Knows which reader serves which format; knows no layer.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jkv.models.fields import read_json_object
from jkv.models.gguf_config import FREQUENCY_TABLES, config_from_gguf
from jkv.models.hf_config import config_from_hf
from jkv.models.model_config import ModelConfig, with_kv_copies
from jkv.models.weights.checkpoint import (
    checkpoint_fingerprint,
    match_checkpoint,
    read_checkpoint_config,
    restore_checkpoint,
)
from jkv.models.weights.fp8 import Fp8Source
from jkv.models.weights.gguf import GgufSource
from jkv.models.weights.leading import LeadingLayers
from jkv.models.weights.load import check_finite, load_parameters, match_tensors
from jkv.models.weights.locate import ModelLocation, resolve_model
from jkv.models.weights.mxfp4 import Mxfp4Source
from jkv.models.weights.rules import TensorRule, tensor_rules
from jkv.models.weights.safetensors import open_safetensors
from jkv.models.weights.source import TensorSource, fingerprint
from jkv.models.weights.text import TextTensors


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, its header read.

    Attributes:
        location: where it lies, and in which format.
        config: its sizes.
        source: its tensors; None where Orbax holds them.
    """

    location: ModelLocation
    config: ModelConfig
    source: TensorSource | None

    def load(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read the parameters onto a mesh.

        Args:
            targets: shape, dtype and sharding of each parameter, by its dotted path.

        Raises:
            ValueError: the files do not hold these parameters, each whole and finite.
        """
        if self.source is not None:
            return load_parameters(self.source, self._rules(self.source), targets)
        parameters = restore_checkpoint(self.location.path, targets)
        check_finite(parameters)
        return parameters

    def check(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Refuse files whose headers do not have these parameters; no value is read.

        Args:
            targets: shape and dtype of each parameter, by its dotted path.

        Raises:
            ValueError: as `load`.
        """
        if self.source is not None:
            match_tensors(self.source, self._rules(self.source), targets)
        else:
            match_checkpoint(self.location.path, targets)

    def _rules(self, source: TensorSource) -> tuple[TensorRule, ...]:
        assert self.location.format != "checkpoint"
        return tensor_rules(self.config, self.location.format, source.tensors)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that name the weights."""
        return checkpoint_fingerprint(self.location.path) if self.source is None else fingerprint(self.source)


def open_model(name_or_path: str | Path, *, kv_copies: int = 1) -> StoredModel:
    """Find a model and read its configuration; `resolve_model` says what names it.

    Args:
        name_or_path: a bundled model's name, a file, a folder or a hub id.
        kv_copies: see `jkv.models.model_config.with_kv_copies`.

    Raises:
        ValueError: nothing of that name, a damaged file, a model that jkv does not compute, or one whose KV
            heads cannot be copied so.
    """
    stored = _open(resolve_model(name_or_path))
    if kv_copies > 1 and stored.location.format == "checkpoint":
        raise ValueError(
            f"{stored.location.path}: kv_copies must be 1 for a checkpoint of Orbax, which holds KV heads as "
            f"they were saved, got {kv_copies}"
        )
    with _naming(stored.location.path):
        return replace(stored, config=with_kv_copies(stored.config, kv_copies))


def _open(location: ModelLocation) -> StoredModel:
    if location.format == "checkpoint":
        return StoredModel(location, read_checkpoint_config(location.path), None)
    if location.format == "gguf":
        source = GgufSource(location.path)
        tables = {name: source.read(name).tolist() for name in FREQUENCY_TABLES if name in source.tensors}
        with _naming(location.path):
            config = config_from_gguf(source.metadata, source.tensors, tables)
        num_past = source.metadata.get(f"{source.metadata['general.architecture']}.nextn_predict_layers", 0)
        return StoredModel(location, config, LeadingLayers(source, config.num_layers, num_past, stem="blk."))
    description = read_json_object(location.path / "config.json")
    with _naming(location.path):
        config = config_from_hf(description)
    source = _open_folder(location.path, description)
    # Of the models that are read, those that also see alone have it.
    if "text_config" in description:
        source = TextTensors(source)
    num_past = description.get("num_nextn_predict_layers")
    if num_past:
        source = LeadingLayers(source, config.num_layers, num_past, stem="model.layers.")
    return StoredModel(location, config, source)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say in errors which model they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _open_folder(folder: Path, description: Mapping[str, Any]) -> TensorSource:
    source = open_safetensors(folder)
    quantization = description.get("quantization_config")
    if not quantization:
        return source
    if quantization["quant_method"] == "mxfp4":
        return Mxfp4Source(source)
    block = quantization.get("weight_block_size")
    return Fp8Source(source, tuple(block) if block else None)
