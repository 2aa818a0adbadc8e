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

    Of two rows or four: those of the product that a warp holds are all of one. Columns are in `dealt` order.
    """
    shape, num_taken = (num_rows, num_columns), columns.stop - columns.start
    if is_interpreted:
        rows = plgpu.load(ref, optimized=False).reshape(shape)[:, columns]
        return jnp.repeat(dealt(rows), _PRODUCT_ROWS // num_rows, axis=0)
    own_ref, layout = ref.reshape(*shape).at[:, pl.ds(columns.start, num_taken)], of_warps(num_rows)
    rows = plgpu.load(own_ref, layout=layout, optimized=False)
    return _dealt(_halves_of_four, rows, layout, (_PRODUCT_ROWS, num_taken), rows.dtype)


def of_warps(num_rows: int) -> Any:
    """Return the layout of a matrix of so many rows, of each of which as many warps have all."""
    warps = (-3,) if num_rows == _WARPS else (-3, Replicated(_WARPS // num_rows))
    tiling = Tiling(((num_rows, 16), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(Replicated(8), -2), vector_dim=-1)


def load_bytes(ref: Any, *, is_interpreted: bool) -> jax.Array:
    """Load a matrix of bytes as one of 16-bit integers, signed ones plus 128, its columns in `dealt` order.

    A thread loads four bytes at once, and makes two integers of two of them by one instruction.
    """
    layout = None if is_interpreted else plgpu.Layout.WGMMA_8BIT
    numbers = plgpu.load(ref, layout=layout, optimized=False)
    if jnp.issubdtype(numbers.dtype, jnp.signedinteger):
        numbers ^= jnp.int8(-128)
    if is_interpreted:
        return dealt(lax.bitcast_convert_type(numbers, jnp.uint8).astype(jnp.uint16))
    return _dealt(_widened, numbers, plgpu.Layout.WGMMA_8BIT, numbers.shape, jnp.dtype("uint16"))


def dealt(array: jax.Array) -> jax.Array:
    """Order the last axis as threads hold it that have four of 16 columns: two by two, those of all threads.

    A product's layout gives each of four threads four bytes that follow one another, but 16-bit numbers two
    and two. What is multiplied with them is in the same order, and costs less to bring into it.
    """
    return array.reshape(*array.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(array.shape)


def gathered(array: jax.Array) -> jax.Array:
    """Undo `dealt`."""
    return array.reshape(*array.shape[:-1], -1, 2, 4, 2).swapaxes(-3, -2).reshape(array.shape)


def _widened(register: Any) -> list[Any]:
    """Return four bytes as 16-bit integers, two and two."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    four, zero, pair = utils.bitcast(register, i32), utils.c(0, i32), ir.VectorType.get((2,), i16)
    # Bytes 0 and 1, or 2 and 3, each before one of zero, which is byte 4.
    selectors = (utils.c(bits, i32) for bits in (0x4140, 0x4342))
    return [utils.bitcast(utils.prmt(four, zero, selector), pair) for selector in selectors]


def _halves_of_four(register: Any) -> list[Any]:
    """Return four numbers, two and two."""
    return [utils.vector_slice(register, slice(first, first + 2)) for first in (0, 2)]


def _dealt(
    halves_of: Callable[[Any], list[Any]], array: jax.Array, layout: Any, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return what halves of an array's registers become, in a product's layout: that of `dealt` columns."""
    product_layout = plgpu.Layout.WGMMA
    is_signed = utils.is_signed(dtype)

    def deal(_: Any, array: Any) -> Any:
        out_layout = product_layout.to_mgpu()
        registers = dealt_registers(halves_of, array.registers, out_layout.registers_shape(shape))
        return FragmentedArray(_registers=registers, _layout=out_layout, _is_signed=is_signed)

    out_type = plgpu.ShapeDtypeStruct(shape, dtype, layout=product_layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out_type)(deal)
    return inlined(array)


def dealt_registers(
    halves_of: Callable[[Any], list[Any]], registers: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the registers of a thread for a product, `[1, pair, 1, 1, row, ...]`, of halves of four columns.

    Where the four are of one row alone, both of the product's have them.
    """
    out = np.empty(shape, dtype=object)
    _, num_pairs, _, _, num_rows, *ones = shape
    rest = [0] * len(ones)
    fours = registers.reshape(num_pairs // 2, -1)
    for four, row in np.ndindex(num_pairs // 2, num_rows):
        for i, half in enumerate(halves_of(fours[four, row % fours.shape[1]])):
            out[0, 2 * four + i, 0, 0, row, *rest] = half
    return out


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
