"""Page writes in plain JAX: one flat scatter, or one guarded slice where a single row makes it possible.

The scatter drops what has no page. It works on a flat view because an indexed write to the 4-d pool is
copied up to three times over inside a loop.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def write_pages(
    pool: Num[Array, "page kv_head slot *entry"],
    rows: Num[Array, "seq time kv_head *entry"],
    slots: Int[Array, "seq time"],
    *,
    page_offset: Int[Array, ""] | int,
) -> Num[Array, "page kv_head slot *entry"]:
    """Write `rows` into their slots and return the pool.

    Args:
        pool: pages of all layers; consumed where the caller donates it.
        rows: what each slot is to hold, keys, values or their scales; cast to the pool's dtype.
        slots: place of each row among its layer's pages, `page * page_size + slot`; negative: dropped.
        page_offset: the pool's page that is page 0 of this layer.
    """
    total_pages, num_kv_heads, page_size, *entry = pool.shape
    is_kept = slots >= 0
    places = jnp.where(is_kept, slots, 0)
    pages, places = (
        jax.lax.div(places, jnp.int32(page_size)) + page_offset,
        jax.lax.rem(places, jnp.int32(page_size)),
    )
    rows = rows.astype(pool.dtype)
    if slots.shape == (1, 1):
        start = (pages[0, 0], 0, places[0, 0], *[0] * len(entry))
        row = rows[0, 0][None, :, None]
        old = jax.lax.dynamic_slice(pool, start, row.shape)
        return jax.lax.dynamic_update_slice(pool, jnp.where(is_kept[0, 0], row, old), start)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, None]
    index = (pages[..., None] * num_kv_heads + heads) * page_size + places[..., None]
    index = jnp.where(is_kept[..., None], index, -1).reshape(-1)
    # Past the whole pool, so that `mode="drop"` sees it (a negative index would wrap), each at its own place.
    past = total_pages * num_kv_heads * page_size + jnp.arange(index.size, dtype=jnp.int32)
    index = jnp.where(index < 0, past, index)
    # Materialized, or XLA's CPU backend computes it anew for every entry that it writes.
    index = jax.lax.optimization_barrier(index)
    flat = pool.reshape(-1, *entry)
    flat = flat.at[index].set(rows.reshape(-1, *entry), mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)
