"""From a configuration to what decodes: mesh, model, decoding, sampling.

Knows what the sections mean; the parts know nothing of configurations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jkv import ops
from jkv.cache.checks import Scales
from jkv.cache.codec import choose_layout
from jkv.cache.spec import CacheSpec
from jkv.config import CacheSection, DecodeConfig, MeshSection
from jkv.decode.generate import Decoding
from jkv.decode.pages import CachePlan, plan_cache
from jkv.decode.params import SamplingParams
from jkv.decode.scales import read_scales
from jkv.models.decoder import cache_spec
from jkv.models.load import LanguageModel, load_model, make_model
from jkv.models.model_config import ModelConfig, with_kv_copies
from jkv.models.sizes import config_of
from jkv.models.tokenizer import Tokenizer
from jkv.models.weights.drawn import draw_parameters
from jkv.models.weights.model import StoredModel, open_model
from jkv.sharding import Sharding

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def load_configured(config: DecodeConfig) -> LanguageModel:
    """Load the configured model, or draw its weights, onto the configured mesh.

    Raises:
        ValueError: as `load_model`, the machine has fewer devices than the mesh, the configured attention is
            another device's kernel, or the configured scales are not this model's.
    """
    # What is wrong with these is said before the weights are read.
    configured_scales(config)
    sharding = make_sharding(config.mesh)
    ops.choose(config.engine.attention, device=sharding and sharding.device)
    model = config.model
    codec = model.weights if model.weights in ("int8", "int4") else None
    # What is read is packed from full precision; what is drawn has none to lose.
    unpacked = "bfloat16" if model.has_random_weights else "float32"
    options: dict[str, Any] = {
        "dtype": jnp.dtype(model.dtype),
        "param_dtype": jnp.dtype(model.weights if codec is None else unpacked),
        "weight_codec": codec,
        "implementation": config.engine.attention,
        "sharding": sharding,
    }
    if model.has_random_weights:
        return make_model(configured_model(config), draw_parameters, **options)
    return load_model(model.path, kv_copies=config.mesh.kv_copies, **options)


def configured_model(config: DecodeConfig) -> ModelConfig:
    """Return the configured model's sizes, its KV heads copied as the mesh says.

    Raises:
        ValueError: as `open_configured`; weights to be drawn need no file.
    """
    if not config.model.has_random_weights:
        return open_configured(config).config
    assert config.model.sizes is not None  # checked with the configuration
    return with_kv_copies(config_of(config.model.sizes), config.mesh.kv_copies)


def open_configured(config: DecodeConfig) -> StoredModel:
    """Return the configured model, its header read and its KV heads copied as the mesh says.

    Raises:
        ValueError: as `open_model`, or the weights are to be drawn.
    """
    if config.model.has_random_weights:
        raise ValueError(
            "model.has_random_weights must be false where a model's files are read, its text and scales too, "
            f"got true for the sizes of {config.model.path}; leave it out"
        )
    return open_model(config.model.path, kv_copies=config.mesh.kv_copies)


def make_decoding(
    config: DecodeConfig,
    model: LanguageModel,
    *,
    stop_ids: Iterable[int] = (),
    max_chunk: int | None = None,
) -> Decoding:
    """Return how the model is decoded by the configuration's cache, mesh and engine.

    Args:
        config: the configuration.
        model: what it names, loaded.
        stop_ids: tokens that end a sequence.
        max_chunk: see `configured_spec`.

    Raises:
        ValueError: as `configured_spec`, or the machine has fewer devices than the mesh.
    """
    return Decoding(
        step=model.step,
        weights=model.weights,
        spec=configured_spec(config, model.config, max_chunk=max_chunk),
        vocab_size=model.config.vocab_size,
        stop_ids=tuple(stop_ids),
        **_limits(config.cache),
        buckets=config.engine.prefill_buckets,
        sharding=make_sharding(config.mesh),
        scales=configured_scales(config),
        max_length=model.config.max_length,
    )


def configured_scales(config: DecodeConfig) -> Scales | None:
    """Return the calibrated scales that the configuration names, if any.

    Raises:
        ValueError: they were measured on another model or for another cache, or the file is damaged.
    """
    if config.cache.scales is None:
        return None
    stored = open_configured(config)
    spec = configured_spec(config, stored.config)
    path, copies = Path(config.cache.scales), config.mesh.kv_copies
    return read_scales(path, spec, model=stored.fingerprint(), kv_copies=copies)


def configured_spec(config: DecodeConfig, model: ModelConfig, *, max_chunk: int | None = None) -> CacheSpec:
    """Return the sizes of the cache that the configuration gives a model.

    Args:
        config: its cache, and the engine's steps.
        model: layers, heads and windows.
        max_chunk: tokens of the longest step; None is the widest of a prefill.

    Raises:
        ValueError: the cache asks for windows that the model does not have.
    """
    if not any(model.windows):
        _refuse_windows(config.cache)
    return cache_spec(model, **cache_options(config, max_chunk=max_chunk))


def cache_options(config: DecodeConfig, *, max_chunk: int | None = None) -> dict[str, Any]:
    """Return the options of `cache_spec` that the configuration gives; see `configured_spec`."""
    cache = config.cache
    longest = max(config.engine.prefill_buckets) if max_chunk is None else max_chunk
    return {
        "page_size": cache.page_size,
        "codec": cache.codec,
        "value_codec": cache.value_codec,
        "window_codec": cache.window_codec,
        "max_chunk": None if cache.layout == "dense" else longest,
        "layout": choose_layout(cache.pool_layout, jax.default_backend()),
        "num_stripes": config.mesh.shards("context"),
    }


def configured_plan(
    config: DecodeConfig,
    model: ModelConfig,
    prompts: Mapping[int, int],
    max_new_tokens: int,
    *,
    max_chunk: int | None = None,
) -> CachePlan:
    """Return the sizes of the cache that the configuration gives a batch; see `plan_cache`.

    Raises:
        ValueError: as `configured_spec` and `plan_cache`.
    """
    spec = configured_spec(config, model, max_chunk=max_chunk)
    limits = _limits(config.cache)
    return plan_cache(spec, prompts, max_new_tokens, **limits, num_shards=config.mesh.shards("seq"))


def _limits(cache: CacheSection) -> dict[str, Any]:
    return {
        "capacity": None if cache.capacity == "auto" else cache.capacity,
        "num_pages": cache.num_pages if cache.layout == "paged" else None,
    }


def _refuse_windows(cache: CacheSection) -> None:
    reason = "needs a model whose layers have a sliding window, got one without"
    if cache.layout == "window":
        raise ValueError(f"cache layout window {reason}; use layout dense")
    if cache.window_codec is not None:
        raise ValueError(f"cache window_codec {reason}; leave it out, codec is that of all layers")


def make_sampling(config: DecodeConfig) -> SamplingParams:
    """Return how the configuration chooses tokens where a request does not say."""
    values = asdict(config.engine.sampling)
    del values["max_new_tokens"]
    return SamplingParams(**values)


def make_sharding(mesh: MeshSection) -> Sharding | None:
    """Return the section's mesh and rules over the first devices; None for one device.

    Raises:
        ValueError: there are fewer devices, or devices of other processes that the mesh leaves out.
    """
    devices = jax.devices()
    if jax.process_count() > 1 and mesh.num_devices != len(devices):
        raise ValueError(
            f"the mesh must take all {len(devices)} devices of the {jax.process_count()} processes, "
            f"got one of {mesh.num_devices}; choose another mesh"
        )
    if mesh.num_devices == 1:
        return None
    if len(devices) < mesh.num_devices:
        raise ValueError(
            f"the mesh needs {mesh.num_devices} devices, got {len(devices)}; choose another mesh, or on a "
            f"CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.num_devices}"
        )
    names, sizes = zip(*mesh.axes, strict=True)
    axis_types = (_AXIS_TYPES[mesh.axis_types],) * len(names)
    made = jax.make_mesh(sizes, names, axis_types=axis_types, devices=devices[: mesh.num_devices])
    return Sharding.create(made, asdict(mesh.rules))


def end_ids(model: LanguageModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a generation, as the model's and the tokenizer's files name them."""
    named = tokenizer.eos_ids if tokenizer else ()
    return tuple(sorted({*named, *model.config.eos_token_ids}))
