"""`jkv inspect`: what a model's files hold: architecture, sizes, tokenizer.

Reads headers only.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import tyro

from jkv.cache.codec import CODECS, PoolLayout
from jkv.cache.spec import CacheSpec
from jkv.cli.options import Flag, find_tokenizer, parse_alone, refuse_sizes_alone
from jkv.layers.rope import RopeConfig
from jkv.models.decoder import cache_spec
from jkv.models.load import abstract_decoder, parameter_targets
from jkv.models.model_config import ModelConfig
from jkv.models.tokenizer import Tokenizer
from jkv.models.tokenizer_files import tokenizer_kind
from jkv.models.weights.checkpoint import checkpoint_shapes
from jkv.models.weights.locate import ModelLocation
from jkv.models.weights.model import StoredModel, open_model

# Scales of int4 keys are shared by up to 32 slots of a page; what a TPU pads depends on it too.
_PAGE_SIZE = 32
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show a model's architecture, parameters, bytes, tokenizer and chat template."""

    name: tyro.conf.Positional[str | None] = None
    """Bundled model's name, GGUF file, folder or hub id."""
    model: str | None = None
    """The same, where other verbs take it."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> None:
    """Inspect the model that the command line names, and print what it is."""
    arguments = parse_alone(Arguments, argv, "inspect")
    models = [model for model in (arguments.name, arguments.model) if model is not None]
    if len(models) != 1:
        raise ValueError(f"one model must be named, as jkv inspect smollm2-135m, got {len(models)}")
    refuse_sizes_alone(models[0], "or ask jkv plan")
    shown = inspect(models[0])
    if arguments.json:
        print(json.dumps(shown))
        return
    for title, values in shown.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name.replace('_', ' '):24}{_plain(value)}")


def inspect(name_or_path: str | Path) -> dict[str, dict[str, Any]]:
    """Return what a model's files say, by title: file, architecture, sizes, tokenizer.

    Raises:
        ValueError: as `open_model`, the files hold other tensors than their configuration says, or the
            tokenizer is damaged.
    """
    stored = open_model(name_or_path)
    targets = parameter_targets(abstract_decoder(stored.config))
    stored.check(targets)
    return {
        "file": _file(stored),
        "architecture": _architecture(stored.config),
        "sizes": _sizes(stored.config, sum(prod(target.shape) for target in targets.values())),
        "tokenizer": _tokenizer(stored.location),
    }


def _file(stored: StoredModel) -> dict[str, Any]:
    return {
        "path": str(stored.location.path),
        "format": stored.location.format,
        "tensor_types": dict(Counter(_tensor_types(stored)).most_common()),
    }


def _tensor_types(stored: StoredModel) -> list[str]:
    if stored.source is None:
        return [str(array.dtype) for array in checkpoint_shapes(stored.location.path).values()]
    return [tensor.encoding for tensor in stored.source.tensors.values()]


def _architecture(config: ModelConfig) -> dict[str, Any]:
    windows = sorted({window for window in config.windows if window is not None})
    return {
        "family": config.family,
        "layers": config.num_layers,
        "embed_dim": config.embed_dim,
        "mlp_dim": config.mlp_dim,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "max_length": config.max_length,
        "windows": windows,
        "windowed_layers": sum(window is not None for window in config.windows),
        "rope": _rope(config.rope),
        "is_tied": config.is_tied,
        "has_qk_norm": config.has_qk_norm,
        "has_qkv_bias": config.has_qkv_bias,
        **_switches(config),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    plain = RopeConfig(dim=rope.dim, theta=rope.theta)
    return {"dim": rope.dim, "theta": rope.theta} if rope == plain else asdict(rope)


def _switches(config: ModelConfig) -> dict[str, Any]:
    """Return what only some families have."""
    mixture = config.mixture
    found = {
        "window_rope": config.window_rope and _rope(config.window_rope),
        "attention_soft_cap": config.attention_soft_cap,
        "logit_soft_cap": config.logit_soft_cap,
        "has_sinks": config.has_sinks,
        "latent": config.latent and asdict(config.latent),
        "experts": mixture and mixture.routing.num_experts,
        "active_experts": mixture and mixture.routing.num_active,
        "expert_dim": mixture and mixture.mlp_dim,
    }
    return {name: value for name, value in found.items() if value}


def _sizes(config: ModelConfig, count: int) -> dict[str, Any]:
    groups = describe_groups(config, cache_spec(config, page_size=1), max_chunk=1)
    return {
        "parameters": count,
        "weight_bytes": {name: count * size for name, size in _WEIGHT_BYTES.items()},
        "cache_bytes_per_token": _cache_bytes(config, "plain"),
        "cache_bytes_on_tpu": _cache_bytes(config, "tpu"),
        "cache_page_size": _PAGE_SIZE,
        # In float32 and without page rounding.
        "cache_groups": groups,
        "window_cache_share": _window_share(groups),
    }


def _window_share(groups: list[dict[str, Any]]) -> float | None:
    """Return the share of a full cache's bytes where layers with a window keep no more than that."""
    layouts = [group["bytes_at_max_length"] for group in groups]
    if not any("window" in layout for layout in layouts):
        return None
    kept = sum(layout.get("window", layout["dense"]) for layout in layouts)
    return round(kept / sum(layout["dense"] for layout in layouts), 4)


def _cache_bytes(config: ModelConfig, layout: PoolLayout) -> dict[str, int | None]:
    """Return the bytes of a token in a pool layout, padding included, for each codec that needs no scales.

    None where the codec does not take the model's heads.
    """
    sizes: dict[str, int | None] = {}
    for codec in (name for name, form in CODECS.items() if form.scaling != "static"):
        sizes[codec] = None
        with contextlib.suppress(ValueError):
            spec = cache_spec(config, page_size=_PAGE_SIZE, codec=codec, layout=layout)
            sizes[codec] = spec.padded_bytes_per_token
    return sizes


def describe_groups(model: ModelConfig, spec: CacheSpec, *, max_chunk: int) -> list[dict[str, Any]]:
    """Return each cache group's layers, window and bytes, by layout for a sequence of the model's length.

    Args:
        model: the windows of its layers.
        spec: its cache, whatever the layout.
        max_chunk: tokens of the longest step, for which a window keeps room.
    """
    described = []
    for window, group in zip(dict.fromkeys(model.windows), spec.groups, strict=True):
        layouts = {"dense": None} if window is None else {"dense": None, "window": window}
        kept = {
            layout: replace(spec, groups=(replace(group, window=tokens),), max_chunk=max_chunk)
            for layout, tokens in layouts.items()
        }
        described.append(
            {
                "layers": group.num_layers,
                "kind": group.kind,
                "window": window,
                "bytes_per_token": kept["dense"].bytes_per_token,
                "bytes_at_max_length": {
                    layout: one.dense_bytes(1, model.max_length) for layout, one in kept.items()
                },
            }
        )
    return described


def _tokenizer(location: ModelLocation) -> dict[str, Any]:
    tokenizer = find_tokenizer(location)
    if tokenizer is None:
        return {"kind": None}
    return {
        "kind": tokenizer_kind(location.path),
        "vocabulary": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_ids": list(tokenizer.eos_ids),
        "adds_bos": tokenizer.adds_bos,
        "has_chat_template": _has_chat_template(tokenizer),
    }


def _has_chat_template(tokenizer: Tokenizer) -> bool:
    try:
        return bool(tokenizer.chat_template.source)
    except ValueError:
        return False


def _plain(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)
