"""A model from its files to a step function on flat arrays.

Puts configuration, parameters and tokenizer together; each is read elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jkv import ops
from jkv.layers.quantized import WeightCodec, check_packs, quantize
from jkv.models.decoder import Decoder
from jkv.models.model_config import ModelConfig
from jkv.models.step import StepFunction, Weights, split_model
from jkv.models.tokenizer import Tokenizer
from jkv.models.tokenizer_files import read_tokenizer
from jkv.models.weights.locate import ModelLocation, resolve_model
from jkv.models.weights.model import open_model
from jkv.sharding import Sharding


@dataclass(frozen=True)
class LanguageModel:
    """A loaded model.

    Attributes:
        config: its sizes.
        step: `(weights, tokens, cache, batch) -> (logits, cache)`.
        weights: the parameters as flat arrays.
        location: where it was read from; None where its weights were drawn.
    """

    config: ModelConfig
    step: StepFunction
    weights: Weights
    location: ModelLocation | None


def load_model(
    name_or_path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    weight_codec: WeightCodec | None = None,
    implementation: ops.Implementation = "auto",
    sharding: Sharding | None = None,
    kv_copies: int = 1,
) -> LanguageModel:
    """Load a model's weights, one tensor at a time, straight to where they live.

    Args:
        name_or_path: as `jkv.models.weights.locate.resolve_model` takes it.
        dtype: dtype of activations.
        param_dtype: dtype of stored weights.
        weight_codec: packs projections and embedding after they are read in `param_dtype`; None keeps them.
        implementation: how attention is computed.
        sharding: places weights, activations and attention over a mesh; None is one device.
        kv_copies: devices that hold each KV head; see `jkv.models.model_config.with_kv_copies`.

    Raises:
        ValueError: the model is not found, not understood, damaged, does not pack, or does not fit the mesh.
    """
    stored = open_model(name_or_path, kv_copies=kv_copies)
    model = make_model(
        stored.config,
        stored.load,
        dtype=dtype,
        param_dtype=param_dtype,
        weight_codec=weight_codec,
        implementation=implementation,
        sharding=sharding,
    )
    return replace(model, location=stored.location)


def make_model(
    config: ModelConfig,
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]],
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    weight_codec: WeightCodec | None = None,
    implementation: ops.Implementation = "auto",
    sharding: Sharding | None = None,
) -> LanguageModel:
    """Make a model of its sizes, and of parameters from anywhere.

    Args:
        config: its sizes.
        read: gives the parameters of such shapes, dtypes and placements, by dotted path.
        dtype: see `load_model`, as the other options.
        param_dtype: dtype of stored weights.
        weight_codec: packs them.
        implementation: how attention is computed.
        sharding: places all over a mesh.

    Raises:
        ValueError: it does not pack, does not fit the mesh, or `read` refuses.
    """
    model = abstract_decoder(
        config, dtype=dtype, param_dtype=param_dtype, implementation=implementation, sharding=sharding
    )
    if weight_codec is not None:
        check_packs(model, weight_codec)
    set_parameters(model, read(parameter_targets(model, sharding)))
    if weight_codec is not None:
        quantize(model, weight_codec)
    step, weights = split_model(model)
    return LanguageModel(config, step, weights, None)


def load_tokenizer(model: str | Path | ModelLocation) -> Tokenizer:
    """Load the tokenizer that belongs to a model's files.

    Args:
        model: as `load_model` takes it, or where its files lie.

    Raises:
        ValueError: the model is not found, or has no tokenizer or one of a kind that jkv does not read.
    """
    location = model if isinstance(model, ModelLocation) else resolve_model(model)
    return read_tokenizer(location.path)


def abstract_decoder(
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    implementation: ops.Implementation = "auto",
    sharding: Sharding | None = None,
    is_rematerialized: bool = False,
) -> Decoder:
    """Return a decoder whose parameters are shapes alone."""

    def make() -> Decoder:
        return Decoder(
            config,
            dtype=dtype,
            param_dtype=param_dtype,
            implementation=implementation,
            sharding=sharding,
            is_rematerialized=is_rematerialized,
            rngs=nnx.Rngs(0),
        )

    return nnx.eval_shape(make)


def abstract_model[Module: nnx.Module](make: Callable[[], Module], sharding: Sharding) -> Module:
    """Return a module whose parameters are shapes, each placed by the logical axes that it names.

    One without such names lies as Flax's `out_sharding` says, or whole.

        model = abstract_model(lambda: Block(sharding), sharding)

    Raises:
        ValueError: the mesh does not divide a parameter.
    """
    model = nnx.eval_shape(make)
    set_parameters(model, parameter_targets(model, sharding))
    return model


def parameter_targets(model: nnx.Module, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and placement of each parameter, by its dotted path.

    Raises:
        ValueError: the mesh does not divide a parameter, or an axis is unknown.
    """
    targets = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        shape, dtype = parameter.shape, parameter.dtype
        placement = None if sharding is None else _placement(parameter, sharding)
        targets[".".join(map(str, path))] = jax.ShapeDtypeStruct(shape, dtype, sharding=placement)
    return targets


def _placement(parameter: nnx.Param, sharding: Sharding) -> NamedSharding:
    axes = parameter.get_metadata("logical_axes", None)
    if axes is None:
        # A layer that is not jkv's: Flax knows mesh axes.
        placed = parameter.get_metadata("out_sharding", None) or ()
        return NamedSharding(sharding.mesh, PartitionSpec(*placed))
    for axis, size in zip(axes, parameter.shape, strict=True):
        sharding.check_divides(axis, size)
    return sharding.named(*axes)


def set_parameters(model: nnx.Module, parameters: Mapping[str, Any]) -> None:
    """Fill the module's parameters, by dotted path, with arrays or their shapes."""
    state = nnx.state(model, nnx.Param)
    flat = nnx.to_flat_state(state)
    filled = [(path, old.replace(parameters[".".join(map(str, path))])) for path, old in flat]
    nnx.update(model, nnx.from_flat_state(filled))
