"""The product of rows with the weight of their group, which reads the weights of groups that have rows.

Knows shapes and platforms; docs/performance.md has the measurements.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# XLA's TPU compiler makes of a ragged dot a kernel over the groups that have rows where the rows are a
# multiple of this, and otherwise a product with the weights of all groups.
TPU_ROWS = 8
# The product with so many rows costs more than reading the weight once more for the next block.
MAX_BLOCK_ROWS = 64


@jax.custom_vjp
def grouped_dense(
    x: Float[Array, "row in"], weight: Float[Array, "group in out"], sizes: Int[Array, " group"]
) -> Float[Array, "row out"]:
    """Return each row's product with its group's weight.

    On TPUs XLA's ragged dot reads only the weights of groups that have rows. On CPUs and GPUs it is a product
    with all of them, and a loop over blocks of rows takes its place; `tests/layers/test_grouped.py` shows it.

    Args:
        x: rows, those of group 0 first.
        weight: one for each group, inputs first: the TPU's kernel takes no other order without a copy. It is
            cast to the dtype of `x` as it is read.
        sizes: rows of each group. Rows past their sum belong to none, and what they get is not defined.
    """
    return jax.lax.platform_dependent(x, weight, sizes, tpu=_ragged, default=_in_blocks)


def _forward(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple]:
    return grouped_dense(x, weight, sizes), (x, weight, sizes)


def _backward(saved: tuple, gradient: jax.Array) -> tuple:
    # A training step changes every group's weight, so nothing is lost by reading all of them.
    x, weight, sizes = saved
    _, pull = jax.vjp(lambda x, weight: jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes), x, weight)
    return *pull(gradient), None


grouped_dense.defvjp(_forward, _backward)


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    num_rows = x.shape[0]
    padded = jnp.pad(x, ((0, -num_rows % TPU_ROWS), (0, 0)))
    return jax.lax.ragged_dot(padded, weight.astype(x.dtype), sizes)[:num_rows]


def _in_blocks(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply a block of rows of one group at a time, in the order of the rows.

    The last block of a group reaches into the rows of the next, which overwrites what it left there.
    """
    num_rows, num_groups = x.shape[0], weight.shape[0]
    block_rows = _block_rows(num_rows, num_groups)
    num_blocks = -(-sizes // block_rows)
    ends = jnp.cumsum(num_blocks)
    most = min(num_groups, num_rows) + num_rows // block_rows
    groups = jnp.searchsorted(ends, jnp.arange(most, dtype=ends.dtype), side="right", method="compare_all")
    groups = jnp.minimum(groups, num_groups - 1)
    earlier = jnp.arange(most, dtype=ends.dtype) - (ends - num_blocks)[groups]
    starts = (jnp.cumsum(sizes) - sizes)[groups] + earlier * block_rows
    padded = jnp.pad(x, ((0, block_rows), (0, 0)))

    def multiply(block: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, starts[block], block_rows)
        of_group = jax.lax.dynamic_index_in_dim(weight, groups[block], keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(out, rows @ of_group.astype(x.dtype), starts[block], 0)

    out = jnp.zeros((num_rows + block_rows, weight.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, ends[-1], multiply, out)[:num_rows]


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Return twice a group's mean rows, so that most groups are one block: a power of two."""
    twice_mean = 2 * num_rows // num_groups
    return min(1 << max(twice_mean - 1, 0).bit_length(), MAX_BLOCK_ROWS)
