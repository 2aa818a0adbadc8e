"""The dense product of a few rows with a large weight, in the form that each backend runs fast.

Knows shapes and platforms; docs/performance.md has the measurements.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Rows at which XLA's CPU backend is faster with the weight on the left: it packs the right operand anew on
# every call, which one row does not need and many rows repay.
CPU_WEIGHT_LEFT_ROWS = range(2, 128)
# XLA's CPU backend turns a sum over a longer axis into a form that it cannot fuse.
_LONGEST_SUM = 32
_LANES = (8, 16, 24, 32)


def dense(
    x: Float[Array, "seq time in"],
    weight: Float[Array, "out in"],
    out_sharding: NamedSharding | None = None,
    dtype: DTypeLike | None = None,
    is_split: bool = False,
) -> Float[Array, "seq time out"]:
    """Return `x @ weight.T`.

    Args:
        x: activations.
        weight: stored as checkpoints store it, one row an output; cast to the dtype of `x` as it is read.
        out_sharding: placement of the result, on a mesh with Explicit axes.
        dtype: dtype of the result; None is that of `x`.
        is_split: whether XLA splits the weight over devices; it would gather one whose row is cut.
    """
    num_rows, width = x.shape[0] * x.shape[1], x.shape[2]

    def rows_left(x: jax.Array, weight: jax.Array) -> jax.Array:
        x, weight = tied(x, weight)
        return jax.lax.dot_general(
            x, weight, (((2,), (1,)), ((), ())), preferred_element_type=dtype, out_sharding=out_sharding
        )

    def weight_left(x: jax.Array, weight: jax.Array) -> jax.Array:
        x, weight = tied(x, weight)
        rows = x.reshape(-1, width)
        out = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        # Without the barrier XLA turns the transposed product back into the slow one.
        out = jax.lax.optimization_barrier(out).T
        return out.reshape(*x.shape[:2], weight.shape[0])

    def narrow_row(x: jax.Array, weight: jax.Array) -> jax.Array:
        inputs, weight = jax.lax.optimization_barrier((x.astype(jnp.float32), weight))
        outer, inner, lanes = split_row(width)
        rows = weight.reshape(-1, outer, inner, lanes)
        inputs = inputs.reshape(outer, inner, lanes)
        terms = [rows[:, :, c].astype(jnp.float32) * inputs[None, :, c] for c in range(inner)]
        return add_up(terms).sum((1, 2)).astype(dtype or x.dtype)[None, None]

    if num_rows == 1 and not is_split and weight.dtype.itemsize == 2 and width % _LANES[0] == 0:
        return jax.lax.platform_dependent(x, weight, cpu=narrow_row, default=rows_left)
    if out_sharding is None and num_rows in CPU_WEIGHT_LEFT_ROWS:
        return jax.lax.platform_dependent(x, weight, cpu=weight_left, default=rows_left)
    return rows_left(x, weight)


def tied(x: Array, weight: Array) -> tuple[Array, Array]:
    """Return the two with the weight in the dtype of `x`, to which it is tied if that is wider.

    XLA would otherwise widen all the weights of a model once, ahead of a decode loop, and hold them.
    """
    if weight.dtype.itemsize < x.dtype.itemsize:
        x, weight = jax.lax.optimization_barrier((x, weight))
    return x, weight.astype(x.dtype)


def split_row(size: int) -> tuple[int, int, int]:
    """Cut a row of a multiple of 8 into (outer, inner, lanes); `inner` is written out, the rest are loops."""
    lanes = max(lanes for lanes in _LANES if size % lanes == 0)
    inner = inner_axis(size // lanes)
    return size // lanes // inner, inner, lanes


def inner_axis(size: int) -> int:
    """Return the least divisor, 3 or more if any, that leaves an outer axis short enough to fuse."""
    divisors = [d for d in range(1, size + 1) if size % d == 0 and size // d <= _LONGEST_SUM]
    return next((d for d in divisors if d >= 3), divisors[-1])


def add_up(terms: list[jax.Array]) -> jax.Array:
    """Add up terms, one after the other."""
    return functools.reduce(jnp.add, terms)
