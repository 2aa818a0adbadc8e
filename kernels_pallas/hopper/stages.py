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
    OF_ROWS,
    OF_ROWS_BY_COLUMN,
    load_bytes,
    load_matrix,
    load_of_runs,
    matrices,
    wide,
)
from kernels_pallas.hopper.blocks import BLOCK_TOKENS, Piece
from kernels_pallas.hopper.forms import RUN_CHANNELS, Form
from kernels_pallas.paged_attention.contract import Pages

# Channels that are converted or zeroed at once: they are held beside the sums.
_CHANNELS, _LEAST_CHANNELS = 64, 32
_LEAST_SCALE = 2.0**-100
# The least bfloat16. An integer up to 255 is as many of it: its bits are those of the number.
LEAST = 2.0**-133


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


def stored_bytes(form: Form, head_dim: int) -> int:
    """Return the bytes of a block of `stages` as it is stored, with its scales."""
    num_bytes = BLOCK_TOKENS * head_dim * form.stored.itemsize
    if form.has_runs:
        return num_bytes // 2 + 2 * form.scales_of(BLOCK_TOKENS) * jnp.dtype(jnp.bfloat16).itemsize
    return num_bytes + (BLOCK_TOKENS * jnp.dtype(jnp.float32).itemsize if form.scaling == "token" else 0)


def copy_piece(
    pool: Pool, blocks: Stages, form: Form, piece: Piece, num_slots: int, head: jax.Array, stage: Any
) -> None:
    """Start the copies of a KV head's slots in one page, and of their scales."""
    barrier = blocks.barriers.at[stage]
    source = piece.page, head, pl.ds(piece.slot, num_slots)
    target = stage, pl.ds(piece.place, num_slots)
    plgpu.copy_gmem_to_smem(pool.data.at[*source], blocks.data.at[*target], barrier)
    num_scales = form.scales_of(num_slots)
    source = piece.page, head, pl.ds(form.scales_of(piece.slot), num_scales)
    target = stage, pl.ds(form.scales_of(piece.place), num_scales)
    for scales, own in ((pool.scale, blocks.scale), (pool.zero, blocks.zero)):
        if own is not None:
            copy_scales(scales.at[*source], own.at[*target], barrier)


def copy_scales(scale_ref: Any, stage_ref: Any, barrier: Any) -> None:
    """Start the copy of the scales of slots that follow one another.

    Of pages of 8 or 16 slots, they begin where a tensor's copy may not: at other than multiples of 128 bytes.
    One that is promised to be in bounds asks for 16.
    """
    plgpu.copy_gmem_to_smem(scale_ref, stage_ref, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def load_scales(stage_ref: Any, is_live: jax.Array, layout: Any) -> jax.Array:
    """Return the scales of a block's tokens, above 0, and 1 of dead ones.

    Weights times scales are what multiplies values. Of a narrow form, scales have their logarithm in the
    logits, which keeps that at most 1: float16 holds what counts. Weights are that over the scales, and their
    sums finite.
    """
    scales = plgpu.load(stage_ref, layout=layout, optimized=False)
    return jnp.maximum(jnp.where(is_live, scales, 1.0), _LEAST_SCALE)


def numbers_of(form: Form, blocks: Stages, stage: Any) -> Any:
    """Return the block in use as numbers that tensor cores take, which `write_numbers` has written."""
    return blocks.numbers if form.is_converted else blocks.data.at[stage]


def write_numbers(form: Form, blocks: Stages, stage: jax.Array, *, is_interpreted: bool) -> None:
    """Write a block as numbers that tensor cores take, times the form's unit, where it is not."""
    if form.has_runs:
        convert_runs(form, blocks, stage, is_interpreted=is_interpreted)
    elif form.is_converted:
        convert(form, blocks.data.at[stage], blocks.numbers, is_interpreted=is_interpreted)


def convert(form: Form, data_ref: Any, numbers_ref: Any, *, is_interpreted: bool) -> None:
    """Write a block's entries as numbers that tensor cores take, times the form's unit."""
    for channels in _cut(data_ref.shape[-1]):
        own_ref = data_ref.at[:, channels]
        if form.is_dealt:
            # Signed, which are 128 more as they are loaded.
            bits = load_bytes(own_ref, is_interpreted=is_interpreted)
            scale, zero = form.unit / _least(is_interpreted=is_interpreted), -128 * form.unit
            numbers = _decoded(form, bits, scale, zero, is_interpreted=is_interpreted)
        else:
            numbers = form.converted(own_ref[...])
        numbers_ref.at[:, channels][...] = numbers


def convert_runs(form: Form, blocks: Stages, stage: jax.Array, *, is_interpreted: bool) -> None:
    """Write a block's 4-bit entries as what they stand for, times the form's unit."""
    half, least = blocks.data.shape[-1], _least(is_interpreted=is_interpreted)
    refs = blocks.scale.at[stage], blocks.zero.at[stage]
    if form.scaling == "channels":
        load = functools.partial(load_matrix, num_columns=form.run_scales, is_interpreted=is_interpreted)
        scales_of = _of_channels(form, *map(load, refs))
    else:
        scales_of = _of_slots(form, *refs, is_interpreted=is_interpreted)
    for first in range(0, half, RUN_CHANNELS):
        own_ref = blocks.data.at[stage, :, pl.ds(first, RUN_CHANNELS)]
        pairs = load_bytes(own_ref, is_interpreted=is_interpreted)
        for bits, one, place in ((pairs & 15, 1, first), (pairs & 240, 16, half + first)):
            scale, zero = scales_of(place, form.unit / (one * least))
            numbers = _decoded(form, bits, scale, zero, is_interpreted=is_interpreted)
            blocks.numbers.at[:, pl.ds(place, RUN_CHANNELS)][...] = numbers


def convert_half(
    form: Form,
    data_refs: Sequence[Any],
    scale_ref: Any,
    zero_ref: Any,
    numbers_ref: Any,
    half: jax.Array,
    *,
    is_interpreted: bool,
) -> None:
    """Write one half of the channels of a block's 4-bit entries, in runs of channels, as `convert_runs` does.

    Args:
        form: of the entries.
        data_refs: the block's bytes, `[slot, byte]`, in parts that follow one another.
        scale_ref: scales of the half's runs, `[slot, run]`.
        zero_ref: their zero points.
        numbers_ref: what is written, `[slot, channel]`.
        half: 0, the first channels, or 1.
        is_interpreted: see `Tiling`.
    """
    load = functools.partial(plgpu.load, layout=OF_ROWS_BY_COLUMN, optimized=False)
    scales_of = _of_channels(form, load(scale_ref), load(zero_ref))
    width, mask = data_refs[0].shape[-1], 15 << (4 * half)
    factor = form.unit / _least(is_interpreted=is_interpreted)
    factor = jnp.where(half == 0, factor, factor / 16).astype(form.dtype)
    for place in range(0, numbers_ref.shape[-1], RUN_CHANNELS):
        own_ref = data_refs[place // width].at[:, pl.ds(place % width, RUN_CHANNELS)]
        pairs = load_bytes(own_ref, is_interpreted=is_interpreted)
        bits = pairs & mask.astype(pairs.dtype)
        numbers = _decoded(form, bits, *scales_of(place, factor), is_interpreted=is_interpreted)
        numbers_ref.at[:, pl.ds(place, RUN_CHANNELS)][...] = numbers


def _least(*, is_interpreted: bool) -> float:
    """Return what the integers that bits are are multiples of: CPUs take the least numbers for zero."""
    return 1.0 if is_interpreted else LEAST


def _decoded(form: Form, bits: jax.Array, scale: Any, zero: Any, *, is_interpreted: bool) -> jax.Array:
    """Return the multiples of a scale that bits stand for, plus a zero point, rounded once."""
    if is_interpreted:
        bits, scale, zero = (jnp.asarray(x, jnp.float32) for x in (bits, scale, zero))
        return (bits * scale + zero).astype(form.dtype)
    return lax.bitcast_convert_type(bits, form.dtype) * scale + zero


# Scales of runs times a factor, and zero points times the form's unit, for all slots of a block and the
# channels from a place on.
_ScalesOf = Callable[[int, Any], tuple[jax.Array, jax.Array]]


def _of_channels(form: Form, scale: jax.Array, zero: jax.Array) -> _ScalesOf:
    """Return what gives scales and zero points of a slot's runs of channels, loaded by column."""
    runs = plgpu.broadcasted_iota(jnp.int32, scale.shape, 1, layout=OF_ROWS_BY_COLUMN)

    def column(matrix: jax.Array, index: int) -> jax.Array:
        # Sums of integers, since there is no such thing as a column of registers; compilers see what is zero.
        bits = lax.bitcast_convert_type(matrix, jnp.int16).astype(jnp.int32)
        own = plgpu.layout_cast(jnp.where(runs == index, bits, 0).sum(axis=1), OF_ROWS)
        return lax.bitcast_convert_type(own.astype(jnp.int16), form.dtype)

    def scales_of(place: int, factor: Any) -> tuple[jax.Array, jax.Array]:
        run = place // RUN_CHANNELS
        # Multiplied before they are repeated: the assembler would keep what is repeated in registers.
        own = column(scale, run) * factor, column(zero, run) * form.unit
        return wide(own[0], RUN_CHANNELS), wide(own[1], RUN_CHANNELS)

    return scales_of


def _of_slots(form: Form, scale_ref: Any, zero_ref: Any, *, is_interpreted: bool) -> _ScalesOf:
    """Return what gives scales and zero points of a channel's runs of slots."""

    def scales_of(place: int, factor: Any) -> tuple[jax.Array, jax.Array]:
        channels = slice(place, place + RUN_CHANNELS)
        scale, zero = (
            load_of_runs(
                ref,
                channels,
                num_rows=BLOCK_TOKENS // form.run_slots,
                num_columns=form.run_scales,
                is_interpreted=is_interpreted,
            )
            for ref in (scale_ref, zero_ref)
        )
        return scale * factor, zero * form.unit

    return scales_of


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
