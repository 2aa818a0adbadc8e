"""The arithmetic of the codecs: heads to stored entries and scales, and back.

Knows one token's head at a time; no page and no attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.cache.codec import DTYPES, Codec
from jkv.pytree import State, pytree

FP8: dict[str, Any] = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@pytree
class Stored(State):
    """Keys or values as a codec stores them; leading axes are the caller's.

    Attributes:
        data: entries of each head; of fp8 their bits, of int4 two in a byte, entry `i` and entry
            `i + head_dim / 2`.
        scale: what entries are multiplied by when they are read; shape by the codec's scaling.
        zero: what is added after that.
    """

    data: Array
    scale: Array | None = None
    zero: Array | None = None


def encode(
    codec: Codec, heads: Float[Array, "*rows kv_head head_dim"], scale: Float[Array, " kv_head"] | None = None
) -> Stored:
    """Return the heads as the codec stores them.

    A zero head stays zero. A head with NaN or infinity reads as one that is not finite, but for
    `int8_static`, whose entries cannot say so.

    Args:
        codec: how they are stored.
        heads: keys after their rotation by position, or values; rotated here where the codec says so.
        scale: the calibrated scales of a static codec; entries beyond 127 of them (int8), or beyond the
            largest number of fp8, saturate.
    """
    if codec.scaling == "none":
        return Stored(data=heads.astype(DTYPES[codec.entry]))
    heads = rotate(codec, heads.astype(jnp.float32))
    if codec.scaling == "channels":
        return _encode_channels(codec, heads)
    largest = largest_entry(codec)
    if codec.scaling == "static":
        return Stored(data=_entries(codec, heads / _of_heads(scale, heads.ndim)))
    scale = jnp.max(jnp.abs(heads), axis=-1) / largest
    return Stored(data=_entries(codec, heads / _divisor(scale)[..., None]), scale=scale)


def encode_run(heads: Float[Array, "*rows slot head_dim"]) -> Stored:
    """Return runs of slots in 4 bits, a scale and zero point `[*rows, head_dim]` for each channel.

    A channel with NaN or infinity reads as one that is not finite, in its own run and head.
    """
    heads = heads.astype(jnp.float32)
    low, high = heads.min(-2, keepdims=True), heads.max(-2, keepdims=True)
    entries, scale, zero = _quantize(heads, low, high)
    return Stored(data=pack(entries), scale=scale.squeeze(-2), zero=zero.squeeze(-2))


def decode(codec: Codec, stored: Stored, scale: Float[Array, " kv_head"] | None = None) -> Array:
    """Return the float32 heads that the stored entries stand for; arguments as `encode`.

    Scales and zero points of a run of slots are given for each of them, `[*rows, kv_head, head_dim]`.
    """
    if codec.scaling == "none":
        return stored.data.astype(jnp.float32)
    if stored.zero is not None:
        assert stored.scale is not None
        data = unpack(stored.data)
        span = data.shape[-1] // stored.scale.shape[-1]
        scale, zero = (jnp.repeat(a.astype(jnp.float32), span, axis=-1) for a in (stored.scale, stored.zero))
        heads = data * scale + zero
    else:
        ndim = stored.data.ndim
        factor = _of_heads(scale, ndim) if stored.scale is None else stored.scale[..., None]
        data = stored.data
        if codec.entry in FP8:
            data = jax.lax.bitcast_convert_type(data, FP8[codec.entry])
        heads = data.astype(jnp.float32) * factor
    return rotate(codec, heads, is_inverse=True)


def rotate(codec: Codec, heads: Float[Array, "*rows head_dim"], *, is_inverse: bool = False) -> Array:
    """Multiply heads by the codec's orthogonal matrix, or by its transpose; nothing where it has none.

    Queries rotated as their keys have the same logits as without rotation.
    """
    if not codec.is_rotated:
        return heads
    signs, factor = hadamard(heads.shape[-1])
    # Factored out, so that sums of few bits are exact, whatever their order.
    return factor * jnp.matmul(heads, signs.T if is_inverse else signs, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def hadamard(size: int) -> tuple[np.ndarray, np.float32]:
    """Return signs `[size, size]` in Hadamard blocks, as large as the powers of two in `size` allow.

    Times the factor beside them they are an orthogonal matrix.
    """
    block = np.ones((1, 1), np.float32)
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block), dtype=np.float32), block), np.float32(len(block) ** -0.5)


def pack(entries: Array) -> Array:
    """Put two 4-bit entries into each byte: the first half of the last axis low, the second high."""
    low, high = jnp.split(entries.astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4)


def unpack(data: Array) -> Float[Array, "..."]:
    """Return the float32 entries that `pack` has packed."""
    return jnp.concatenate([data & 15, data >> 4], axis=-1).astype(jnp.float32)


def to_bfloat16(x: Array) -> Array:
    """Round float32 numbers to what bfloat16 holds; XLA may leave out a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def largest_entry(codec: Codec) -> float:
    """Return the number at which the entries of int8 and fp8 saturate."""
    return 127.0 if codec.entry == "int8" else float(jnp.finfo(FP8[codec.entry]).max)


def _encode_channels(codec: Codec, heads: Float[Array, "*rows head_dim"]) -> Stored:
    head_dim = heads.shape[-1]
    span = codec.span(head_dim)
    runs = heads.reshape(*heads.shape[:-1], head_dim // span, span)
    data, scale, zero = _quantize(runs, runs.min(-1, keepdims=True), runs.max(-1, keepdims=True))
    return Stored(data=pack(data.reshape(heads.shape)), scale=scale.squeeze(-1), zero=zero.squeeze(-1))


def _quantize(runs: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """Return 4-bit entries, and the scale and zero point of each run as they are stored."""
    zero = to_bfloat16(low)
    # Divided first: the difference of two large numbers may overflow.
    scale = to_bfloat16(high / 15 - zero / 15)
    entries = jnp.clip(jnp.round((runs - zero) / _divisor(scale)), 0, 15)
    return entries, scale.astype(jnp.bfloat16), zero.astype(jnp.bfloat16)


def _of_heads(scale: Float[Array, " kv_head"] | None, ndim: int) -> Array:
    """Return calibrated scales as they multiply an array of heads."""
    assert scale is not None
    return scale.reshape(*[1] * (ndim - 2), -1, 1)


def _entries(codec: Codec, scaled: Array) -> Array:
    if codec.entry == "int8":
        return jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)
    # A cast to fp8 does not saturate: it would make NaN of what is too large.
    clipped = jnp.clip(scaled, -largest_entry(codec), largest_entry(codec))
    return jax.lax.bitcast_convert_type(clipped.astype(FP8[codec.entry]), jnp.uint8)


def _divisor(scale: Array) -> Array:
    return jnp.where(scale == 0, 1, scale)
