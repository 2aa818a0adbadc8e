"""Grouped-query attention to latent attention: a few rotated entries that all heads share, and a latent.

A head's pair of rotated entries is a complex number, which a position turns by its frequency's angle. A
unitary matrix over the heads commutes with that, so keys of one frequency become their principal components
over the heads. Components that suffer most without rotation stay rotated and are the same for every head, as
queries take the matrix over. What is left is rotated no more but multiplied by its rotation's mean over short
distances, and goes, with the values, through one low-rank map. The first step is after TransMLA (Meng et al.
2025), which takes the first component of each frequency; the last is that of MHA2MLA (Ji et al. 2025).

Knows parameters by name; reads no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Complex, Float

from jkv.convert.converted import Converted
from jkv.layers.latent import LatentDims
from jkv.layers.rope import RopeConfig, attention_scaling, inverse_frequencies
from jkv.models.model_config import ModelConfig

# Distances over which the rotation of what is rotated no more is averaged.
SPAN = 64
# What latent attention does not have, by the switch of the configuration.
_REFUSED = {
    "latent": "latents",
    "has_qk_norm": "norms over its heads",
    "has_qkv_bias": "biases on its projections",
    "has_output_bias": "a bias on its output",
    "has_sinks": "sinks",
    "attention_soft_cap": "a soft cap",
    "window_rope": "another rotary embedding in some layers",
}

Moments = Sequence[Float[np.ndarray, "embed embed"]]
_Heads = Float[np.ndarray, "kv_head head_dim embed"]


class _Layer(NamedTuple):
    """A layer's projections, rotated pairs as complex numbers, and the second moment of its inputs."""

    query: Complex[np.ndarray, "q_head pair embed"]
    key: Complex[np.ndarray, "kv_head pair embed"]
    value: _Heads
    moment: Float[np.ndarray, "embed embed"]


class _Components(NamedTuple):
    """Principal components of keys over the heads, for each pair.

    Attributes:
        basis: the heads' entries of each component.
        energy: what each adds to the logits' variance.
    """

    basis: Complex[np.ndarray, "pair kv_head component"]
    energy: Float[np.ndarray, "pair component"]


def to_latent(
    config: ModelConfig,
    parameters: Mapping[str, jax.Array],
    *,
    latent: int,
    rope: int,
    span: int = SPAN,
    moments: Moments | None = None,
) -> Converted:
    """Return the model with latent attention.

    With `rope` as wide as all KV heads and a latent of full rank it computes the same. Errors are relative to
    what a layer had: `rotation` of its logits, by what is rotated no more, over `span` distances; `keys` and
    `values` by the low rank.

    Args:
        config: the model's sizes.
        parameters: its weights, by dotted path.
        latent: entries of the latent.
        rope: entries that stay rotated, shared by all heads.
        span: distances that the rotation of the others is averaged over.
        moments: of each layer's inputs, see `input_moments`; None takes all directions for equally frequent.

    Raises:
        ValueError: the model has what latent attention does not, or a size is out of range.
    """
    _check(config, latent, rope, span)
    layers = range(config.num_layers)
    turns = _mean_turns(config.rope, span)
    components = [_components(_read(config, parameters, layer, moments)) for layer in layers]
    lost = [one.energy * (1 - np.abs(turns[:, None]) ** 2) / one.energy.sum() for one in components]
    kept = _largest(np.sum(lost, axis=0), rope // 2)
    converted = {name: array for name, array in parameters.items() if ".attention." not in name}
    errors = []
    for layer in layers:
        read = _read(config, parameters, layer, moments)
        found, ranks = _convert(read, components[layer].basis, kept, turns, latent)
        path = f"layers.{layer}.attention."
        output = parameters[f"{path}o_proj.weight"]
        converted[f"{path}o_proj.weight"] = output
        converted |= {path + name: jnp.asarray(array, output.dtype) for name, array in found.items()}
        errors.append({"rotation": float(np.sqrt(lost[layer][~kept].sum())), **ranks})
    return Converted(_configure(config, kept, latent), converted, tuple(errors))


def _check(config: ModelConfig, latent: int, rope: int, span: int) -> None:
    found = [name for switch, name in _REFUSED.items() if getattr(config, switch)]
    if found:
        raise ValueError(f"a conversion to latents needs a model without {' and '.join(found)}, got one with")
    if config.rope.dim != config.head_dim or config.rope.long_factors is not None:
        raise ValueError(
            f"a conversion to latents needs a model that rotates its heads' {config.head_dim} entries at "
            f"frequencies that are always the same, got {config.rope.dim} of scaling {config.rope.scaling!r}"
        )
    width = config.num_kv_heads * config.head_dim
    if rope % 2 or not 2 <= rope <= width:
        raise ValueError(f"rotated entries must be even and from 2 to the KV heads' {width}, got {rope}")
    most = min(2 * width, config.embed_dim)
    if not 1 <= latent <= most:
        raise ValueError(f"a latent must have 1 to {most} entries, the rank of keys and values, got {latent}")
    if span < 2:
        raise ValueError(f"span must be at least 2 distances, got {span}")


def _mean_turns(rope: RopeConfig, span: int) -> Complex[np.ndarray, " pair"]:
    """Return each frequency's mean rotation over `span` distances: the constant that errs least."""
    return np.exp(-1j * np.arange(span)[:, None] * inverse_frequencies(rope)).mean(axis=0)


def _read(
    config: ModelConfig, parameters: Mapping[str, jax.Array], layer: int, moments: Moments | None
) -> _Layer:
    def heads(name: str) -> np.ndarray:
        weight = np.asarray(parameters[f"layers.{layer}.attention.{name}.weight"], np.float64)
        return weight.reshape(-1, config.head_dim, config.embed_dim)

    moment = np.eye(config.embed_dim) if moments is None else moments[layer]
    return _Layer(_as_complex(heads("q_proj")), _as_complex(heads("k_proj")), heads("v_proj"), moment)


def _as_complex(heads: Float[np.ndarray, "head head_dim embed"]) -> Complex[np.ndarray, "head pair embed"]:
    first, second = np.split(heads, 2, axis=1)
    return first + 1j * second


def _as_real(pairs: Complex[np.ndarray, "*head pair embed"]) -> Float[np.ndarray, "*head head_dim embed"]:
    return np.concatenate([np.real(pairs), np.imag(pairs)], axis=-2)


def _components(layer: _Layer) -> _Components:
    key, query = layer.key, layer.query
    covariance = np.einsum("kpe,hpe->pkh", key @ layer.moment, key.conj())
    variance, basis = np.linalg.eigh(covariance)
    of_heads = np.real(np.einsum("hpe,hpe->ph", query @ layer.moment, query.conj()))
    of_groups = of_heads.reshape(len(variance), len(key), -1).sum(axis=-1)
    return _Components(basis, variance * np.einsum("pkc,pk->pc", np.abs(basis) ** 2, of_groups))


def _largest(values: Float[np.ndarray, "pair component"], count: int) -> Bool[np.ndarray, "pair component"]:
    found = np.zeros(values.size, bool)
    found[np.argsort(-values, axis=None, kind="stable")[:count]] = True
    return found.reshape(values.shape)


def _convert(
    layer: _Layer,
    basis: Complex[np.ndarray, "pair kv_head component"],
    kept: Bool[np.ndarray, "pair component"],
    turns: Complex[np.ndarray, " pair"],
    latent: int,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return a layer's parameters, by name, and what the low rank lost."""
    embed = len(layer.moment)
    group = len(layer.query) // len(layer.key)
    pairs, chosen = np.nonzero(kept)
    entries = basis[pairs, :, chosen].conj().T[..., None]
    rotated = (entries * layer.key[:, pairs]).sum(axis=0)
    rest = layer.key - np.einsum("pkc,phc,hpe->kpe", basis * kept[:, None], basis.conj(), layer.key)
    norms = [_norm(heads, layer.moment) for heads in (_as_real(layer.key), layer.value)]
    down, ups, lost = _low_rank((_as_real(rest * turns[:, None]), layer.value), norms, layer.moment, latent)
    queries = _as_real(entries.repeat(group, axis=0) * layer.query[:, pairs])
    found = {
        "q_proj.weight": np.concatenate([_as_real(layer.query), queries], axis=1).reshape(-1, embed),
        "kv_down.weight": np.concatenate([down, _as_real(rotated)]),
        "key_up": ups[0].repeat(group, axis=0),
        "value_up": ups[1].repeat(group, axis=0),
    }
    return found, {"keys": lost[0], "values": lost[1]}


def _norm(heads: _Heads, moment: Float[np.ndarray, "embed embed"]) -> float:
    """Return the root mean squared norm of what the heads make of inputs of such a moment."""
    return float(np.sqrt(np.einsum("hde,hde->", heads @ moment, heads)))


def _low_rank(
    parts: tuple[_Heads, _Heads],
    norms: Sequence[float],
    moment: Float[np.ndarray, "embed embed"],
    latent: int,
) -> tuple[np.ndarray, list[np.ndarray], list[float]]:
    """Return the projection to the latent, those from it to keys and to values, and what each loses.

    The projection is to the principal components of keys and values together, each over its norm, which are
    the best of that rank (Eckart and Young 1936).
    """
    # Scaled to one size, not to 1, so that the weights around a latent are as large as the original's.
    scales = [np.sqrt(norms[0] * norms[1]) / norm for norm in norms]
    rows = np.concatenate([heads * scale for heads, scale in zip(parts, scales, strict=True)])
    rows = rows.reshape(-1, rows.shape[-1])
    _, directions = np.linalg.eigh(rows @ moment @ rows.T)
    directions = directions[:, -latent:]
    down = directions.T @ rows
    split = np.split(directions.reshape(-1, parts[0].shape[1], latent), 2)
    ups = [up / scale for up, scale in zip(split, scales, strict=True)]
    lost = [
        _norm(heads - up @ down, moment) / norm for heads, up, norm in zip(parts, ups, norms, strict=True)
    ]
    return down, ups, lost


def _configure(config: ModelConfig, kept: Bool[np.ndarray, "pair component"], latent: int) -> ModelConfig:
    pairs, _ = np.nonzero(kept)
    plain = RopeConfig(dim=2 * len(pairs), theta=config.rope.theta)
    # Divided in float64: the quotient's rounding to float32 then gives the frequency back.
    series = plain.theta ** -(np.arange(len(pairs)) / len(pairs))
    factors = series / inverse_frequencies(config.rope)[pairs].astype(np.float64)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return replace(
        config,
        num_kv_heads=config.num_heads,
        attention_scale=scale * attention_scaling(config.rope) ** 2,
        rope=replace(plain, frequency_factors=tuple(map(float, factors))),
        latent=LatentDims(latent, plain.dim, config.head_dim, config.head_dim, has_norm=False),
    )
