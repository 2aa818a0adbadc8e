"""Blocks of a pool's entries in shared memory: on their way, converted, and freed of what is dead.

Knows forms; not what is computed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper.accumulators import (
    OF_COLUMNS,
    OF_ROWS,
    OF_ROWS_BY_COLUMN,
    load_matrix,
    matrices,
    tall,
    wide,
)
from kernels_pallas.hopper.blocks import BLOCK_TOKENS, slots_of_block
from kernels_pallas.hopper.forms import RUN_CHANNELS, Form
from kernels_pallas.paged_attention.contract import Pages

# Channels that are converted or zeroed at once: they are held beside the sums.
_CHANNELS, _LEAST_CHANNELS = 64, 32
_LEAST_SCALE = 2.0**-100
# A bfloat16 from 128 to 255 is an integer, whose last bits are its own. Products of steps from the middle of
# 4 bits are small, and so is what their rounding costs.
_BITS_OF_128, _MIDDLE = 0x4300, 8


class Pool(NamedTuple):
    """What all layers hold of keys, values or latents.

    Attributes:
        data: entries, `[page, kv_head, slot, head_dim]`.
        scale: of a token and head, `[page, kv_head, slot]`, of a head, `[kv_head]`, or of runs, in one axis.
        zero: of runs.
    """

    data: Any
    scale: Any
    zero: Any = None


def pool_of(pages: Pages) -> Pool:
    """Return what a kernel is given of pages: the scales and zero points of a page's slots in one axis."""
    scale, zero = pages.scale, pages.zero
    if scale is None or zero is None:
        return Pool(pages.data, scale)
    return Pool(pages.data, *(array.reshape(*array.shape[:2], -1) for array in (scale, zero)))


class Stages(NamedTuple):
    """Blocks of a pool in shared memory.

    Attributes:
        data: those on their way or in use, `[stage, slot, head_dim]`.
        scale: their scales, `[stage, scale]`: one for each slot, or as many as runs have.
        zero: zero points of runs.
        numbers: the one in use, converted, `[slot, head_dim]`.
        barriers: `[stage]`, passed when a block is there.
    """

    data: Any
    scale: Any
    zero: Any
    numbers: Any
    barriers: Any


def stages(form: Form, num_stages: int, block_pages: int, head_dim: int) -> Stages:
    """Return the types of what shared memory holds of a pool."""
    scale = zero = None
    if form.scaling == "token":
        scale = plgpu.SMEM((num_stages, BLOCK_TOKENS), jnp.float32)
    if form.has_runs:
        scale = zero = plgpu.SMEM((num_stages, form.scales_of(BLOCK_TOKENS)), jnp.bfloat16)
    width = head_dim // (2 if form.has_runs else 1)
    copies = 1 + (scale is not None) + (zero is not None)
    return Stages(
        data=matrices((num_stages, BLOCK_TOKENS, width), form.stored, form.tile),
        scale=scale,
        zero=zero,
        numbers=matrices((BLOCK_TOKENS, head_dim), form.dtype, form.tile) if form.is_converted else None,
        barriers=plgpu.Barrier(num_arrivals=block_pages * copies, num_barriers=num_stages),
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


def convert_runs(form: Form, blocks: Stages, stage: jax.Array, *, is_interpreted: bool) -> None:
    """Write a block's 4-bit entries as what they stand for: the middle of a run, and steps from there."""
    half = blocks.data.shape[-1]
    if form.scaling == "channels":
        refs = blocks.scale.at[stage], blocks.zero.at[stage]
        load = functools.partial(load_matrix, num_columns=form.run_scales, is_interpreted=is_interpreted)
        scales_of = _of_channels(form, *map(load, refs))
    else:
        scales_of = _of_slots(form, blocks, stage)
    for first in range(0, half, RUN_CHANNELS):
        pairs = _load_pairs(blocks.data.at[stage], first)
        for integers, place in ((pairs & 15, first), (pairs >> 4, half + first)):
            numbers = _decoded(form, integers, *scales_of(place))
            blocks.numbers.at[:, pl.ds(place, RUN_CHANNELS)][...] = numbers
        plgpu.commit_smem()


def convert_half(
    form: Form, data_refs: Sequence[Any], scale_ref: Any, zero_ref: Any, numbers_ref: Any, half: jax.Array
) -> None:
    """Write one half of the channels of a block's 4-bit entries, in runs of channels, as what they stand for.

    Args:
        form: of the entries.
        data_refs: the block's bytes, `[slot, byte]`, in parts that follow one another.
        scale_ref: scales of the half's runs, `[slot, run]`.
        zero_ref: their zero points.
        numbers_ref: what is written, `[slot, channel]`.
        half: 0, the first channels, or 1.
    """
    load = functools.partial(plgpu.load, layout=OF_ROWS_BY_COLUMN, optimized=False)
    scales_of = _of_channels(form, load(scale_ref), load(zero_ref))
    width = data_refs[0].shape[-1]
    for place in range(0, numbers_ref.shape[-1], RUN_CHANNELS):
        pairs = _load_pairs(data_refs[place // width], place % width)
        integers = (pairs >> (4 * half).astype(pairs.dtype)) & 15
        numbers_ref.at[:, pl.ds(place, RUN_CHANNELS)][...] = _decoded(form, integers, *scales_of(place))
        plgpu.commit_smem()


def _load_pairs(data_ref: Any, first: int) -> jax.Array:
    """Return bytes of a block, two entries each, from a place on, as many as a run has channels."""
    own_ref = data_ref.at[:, pl.ds(first, RUN_CHANNELS)]
    return plgpu.load(own_ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.uint16)


def _decoded(form: Form, integers: jax.Array, scale: jax.Array, middle: jax.Array) -> jax.Array:
    """Return what integers of 4 bits stand for."""
    steps = lax.bitcast_convert_type(integers | _BITS_OF_128, form.dtype) - (128 + _MIDDLE)
    return steps * scale + middle


# Scales and middles of runs for all slots of a block and the channels from a place on.
_ScalesOf = Callable[[int], tuple[jax.Array, jax.Array]]


def _of_channels(form: Form, scale: jax.Array, zero: jax.Array) -> _ScalesOf:
    """Return what gives the scales and middles of a slot's runs of channels, loaded by column."""
    runs = plgpu.broadcasted_iota(jnp.int32, scale.shape, 1, layout=OF_ROWS_BY_COLUMN)
    scales_and_middles = _with_middles(scale, zero)

    def scales_of(place: int) -> tuple[jax.Array, jax.Array]:
        # Sums of integers, since there is no such thing as a column of registers; compilers see what is zero.
        is_own = runs == place // RUN_CHANNELS
        bits = (lax.bitcast_convert_type(x, jnp.int32) for x in scales_and_middles)
        columns = (plgpu.layout_cast(jnp.where(is_own, x, 0).sum(axis=1), OF_ROWS) for x in bits)
        scale, middle = (
            wide(lax.bitcast_convert_type(x, jnp.float32).astype(form.dtype), RUN_CHANNELS) for x in columns
        )
        return scale, middle

    return scales_of


def _of_slots(form: Form, blocks: Stages, stage: jax.Array) -> _ScalesOf:
    """Return what gives the scales and middles of a channel's runs of slots."""
    slots = wide(slots_of_block(BLOCK_TOKENS, OF_ROWS), RUN_CHANNELS)

    def scales_of(place: int) -> tuple[jax.Array, jax.Array]:
        picked = None
        for run in range(BLOCK_TOKENS // form.run_slots):
            channels = pl.ds(run * form.run_scales + place, RUN_CHANNELS)
            refs = (ref.at[stage, channels] for ref in (blocks.scale, blocks.zero))
            loaded = (plgpu.load(ref, layout=OF_COLUMNS, optimized=False) for ref in refs)
            own = tuple(tall(x.astype(form.dtype), BLOCK_TOKENS) for x in _with_middles(*loaded))
            is_own = slots >= run * form.run_slots
            picked = tuple(map(functools.partial(jnp.where, is_own), own, picked)) if picked else own
        assert picked is not None
        scale, middle = picked
        return scale, middle

    return scales_of


def _with_middles(scale: jax.Array, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 scales and the middles of their runs."""
    scale = scale.astype(jnp.float32)
    return scale, zero.astype(jnp.float32) + _MIDDLE * scale


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
