"""Calibrated scales in a file, with what they were measured for.

Knows names, shapes and codecs; measures nothing.
"""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jkv.cache.checks import Scales
from jkv.cache.spec import CacheSpec
from jkv.models.weights.safetensors import SafetensorsSource, read_metadata, write_safetensors

# The key whose presence says what the file is, and the version of its layout.
_FORMAT, _VERSION = "jkv_scales", "1"


def write_scales(
    path: Path,
    scales: Scales,
    spec: CacheSpec,
    *,
    model: str,
    kv_copies: int = 1,
    notes: Mapping[str, str] = {},
) -> None:
    """Write scales as `keys.GROUP` and `values.GROUP` of a safetensors file.

    Args:
        path: the file.
        scales: for each group of `spec` those of keys and values, where their codec is static.
        spec: the cache that they are for.
        model: fingerprint of the model that they were measured on.
        kv_copies: neighbouring KV heads of `spec` that are copies of one of the model's, whose scale is kept.
        notes: how they were measured, for people.
    """
    given = {
        f"{what}.{index}": np.asarray(scale)[:, ::kv_copies]
        for index, pair in enumerate(scales)
        for what, scale in zip(("keys", "values"), pair, strict=True)
        if scale is not None
    }
    codecs = {f"codec.{name}": codec for name, (codec, _) in _wanted(spec).items()}
    write_safetensors(path, given, {_FORMAT: _VERSION, "model": model, **codecs, **notes})


def read_scales(path: Path, spec: CacheSpec, *, model: str, kv_copies: int = 1) -> Scales:
    """Return the scales of a file for each group of `spec`, copies of a KV head with that head's.

    Raises:
        ValueError: the file is damaged, or was written for another model, other codecs or other sizes.
    """
    metadata = read_metadata(path)
    if metadata.get(_FORMAT) != _VERSION:
        raise ValueError(
            f"{path} must hold scales of version {_VERSION}, got {metadata.get(_FORMAT, 'none')}; "
            "jkv calibrate writes them"
        )
    if metadata.get("model") != model:
        raise ValueError(
            f"{path} must be calibrated on this model, {model}, got {metadata.get('model')}; "
            "run jkv calibrate with it"
        )
    source = SafetensorsSource({path: None})
    wanted = {
        name: f"{name} {codec} F32{[layers, heads // kv_copies]}"
        for name, (codec, (layers, heads)) in _wanted(spec).items()
    }
    got = {
        name: f"{name} {metadata.get(f'codec.{name}')} {info.encoding}{list(info.shape)}"
        for name, info in source.tensors.items()
    }
    if got != wanted:
        raise ValueError(
            f"{path} must hold {', '.join(wanted.values())}, got {', '.join(got.values()) or 'nothing'}; "
            "run jkv calibrate for these codecs"
        )
    arrays = {name: jnp.repeat(jnp.array(source.read(name)), kv_copies, axis=1) for name in wanted}
    wrong = [name for name, array in arrays.items() if not (jnp.isfinite(array) & (array > 0)).all()]
    if wrong:
        raise ValueError(f"{path} must hold finite, positive scales, got others in {', '.join(wrong)}")
    return [(arrays.get(f"keys.{index}"), arrays.get(f"values.{index}")) for index in range(len(spec.groups))]


def _wanted(spec: CacheSpec) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return codec and shape of each array of scales that a cache needs, by its name in the file."""
    return {
        f"{what}.{index}": (name, (group.num_layers, group.num_kv_heads))
        for index, group in enumerate(spec.groups)
        for what, name, codec in zip(
            ("keys", "values"), (group.codec, group.value_codec or group.codec), group.codecs, strict=True
        )
        if codec.scaling == "static"
    }
