"""The dense product of a few rows with a large weight, in the form that each backend runs fast.

Knows shapes and platforms; docs/performance.md has the measurements.
"""

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Rows at which XLA's CPU backend is faster with the weight on the left: it packs the right operand anew on
# every call, which one row does not need and many rows repay.
CPU_WEIGHT_LEFT_ROWS = range(2, 128)


def dense(
    x: Float[Array, "seq time in"],
    weight: Float[Array, "out in"],
    out_sharding: NamedSharding | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "seq time out"]:
    """Return `x @ weight.T`.

    Args:
        x: activations.
        weight: stored as checkpoints store it, one row an output.
        out_sharding: placement of the result, on a mesh with Explicit axes.
        dtype: dtype of the result; None is that of the operands.
    """

    def rows_left(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, weight, (((2,), (1,)), ((), ())), preferred_element_type=dtype, out_sharding=out_sharding
        )

    def weight_left(x: jax.Array, weight: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        out = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        # Without the barrier XLA turns the transposed product back into the slow one.
        out = jax.lax.optimization_barrier(out).T
        return out.reshape(*x.shape[:2], weight.shape[0])

    if out_sharding is None and x.shape[0] * x.shape[1] in CPU_WEIGHT_LEFT_ROWS:
        return jax.lax.platform_dependent(x, weight, cpu=weight_left, default=rows_left)
    return rows_left(x, weight)
