"""Products of tensor cores, and arithmetic on what they leave in registers.

A product of `[row, column]` is spread over registers as `plgpu.Layout.WGMMA` has it. Vectors of its rows or
of its columns have layouts of their own, in which they combine with it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

# A vector with an entry for each row of an accumulator, and one for each column.
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# A matrix of so few columns that each is a register of its own.
OF_ROWS_BY_COLUMN = plgpu.Layout.TILED(
    Tiling(((64, 1), (16, 1), (8, 1))), warp_dims=(-6,), lane_dims=(-2, Replicated(4)), vector_dim=-1
)
LOG2_E = math.log2(math.e)
# Of a tile's row: 64 entries of 16 bits are the 128 bytes that a swizzle takes at most.
_TILE_ENTRIES, _LEAST_TILE_BYTES = 64, 32


def wide(of_rows: jax.Array, num_columns: int) -> jax.Array:
    """Repeat a vector along a new last axis."""
    return lax.broadcast_in_dim(of_rows, (of_rows.shape[0], num_columns), (0,))


def tall(of_columns: jax.Array, num_rows: int) -> jax.Array:
    """Repeat a vector along a new first axis."""
    return lax.broadcast_in_dim(of_columns, (num_rows, of_columns.shape[0]), (1,))


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """Return a float32 array of one value, in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(*factors: tuple[Any, Any]) -> jax.Array:
    """Return the float32 sum of the products of pairs of matrices in shared memory."""

    def multiply(sums_ref: Any) -> jax.Array:
        for left_ref, right_ref in factors:
            plgpu.wgmma(sums_ref, left_ref, right_ref)
        return sums_ref[...]

    (left_ref, right_ref), *_ = factors
    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((left_ref.shape[0], right_ref.shape[1]), jnp.float32)
    )


def plus_product(sums: jax.Array, left_ref: Any, right_ref: Any, *, in_place: bool) -> jax.Array:
    """Return float32 sums plus the product of two matrices in shared memory.

    In place it takes no more registers than the sums do; the interpreter has it only out of place.
    """
    if not in_place:
        return sums + product((left_ref, right_ref))

    def multiply(sums_ref: Any) -> None:
        plgpu.wgmma(sums_ref, left_ref, right_ref)

    initial: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(multiply)(initial)


def load_matrix(ref: Any, num_columns: int, *, is_interpreted: bool) -> jax.Array:
    """Load a vector in shared memory as the rows of a matrix of few columns."""
    shape = ref.shape[0] // num_columns, num_columns
    if is_interpreted:
        return plgpu.load(ref, optimized=False).reshape(shape)
    return plgpu.load(ref.reshape(*shape), layout=OF_ROWS_BY_COLUMN, optimized=False)


def matrices(shape: tuple[int, ...], dtype: jnp.dtype, width: int | None = None) -> Any:
    """Return the type of matrices in shared memory, tiled and swizzled as TMA and wgmma take them.

    Args:
        shape: their last two axes are a matrix.
        dtype: of their entries.
        width: of the rows of another factor of their product, whose tiles they share; None is as their own.
    """
    entries = math.gcd(shape[-1], width or shape[-1], _TILE_ENTRIES)
    row_bytes = entries * dtype.itemsize
    if row_bytes < _LEAST_TILE_BYTES:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, entries))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def log_sum_of(peak: jax.Array, total: jax.Array) -> jax.Array:
    """Return the natural logarithm of a sum of powers of 2 less `peak`; -inf of an empty one."""
    log_sum = (peak + jnp.log2(jnp.where(total == 0, 1.0, total))) / LOG2_E
    return jnp.where(total == 0, -jnp.inf, log_sum)
