"""Rotary position embedding with the frequency scalings that checkpoints declare.

Knows nothing of caches or attention: it turns positions into rotations.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Scaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
Rotation = tuple[Float[Array, "... half"], Float[Array, "... half"]]


@dataclass(frozen=True)
class RopeConfig:
    """Declares a rotary embedding; hashable, so that a layer can hold it as static data.

    Attributes:
        dim: rotated entries of each head, even; the rest of the head passes through.
        theta: base of the geometric frequency series.
        scaling: how the frequencies are changed for contexts past the original training length.
        factor: the context extension (linear, llama3, yarn, longrope).
        original_max_position: tokens of the original training context (llama3, yarn, longrope).
        low_freq_factor: llama3: wavelengths above `original / low` are divided by `factor`.
        high_freq_factor: llama3: wavelengths below `original / high` stay.
        beta_fast: yarn: rotations over the original context above which a frequency stays.
        beta_slow: yarn: rotations below which it is divided by `factor`.
        truncate: yarn: round the ramp's borders to whole dimensions.
        attention_factor: yarn, longrope: multiplies cos and sin; None derives it from `factor` and, of yarn,
            the mscales.
        mscale: yarn: numerator of the derived attention factor (DeepSeek).
        mscale_all_dim: yarn: its denominator, and the softmax correction of latent attention.
        frequency_factors: one divisor a frequency, `dim / 2` of them (GGUF's `rope_freqs.weight`);
            longrope: within the original context.
        long_factors: longrope: those of sequences that may grow past it; see `for_capacity`.
    """

    dim: int
    theta: float = 10000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    frequency_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    @classmethod
    def from_hf(
        cls,
        parameters: dict,
        *,
        dim: int,
        theta: float,
        max_position: int,
        original_max_position: int | None = None,
    ) -> "RopeConfig":
        """Read a `rope_scaling` or `rope_parameters` entry of a Hugging Face config.json.

        Args:
            parameters: the entry; empty for plain rotary embedding.
            dim: rotated entries of a head.
            theta: base where the entry names none.
            max_position: `max_position_embeddings`, the original context where nothing names one.
            original_max_position: config.json's own `original_max_position_embeddings`, which beats the
                entry's.

        Raises:
            ValueError: the entry's type or one of its keys is not one that jkv computes.
        """
        entry = {key: value for key, value in parameters.items() if value is not None}
        kind = entry.pop("rope_type", None) or entry.get("type", "default")
        # Its name in the first files of Phi-3.
        kind = "longrope" if kind == "su" else kind
        entry.pop("type", None)
        theta = float(entry.pop("rope_theta", theta))
        _check_hf_keys(kind, entry)
        if kind == "default":
            return cls(dim=dim, theta=theta)
        fields = {_HF_KEYS[kind][key]: value for key, value in entry.items()}
        values = {field: _CASTS.get(field, float)(value) for field, value in fields.items() if field}
        if kind in ("yarn", "llama3", "longrope"):
            named = original_max_position or values.get("original_max_position")
            values["original_max_position"] = max_position if named is None else named
        if kind == "longrope":
            values.setdefault("factor", max_position / values["original_max_position"])
        config = cls(dim=dim, theta=theta, scaling=kind, **values)
        if kind == "longrope":
            check_longrope(config)
        if kind == "llama3" and not config.low_freq_factor < config.high_freq_factor:
            raise ValueError(
                "RoPE scaling 'llama3' must have low_freq_factor below high_freq_factor, "
                f"got {config.low_freq_factor} and {config.high_freq_factor}"
            )
        return config

    def for_capacity(self, capacity: int) -> "RopeConfig":
        """Return the embedding of sequences that may hold `capacity` tokens.

        longrope has other frequencies for sequences past the original context. A key in a cache keeps the
        rotation that it was written with, so one set must serve a cache all its life: the long one if its
        capacity is above the original context, however few tokens it holds, as in vLLM and llama.cpp.
        (transformers goes by a sequence's length, and computes all keys again where it passes the border.)
        """
        if self.long_factors is None or capacity <= self.original_max_position:
            return self
        return replace(self, frequency_factors=self.long_factors)


def check_longrope(config: RopeConfig) -> RopeConfig:
    """Return an embedding of scaling longrope, or raise a ValueError that says what does not fit."""
    counts = [len(factors or ()) for factors in (config.frequency_factors, config.long_factors)]
    if counts != [config.dim // 2] * 2:
        raise ValueError(
            f"RoPE scaling 'longrope' must have {config.dim // 2} numbers as short and as long factors, one "
            f"for each pair of the {config.dim} rotated entries, got {counts}"
        )
    if config.original_max_position < 2:
        raise ValueError("RoPE scaling 'longrope' must have an original context above one token, got 1")
    return config


def _check_hf_keys(kind: str, entry: dict) -> None:
    if kind not in _HF_KEYS:
        raise ValueError(f"RoPE scaling must be one of {sorted(_HF_KEYS)}, got {kind!r}")
    unknown = sorted(set(entry) - set(_HF_KEYS[kind]))
    if unknown:
        raise ValueError(f"RoPE scaling {kind!r} has unknown keys {unknown}; known: {sorted(_HF_KEYS[kind])}")
    missing = sorted(_HF_REQUIRED[kind] - set(entry))
    if missing:
        raise ValueError(f"RoPE scaling {kind!r} lacks {missing}")


def _floats(values: Iterable[float | int]) -> tuple[float, ...]:
    return tuple(map(float, values))


# JSON writes 8 for 8.0: what is not named here becomes a float.
_CASTS: dict[str, Callable] = {
    "original_max_position": int,
    "truncate": bool,
    "frequency_factors": _floats,
    "long_factors": _floats,
}

# config.json key -> field; "" is read and means nothing to us.
_HF_KEYS: dict[str, dict[str, str]] = {
    "default": {"partial_rotary_factor": ""},
    "linear": {"factor": "factor", "partial_rotary_factor": ""},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
        "partial_rotary_factor": "",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        # DeepSeek-R1-0528-Qwen3-8B has it; transformers passes it over.
        "attn_factor": "",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "partial_rotary_factor": "",
    },
    "longrope": {
        "factor": "factor",
        "short_factor": "frequency_factors",
        "long_factor": "long_factors",
        "original_max_position_embeddings": "original_max_position",
        "attention_factor": "attention_factor",
        "partial_rotary_factor": "",
    },
}
_HF_REQUIRED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return `0.1 * mscale * ln(factor) + 1`, or 1 where the context is not extended (YaRN, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_scaling(config: RopeConfig) -> float:
    """Return what cos and sin are multiplied by: 1 but for yarn and longrope."""
    if config.scaling not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.scaling == "longrope":
        return longrope_scaling(config)
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def longrope_scaling(config: RopeConfig) -> float:
    """Return `sqrt(1 + ln(factor) / ln(original))`, or 1 without an extension (LongRoPE, eq. 8)."""
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))


def softmax_correction(config: RopeConfig) -> float:
    """Return what DeepSeek's latent attention multiplies its softmax scale by: `mscale_all_dim` squared."""
    if config.scaling != "yarn" or not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def inverse_frequencies(config: RopeConfig) -> np.ndarray:
    """Return the float32 angle per position of each rotated pair, shape `[dim / 2]`.

    Raises:
        ValueError: `dim` is odd, the base is not above 0, the scaling is unknown, or the number of frequency
            factors is not `dim / 2`.
    """
    if config.dim % 2 or config.dim <= 0:
        raise ValueError(f"RoPE needs an even, positive number of rotated entries, got {config.dim}")
    if not 0 < config.theta < math.inf:
        raise ValueError(f"RoPE needs a finite base above 0, got {config.theta}")
    if config.scaling not in get_args(Scaling):
        raise ValueError(f"RoPE scaling must be one of {get_args(Scaling)}, got {config.scaling!r}")
    frequencies = config.theta ** -(np.arange(0, config.dim, 2, dtype=np.float64) / config.dim)
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        frequencies = _llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _yarn(frequencies, config)
    if config.frequency_factors is not None:
        if len(config.frequency_factors) != config.dim // 2:
            raise ValueError(
                f"RoPE over {config.dim} entries needs {config.dim // 2} frequency factors, "
                f"got {len(config.frequency_factors)}"
            )
        frequencies = frequencies / np.asarray(config.frequency_factors, np.float64)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Blend by wavelength between kept and divided frequencies (Llama 3.1)."""
    turns = config.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(ramp, 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.factor


def _yarn(frequencies: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Blend by dimension between kept and divided frequencies (YaRN, section 3.2)."""

    def dimension(turns: float) -> float:
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return config.dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - np.clip((np.arange(config.dim // 2) - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.factor


def rotations(config: RopeConfig, positions: Int[Array, "..."]) -> Rotation:
    """Return float32 cos and sin of every position's angles, one for each of the `dim / 2` pairs."""
    frequencies = jnp.asarray(inverse_frequencies(config)).reshape(*([1] * positions.ndim), -1)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    scale = attention_scaling(config)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "... head head_dim"],
    cos: Float[Array, "... half"],
    sin: Float[Array, "... half"],
) -> Float[Array, "... head head_dim"]:
    """Rotate the first `2 * half` entries of each head, pairing entry i with i + half (the NeoX order).

    Computes in float32 and returns `x`'s dtype.
    """
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = jnp.expand_dims(cos, -2), jnp.expand_dims(sin, -2)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + ([rest] if rest.shape[-1] else []), -1)


__all__ = [
    "RopeConfig",
    "Rotation",
    "Scaling",
    "attention_scaling",
    "inverse_frequencies",
    "rotate",
    "rotations",
    "softmax_correction",
    "yarn_mscale",
]
