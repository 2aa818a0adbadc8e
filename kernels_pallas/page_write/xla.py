"""Page writes in plain JAX: one scatter of slots, which drops what has no page.

Its indices and windows are spelled out: inside a loop, a pool that is written by an index is copied up to
three times over, and on TPUs so is one that is written by a slice update of a single slot.
"""

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode, ScatterDimensionNumbers
from jaxtyping import Array, Int, Num

from kernels_pallas.slots import as_matrices, windows_of

_SLOT_WINDOWS = ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 2, 3)
)
# Of a pool whose pages are single rows.
_LANE_WINDOWS = ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 2)
)


def write_pages(
    pool: Num[Array, "page kv_head *row lane"],
    rows: Num[Array, "seq time kv_head *entry"],
    slots: Int[Array, "seq time"],
    *,
    page_offset: Int[Array, ""] | int,
    page_size: int,
) -> Num[Array, "page kv_head *row lane"]:
    """Write `rows` into their slots and return the pool.

    Args:
        pool: pages of all layers, see `kernels_pallas.slots`; consumed where the caller donates it.
        rows: what each slot is to hold, keys, values or their scales, or each run of slots,
            `[..., slot, entry]`; cast to the pool's dtype.
        slots: place of each row among its layer's pages, `page * page_size + slot`, or of the first of its
            run; negative: dropped.
        page_offset: the pool's page that is page 0 of this layer.
        page_size: slots of a page.
    """
    matrices = as_matrices(pool)
    total_pages, num_kv_heads, _, num_lanes = matrices.shape
    is_kept = slots >= 0
    places = jnp.where(is_kept, slots, 0)
    pages = jax.lax.div(places, jnp.int32(page_size)) + page_offset
    within = jax.lax.rem(places, jnp.int32(page_size))
    cut = windows_of(rows.astype(pool.dtype), within, page_size=page_size, num_lanes=num_lanes)
    rows = cut.rows.reshape(-1, *cut.rows.shape[-2:])
    # Past the whole pool, where the scatter drops it, each at its own place.
    past = total_pages + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    pages = jnp.where(is_kept, pages, past)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    place = [pages[..., None, None], heads, cut.row[..., None, :], cut.lane[..., None, :]]
    numbers = _SLOT_WINDOWS
    if pool.ndim == 3:
        # As it is: XLA's CPU backend copies a pool of one KV head whose reshaped form is written.
        matrices, rows, numbers = pool, rows[:, 0], _LANE_WINDOWS
        del place[2]
    index = jnp.stack(jnp.broadcast_arrays(*place), axis=-1).reshape(-1, len(place))
    # XLA's CPU backend would compute it anew for every entry that it writes; on GPUs that spares a kernel.
    index = jax.lax.platform_dependent(index, cuda=lambda x: x, default=jax.lax.optimization_barrier)
    written = jax.lax.scatter(
        matrices,
        index,
        rows,
        numbers,
        mode=GatherScatterMode.FILL_OR_DROP,
        unique_indices=True,
    )
    return written.reshape(pool.shape)
