"""The sum of a tile's values by the weights of their slots, which are multiplied in whole rows of lanes.

Weights of slots that share a row, and of runs of channels, are multiplied one below the other; of each
product those lanes are kept that are its own. Knows the pool of values and some of its heads; no mask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.tpu.logits import paired_products
from kernels_pallas.tpu.parts import Part


def weighted_sum(
    part: Part,
    weights: list[Float[Array, "head row token"]],
    values: Float[Array, "head place lane"],
    shifts: list[Float[Array, "head row 1"]],
) -> Float[Array, "head row lane"]:
    """Return the sum of values, each column's in its lanes.

    Args:
        part: the pool.
        weights: of each run of channels, or of all; the slots of a column beside those before it.
        values: of these slots.
        shifts: what is to be added for each run, where runs have shifts.
    """
    count, share = len(weights) // part.halves, part.columns.share
    width, lanes = values.shape[1], values.shape[2] // part.halves
    sums = []
    for half in range(part.halves):
        of_runs = slice(half * count, (half + 1) * count)
        stacked = [run[:, :, i * width : (i + 1) * width] for i in range(share) for run in weights[of_runs]]
        left = jnp.concatenate(stacked, axis=1).astype(values.dtype)
        total = paired_products("hrs,hsd->hrd", left, values[:, :, half * lanes : (half + 1) * lanes], axis=1)
        total = total.reshape(total.shape[0], share, count, -1, lanes)
        sums.append(_in_lanes(part, total, shifts[of_runs]))
    return jnp.concatenate(sums, axis=-1)


def _in_lanes(part: Part, sums: Array, shifts: list[Array]) -> Array:
    """Return of each column and run the lanes that are its own; a shift once: columns are added."""
    columns, span = part.columns, 0 if part.runs is None else part.runs.span
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, *sums.shape[3:]), 2)
    joined = jnp.zeros((), jnp.float32)
    for column in range(columns.share):
        for run in range(sums.shape[2]):
            own = sums[:, column, run]
            own = own + shifts[run] if shifts and column == 0 else own
            begin = column * columns.width + run * span
            joined = own if column == run == 0 else jnp.where(lane < begin, joined, own)
    return joined
