"""Scales of the static codecs, measured on the keys and values that a model writes into a float32 cache.

Knows heads and what rounding does to them; no file.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.checks import Scales
from jkv.cache.codec import Codec
from jkv.cache.encoding import decode, encode, largest_entry, rotate
from jkv.cache.spec import CacheSpec
from jkv.decode.batch import Prompts, chunks, read_prompts, round_capacity
from jkv.decode.generate import Decoding
from jkv.decode.params import require_whole
from jkv.decode.platform import PlatformJit
from jkv.models.step import StepFunction

Method = Literal["absmax", "percentile", "mse"]
Per = Literal["head", "tensor"]

# Magnitudes in percent that do not saturate, where nothing else is asked for.
PERCENTILE = 99.99
# The limits that are tried, as shares of the largest magnitude: five octaves in steps of 4.4 %.
SHARES = 2.0 ** -(np.arange(81) / 16)
# Of a head that is zero throughout: a scale must be positive.
_LEAST_LIMIT = 1e-30


class _Site(NamedTuple):
    """What has scales: the keys (0) or the values (1) of a cache group."""

    group: int
    which: int
    codec: Codec


# What a step's heads of one site tell of each layer and KV head; its last argument are the limits.
_Measure = Callable[[Codec, Array, Array], Array]


def calibrate(
    decoding: Decoding,
    prompts: Prompts,
    *,
    method: Method = "mse",
    percentile: float = PERCENTILE,
    per: Per = "head",
    chunk: int = 256,
) -> Scales:
    """Return the scales that the static codecs of `decoding.spec` need, measured on the prompts.

    Heads are measured as the codecs scale them: after the rotary embedding and the codec's own rotation. A
    scale is a limit over the largest entry that the codec has; magnitudes above the limit saturate. The limit
    is the largest magnitude met, or one of `SHARES` of it, for which the prompts are run a second time.

    Args:
        decoding: the model, and the cache that the scales are for.
        prompts: token ids; each prompt is run by itself, from an empty cache.
        method: `absmax`, the largest magnitude; `percentile`, the least share that so many percent of the
            magnitudes do not exceed; `mse`, the share at which entries have the least squared error.
        percentile: of the method of that name, above 0 and at most 100.
        per: a scale for each KV head, or for each tensor: one for all heads of a layer.
        chunk: tokens of a step. Memory follows it and the longest prompt; the result does not depend on it.

    Raises:
        ValueError: no codec is static, pages are in stripes, an argument cannot be honoured, or a key or
            value is not finite.
    """
    decoding.check()
    check_options(method, percentile, per, chunk)
    sites = _sites(decoding.spec)
    rows = read_prompts(prompts, vocab_size=decoding.vocab_size)
    run = functools.partial(_run, decoding, sites, rows, chunk)
    limits = [_over_heads(np.max, largest, per) for largest in _reduce(np.maximum, run(_magnitudes))]
    if not all(np.isfinite(limit).all() for limit in limits):
        raise ValueError(
            "keys and values must be finite, got NaN or infinity; check the weights and the dtype"
        )
    limits = [np.maximum(limit, _LEAST_LIMIT) for limit in limits]
    if method != "absmax":
        measure = _squared_errors if method == "mse" else _counts_beyond
        costs = [_over_heads(np.mean, cost, per) for cost in _reduce(np.add, run(measure, limits))]
        # How many magnitudes of a token's head may be beyond: the counts rise as the shares fall.
        share_beyond, num_tokens = 1 - percentile / 100, sum(map(len, rows))
        for index, (site, cost) in enumerate(zip(sites, costs, strict=True)):
            num_beyond = share_beyond * num_tokens * decoding.spec.groups[site.group].dims[site.which]
            best = cost.argmin(0) if method == "mse" else (cost <= num_beyond).sum(0) - 1
            limits[index] = limits[index] * SHARES[best]
    return _scales(decoding.spec, dict(zip(sites, limits, strict=True)))


def check_options(method: Method, percentile: float, per: Per, chunk: int) -> None:
    """Raise ValueError for the first option that `calibrate` cannot honour."""
    for name, value, known in (("method", method, Method), ("per", per, Per)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be above 0 and at most 100, got {percentile}")
    require_whole("chunk", chunk, at_least=1, unit=" token")


def _sites(spec: CacheSpec) -> tuple[_Site, ...]:
    """Return what needs scales."""
    if spec.num_stripes > 1:
        raise ValueError(
            "scales are measured where each device has whole sequences, got pages in "
            f"{spec.num_stripes} stripes; choose a mesh without the rule context"
        )
    sites = tuple(
        _Site(index, which, codec)
        for index, group in enumerate(spec.groups)
        for which, codec in enumerate(group.codecs)
        if codec.scaling == "static"
    )
    if not sites:
        names = sorted({name for group in spec.groups for name in (group.codec, group.value_codec) if name})
        raise ValueError(
            f"scales are measured for a codec whose name ends in _static, got {', '.join(names)}"
        )
    return sites


def _scales(spec: CacheSpec, limits: Mapping[_Site, np.ndarray]) -> Scales:
    """Return the scales at which entries saturate at the limits, for each group."""
    found = {
        (site.group, site.which): jnp.asarray(limit / largest_entry(site.codec), jnp.float32)
        for site, limit in limits.items()
    }
    return [(found.get((group, 0)), found.get((group, 1))) for group in range(len(spec.groups))]


def _run(
    decoding: Decoding,
    sites: tuple[_Site, ...],
    rows: Sequence[Sequence[int]],
    chunk: int,
    measure: _Measure,
    limits: Sequence[np.ndarray] | None = None,
) -> Iterator[list[np.ndarray]]:
    """Run the rows through the model one after the other; yield what each step measures, one array a site."""
    groups = tuple(
        replace(group, codec="f32", value_codec=None, rope_codec=None, window=None)
        for group in decoding.spec.groups
    )
    spec = replace(decoding.spec, groups=groups)
    capacity = round_capacity(max(map(len, rows)), spec.page_size)
    placed = [jnp.asarray(limit, jnp.float32) for limit in limits or [np.ones(())] * len(sites)]
    for row in rows:
        cache = Cache.dense(spec, num_sequences=1, capacity=capacity, sharding=decoding.sharding)
        for piece in chunks([row], (chunk,)):
            tokens, lens = jnp.asarray(piece.tokens), jnp.asarray(piece.lens)
            measured, cache = _step(
                decoding.step, decoding.weights, cache, tokens, lens, placed, sites=sites, measure=measure
            )
            yield [array.astype(np.float64) for array in jax.device_get(measured)]


@functools.partial(PlatformJit, static_argnames=("step", "sites", "measure"), donate_argnames="cache")
def _step(
    step: StepFunction,
    weights: Any,
    cache: Cache,
    tokens: Int[Array, "1 time"],
    lens: Int[Array, " 1"],
    limits: list[Array],
    *,
    sites: tuple[_Site, ...],
    measure: _Measure,
) -> tuple[list[Array], Cache]:
    """Run one chunk and return what it measures at each site, and the cache. Consumes `cache`."""
    cache, batch = cache.begin(lens, time=tokens.shape[1])
    _, cache = step(weights, tokens, cache, batch)
    measured: Any = functools.partial(_measured, sites, measure)
    mesh = jax.typeof(cache.lengths).sharding.mesh
    if mesh.explicit_axes:
        # The compiler places what is read back and summed.
        whole = NamedSharding(mesh, PartitionSpec())
        measured = jax.sharding.auto_axes(measured, axes=mesh.explicit_axes, out_sharding=whole)
    return measured(cache, batch, limits), cache


def _measured(
    sites: tuple[_Site, ...], measure: _Measure, cache: Cache, batch: TokenBatch, limits: list[Array]
) -> list[Array]:
    """Return what the heads of the step tell at each site."""
    return [
        measure(site.codec, rotate(site.codec, _written(cache, batch, site)), limit)
        for site, limit in zip(sites, limits, strict=True)
    ]


def _written(cache: Cache, batch: TokenBatch, site: _Site) -> Float[Array, "layer time kv_head head_dim"]:
    """Read back what the step has stored, zero where a token is padding."""
    pool, page_size = cache.pools[site.group], cache.spec.page_size
    data = (pool.keys, pool.values)[site.which].data
    slots = batch.slots[site.group][0]
    layers = jnp.arange(cache.spec.groups[site.group].num_layers, dtype=jnp.int32)
    pages = layers[:, None] * pool.num_pages + jax.lax.div(slots, jnp.int32(page_size))[None]
    heads = data[pages, :, jax.lax.rem(slots, jnp.int32(page_size))[None]]
    return jnp.where(batch.is_valid[0][None, :, None, None], heads, 0)


def _magnitudes(
    codec: Codec, heads: Float[Array, "layer time kv_head head_dim"], limits: Array
) -> Float[Array, "layer kv_head"]:
    """Return the largest magnitudes."""
    return jnp.abs(heads).max((1, 3))


def _counts_beyond(
    codec: Codec, heads: Float[Array, "layer time kv_head head_dim"], limits: Float[Array, "layer kv_head"]
) -> Float[Array, "share layer kv_head"]:
    """Return how many magnitudes exceed each share of the limits."""
    relative = jnp.abs(heads) / limits[:, None, :, None]
    return _at_shares(lambda share: (relative > share).astype(jnp.float32))


def _squared_errors(
    codec: Codec, heads: Float[Array, "layer time kv_head head_dim"], limits: Float[Array, "layer kv_head"]
) -> Float[Array, "share layer kv_head"]:
    """Return the squared error, in limits, of what is read back where each share of them is the limit."""
    plain = replace(codec, is_rotated=False)
    relative = heads / limits[:, None, :, None]

    def errors(share: Float[Array, ""]) -> Float[Array, "layer time kv_head head_dim"]:
        scale = jnp.full(heads.shape[2], share / largest_entry(codec))
        return jnp.square(decode(plain, encode(plain, relative, scale), scale) - relative)

    return _at_shares(errors)


def _at_shares(cost: Callable[[Array], Array]) -> Float[Array, "share layer kv_head"]:
    """Return what entries cost at each share, summed over the entries of a head."""
    return jax.lax.map(lambda share: cost(share).sum((1, 3)), jnp.asarray(SHARES, jnp.float32))


def _reduce(combine: Callable[..., np.ndarray], steps: Iterator[list[np.ndarray]]) -> list[np.ndarray]:
    """Combine what the steps have measured, site by site."""
    return functools.reduce(lambda old, new: [combine(*pair) for pair in zip(old, new, strict=True)], steps)


def _over_heads(combine: Callable[..., np.ndarray], measured: np.ndarray, per: Per) -> np.ndarray:
    """Give every head what all of a layer have in common, where they share a scale."""
    if per == "head":
        return measured
    return np.broadcast_to(combine(measured, axis=-1, keepdims=True), measured.shape)
