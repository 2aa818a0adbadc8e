"""A deployment's programs, compiled for devices that need not be here: a prefill's step and the decode loop.

Weights and cache are shapes: nothing is read or allocated. Knows decoder and loop; no flag and no figure.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from jkv import ops
from jkv.cache.cache import Cache, cache_axes
from jkv.cache.spec import CacheGroup
from jkv.decode.generate import GREEDY
from jkv.decode.loop import DecodeState, decode, prefill
from jkv.decode.sampling import Sampler
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.load import abstract_decoder, parameter_targets, set_parameters
from jkv.models.model_config import ModelConfig
from jkv.models.step import StepFunction, split_model
from jkv.sharding import Sharding

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
# New tokens that a sequence's history has room for: 1 KiB a row, of no weight beside its cache.
_MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Workload:
    """What is decoded, and on what.

    Attributes:
        model: sizes and switches.
        sharding: the devices, and what is split over them.
        num_sequences: rows of the batch.
        capacity: tokens that each may hold.
        width: tokens of each sequence in a step of a prefill.
        cache: options of `cache_spec`.
        is_paged: sequences share a pool.
        num_pages: its pages of each group, on each shard, up to what tables can name; None has room for all.
        dtype: activations.
        param_dtype: weights.
    """

    model: ModelConfig
    sharding: Sharding
    num_sequences: int
    capacity: int
    width: int
    cache: Mapping[str, Any]
    is_paged: bool = True
    num_pages: int | None = None
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"

    def with_model(self, model: ModelConfig) -> "Workload":
        """Return the same work of another model."""
        return replace(self, model=model)


def compile_phase(workload: Workload, phase: Phase) -> Compiled:
    """Compile one of the programs for the workload's devices; errors as `lower_phase`."""
    return lower_phase(workload, phase).compile()


def lower_phase(workload: Workload, phase: Phase, implementation: ops.Implementation = "auto") -> Lowered:
    """Return one of the programs for the workload's devices, to be compiled.

    Args:
        workload: what is decoded, and on what.
        phase: which program.
        implementation: of attention.

    Raises:
        ValueError: the mesh does not divide the model, or attention that was named does not take the cache.
    """
    step, weights = _model(workload, implementation)
    platform = workload.sharding.mesh.devices.flat[0].platform
    rows, cache = (workload.num_sequences,), cache_shapes(workload)
    shapes = functools.partial(_shape, workload.sharding)
    if phase == "prefill":
        tokens = shapes((*rows, workload.width), jnp.int32, "seq", None)
        logits = shapes((*rows, workload.model.vocab_size), jnp.float32, "seq", "vocab")
        lens = shapes(rows, jnp.int32, "seq")
        return prefill.jitted_for(platform).lower(step, weights, cache, tokens, lens, logits)
    state = _state(workload, cache)
    limits = shapes((), jnp.int32), shapes((), jnp.bool_)
    return decode.jitted_for(platform).lower(step, weights, state, *limits)


def weight_shapes(workload: Workload) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and placement of each parameter, by its dotted path."""
    return parameter_targets(_decoder(workload), workload.sharding)


def cache_shapes(workload: Workload) -> Cache:
    """Return the workload's cache as shapes, each with its placement."""
    spec = cache_spec(workload.model, **workload.cache)
    sizes: dict[str, Any] = {
        "num_sequences": workload.num_sequences,
        "capacity": workload.capacity,
        "sharding": workload.sharding,
    }
    rows = -(-workload.num_sequences // workload.sharding.size("seq"))
    most = [rows * spec.stripe_pages(workload.capacity, group) for group in range(len(spec.groups))]
    num_pages = most if workload.num_pages is None else [min(workload.num_pages, pages) for pages in most]

    def make() -> Cache:
        scales = [_scales(group) for group in spec.groups]
        if workload.is_paged:
            return Cache.paged(spec, num_pages=num_pages, scales=scales, **sizes)
        return Cache.dense(spec, scales=scales, **sizes)

    shapes = jax.eval_shape(make)
    return jax.tree.map(_placed, shapes, cache_axes(shapes, workload.sharding.named))


def _scales(group: CacheGroup) -> tuple[Any, Any]:
    shape = (group.num_layers, group.num_kv_heads)
    keys, values = (jnp.ones(shape) if codec.scaling == "static" else None for codec in group.codecs)
    return keys, values


def _decoder(workload: Workload, implementation: ops.Implementation = "auto") -> Decoder:
    return abstract_decoder(
        workload.model,
        implementation=implementation,
        dtype=jnp.dtype(workload.dtype),
        param_dtype=jnp.dtype(workload.param_dtype),
        sharding=workload.sharding,
    )


def _model(workload: Workload, implementation: ops.Implementation) -> tuple[StepFunction, Any]:
    model = _decoder(workload, implementation)
    set_parameters(model, parameter_targets(model, workload.sharding))
    return split_model(model)


def _state(workload: Workload, cache: Cache) -> DecodeState:
    rows, named = workload.num_sequences, workload.sharding.named
    shape = functools.partial(_shape, workload.sharding)
    sampler = jax.eval_shape(lambda: Sampler.create([GREEDY] * rows, vocab_size=workload.model.vocab_size))
    counts = {name: shape((rows,), jnp.int32, "seq") for name in ("token", "num_new", "finish", "limits")}
    history, top = ("seq", None), ("seq", None, None)
    return DecodeState(
        cache=cache,
        sampler=jax.tree.map(lambda leaf: _placed(leaf, named("seq", *[None] * (leaf.ndim - 1))), sampler),
        stop_ids=shape((1,), jnp.int32, None),
        new_tokens=shape((rows, _MAX_NEW_TOKENS), jnp.int32, *history),
        logprobs=shape((rows, _MAX_NEW_TOKENS), jnp.float32, *history),
        top_tokens=shape((rows, _MAX_NEW_TOKENS, 0), jnp.int32, *top),
        top_logprobs=shape((rows, _MAX_NEW_TOKENS, 0), jnp.float32, *top),
        **counts,
    )


def _shape(sharding: Sharding, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named(*axes))


def _placed(leaf: Any, placement: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)
