"""Blocks of a pool's entries in shared memory: on their way, converted, and freed of what is dead.

Knows forms; not what is computed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper.accumulators import matrices, wide
from kernels_pallas.hopper.blocks import BLOCK_TOKENS
from kernels_pallas.hopper.forms import Form

# Channels that are converted or zeroed at once: they are held beside the sums.
_CHANNELS, _LEAST_CHANNELS = 64, 32
_LEAST_SCALE = 2.0**-100


class Pool(NamedTuple):
    """What all layers hold of keys, values or latents.

    Attributes:
        data: entries, `[page, kv_head, slot, head_dim]`.
        scale: of a token and head, `[page, kv_head, slot]`, or of a head, `[kv_head]`.
    """

    data: Any
    scale: Any


class Stages(NamedTuple):
    """Blocks of a pool in shared memory.

    Attributes:
        data: those on their way or in use, `[stage, slot, head_dim]`.
        scale: their tokens' scales, `[stage, slot]`.
        numbers: the one in use, converted, `[slot, head_dim]`.
        barriers: `[stage]`, passed when a block is there.
    """

    data: Any
    scale: Any
    numbers: Any
    barriers: Any


def stages(form: Form, num_stages: int, block_pages: int, head_dim: int) -> Stages:
    """Return the types of what shared memory holds of a pool."""
    has_scales = form.scaling == "token"
    block = (BLOCK_TOKENS, head_dim)
    return Stages(
        data=matrices((num_stages, *block), form.stored),
        scale=plgpu.SMEM((num_stages, BLOCK_TOKENS), jnp.float32) if has_scales else None,
        numbers=matrices(block, form.dtype) if form.is_converted else None,
        barriers=plgpu.Barrier(num_arrivals=block_pages * (2 if has_scales else 1), num_barriers=num_stages),
    )


def copy_scales(scale_ref: Any, stage_ref: Any, barrier: Any) -> None:
    """Start the copy of the scales of slots that follow one another.

    Of pages of 8 or 16 slots, they begin where a tensor's copy may not: at other than multiples of 128 bytes.
    One that is promised to be in bounds asks for 16.
    """
    plgpu.copy_gmem_to_smem(scale_ref, stage_ref, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def load_scales(stage_ref: Any, is_live: jax.Array, layout: Any) -> jax.Array:
    """Return the scales of a block's tokens, above 0, and 1 of dead ones.

    With their logarithm in the logits, what multiplies values is at most 1: float16 holds what counts.
    Weights are that over the scales, and their sums finite.
    """
    scales = plgpu.load(stage_ref, layout=layout, optimized=False)
    return jnp.maximum(jnp.where(is_live, scales, 1.0), _LEAST_SCALE)


def convert(form: Form, data_ref: Any, numbers_ref: Any) -> None:
    """Write a block's entries as numbers that tensor cores take."""
    for channels in _cut(data_ref.shape[-1]):
        numbers_ref.at[:, channels][...] = form.converted(data_ref[:, channels])
        # Within the loop: the assembler would load all channels before it stores any.
        plgpu.commit_smem()


def zero_dead(numbers_ref: Any, is_live: jax.Array) -> None:
    """Zero the rows of numbers whose slots are dead; they are yet to be committed."""
    for channels in _cut(numbers_ref.shape[-1]):
        own_ref = numbers_ref.at[:, channels]
        numbers = plgpu.load(own_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        own_ref[...] = jnp.where(wide(is_live, numbers.shape[1]), numbers, jnp.zeros((), numbers.dtype))


def _cut(num_channels: int) -> list[Any]:
    """Cut channels into those that are taken at once; where a row has no tiles for it, into none."""
    step = math.gcd(num_channels, _CHANNELS)
    step = step if step >= _LEAST_CHANNELS else num_channels
    return [pl.ds(first, step) for first in range(0, num_channels, step)]
