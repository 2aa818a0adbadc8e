"""Two 4-bit integers of each byte as numbers, without a conversion: they are the last bits of larger ones.

The bits of 2**23 in float32, or of 2**7 in bfloat16, with those of an integer in their last places are those
of the sum. Knows bytes as they lie in tiles; no scale.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas.tpu.parts import Part

# What entries are less: of either sign, they and what they are multiplied by, which is rounded, do not leave
# most of their sum to be taken back by the zero point.
MIDDLE = 8.0


def nibbles(entries: Array, part: Part, *, is_paired: bool) -> list[Array]:
    """Return the lower and the upper four bits of bytes `[head, page, row, 128]`, less `MIDDLE`.

    Args:
        entries: of a tile.
        part: their pool.
        is_paired: whether even rows of a column come before odd ones, in bfloat16; else float32, as they lie.
    """
    if not is_paired:
        wide = entries.astype(jnp.int32)
        return [
            pltpu.bitcast(half | 0x4B000000, jnp.float32) - (2.0**23 + MIDDLE)
            for half in (wide & 15, wide >> 4)
        ]
    words, count = pltpu.bitcast(entries, jnp.int32), part.columns.num_rows // 2
    halves = []
    for half in range(part.halves):
        even, odd = (_pairs(words, 4 * half + shift) for shift in (0, 8))
        columns = [
            rows[:, :, first : first + count]
            for first in range(0, even.shape[2], count)
            for rows in (even, odd)
        ]
        halves.append(jnp.concatenate(columns, axis=2))
    return halves


def _pairs(words: Array, shift: int) -> Array:
    """Return the four bits from `shift` on of every other byte as bfloat16, less `MIDDLE`."""
    bits = jax.lax.shift_right_logical(words, jnp.int32(shift)) & 0x000F000F
    return pltpu.bitcast(bits | 0x43004300, jnp.bfloat16) - jnp.bfloat16(2.0**7 + MIDDLE)
