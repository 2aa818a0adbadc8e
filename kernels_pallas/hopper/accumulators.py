"""Products of tensor cores, and arithmetic on what they leave in registers.

A product of `[row, column]` is spread over registers as `plgpu.Layout.WGMMA` has it. Vectors of its rows or
of its columns have layouts of their own, in which they combine with it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

# A vector with an entry for each row of an accumulator, and one for each column.
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# A matrix of so few columns that each is a register of its own.
OF_ROWS_BY_COLUMN = plgpu.Layout.TILED(
    Tiling(((64, 1), (16, 1), (8, 1))), warp_dims=(-6,), lane_dims=(-2, Replicated(4)), vector_dim=-1
)
LOG2_E = math.log2(math.e)
# Rows of a product, and the warps that they are divided among.
_PRODUCT_ROWS, _WARPS = 64, 4
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


def load_of_runs(
    ref: Any, columns: slice, *, num_rows: int, num_columns: int, is_interpreted: bool
) -> jax.Array:
    """Load columns of a matrix that is a vector in shared memory, its rows repeated to fill a product's.

    Of two rows or four: those of the product that a warp holds are all of one.
    """
    shape, num_taken = (num_rows, num_columns), columns.stop - columns.start
    if is_interpreted:
        rows = plgpu.load(ref, optimized=False).reshape(shape)[:, columns]
        return jnp.repeat(rows, _PRODUCT_ROWS // num_rows, axis=0)
    warps = (-3,) if num_rows == _WARPS else (-3, Replicated(_WARPS // num_rows))
    of_warps = plgpu.Layout.TILED(
        Tiling(((num_rows, 8), (2,))), warp_dims=warps, lane_dims=(Replicated(8), -2), vector_dim=-1
    )
    own_ref = ref.reshape(*shape).at[:, pl.ds(columns.start, num_taken)]
    rows = plgpu.load(own_ref, layout=of_warps, optimized=False)

    def repeat(rows: Any, layout: Any) -> Any:
        shape = layout.registers_shape((_PRODUCT_ROWS, num_taken))
        return np.broadcast_to(rows.registers.reshape(1, -1, *[1] * (len(shape) - 2)), shape).copy()

    return _of_registers(repeat, rows, of_warps, (_PRODUCT_ROWS, num_taken), rows.dtype)


def widened(numbers: jax.Array) -> jax.Array:
    """Return bytes in a product's layout as 16-bit integers, two by one instruction; never interpreted."""

    def widen(numbers: Any, _: Any) -> Any:
        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        # Of a pair's bytes, 0 and 1, and of zeros.
        selector, pair = utils.c(0x2120, i32), ir.VectorType.get((2,), i16)

        def widen_pair(register: Any) -> Any:
            both = arith.extui(i32, utils.bitcast(register, i16))
            return utils.bitcast(utils.prmt(both, both, selector), pair)

        return np.vectorize(widen_pair, otypes=[object])(numbers.registers)

    return _of_registers(widen, numbers, plgpu.Layout.WGMMA, numbers.shape, jnp.dtype("uint16"))


def _of_registers(
    change: Callable[[Any, Any], Any], array: jax.Array, layout: Any, shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:
    """Return an array in a product's layout of what registers become, in code of the compiler's own."""
    product_layout = plgpu.Layout.WGMMA
    out_type = plgpu.ShapeDtypeStruct(shape, dtype, layout=product_layout)
    is_signed = utils.is_signed(dtype)

    def changed(_: Any, array: Any) -> Any:
        out_layout = product_layout.to_mgpu()
        registers = change(array, out_layout)
        return FragmentedArray(_registers=registers, _layout=out_layout, _is_signed=is_signed)

    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out_type)(changed)
    return inlined(array)


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
