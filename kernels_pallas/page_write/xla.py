"""Page writes in plain JAX: one flat scatter, or one guarded slice where a single row makes it possible.

The scatter drops what has no page. It works on a flat view because an indexed write to the 4-d pool is
copied up to three times over inside a loop.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def write_pages(
    pool: Float[Array, "page kv_head slot head_dim"],
    rows: Float[Array, "seq time kv_head head_dim"],
    page_table: Int[Array, "seq max_pages"],
    positions: Int[Array, "seq time"],
    is_valid: Bool[Array, "seq time"],
    *,
    page_offset: Int[Array, ""] | int,
    num_pages: int,
) -> Float[Array, "page kv_head slot head_dim"]:
    """Write `rows` at `positions` of their sequences and return the pool.

    Rows that are not valid, lie past the page table, or whose page id is outside `[0, num_pages)` are dropped.

    Args:
        pool: pages of all layers; consumed where the caller donates it.
        rows: the new keys or values; cast to the pool's dtype.
        page_table: logical page of a sequence -> page of its layer.
        positions: token index in its sequence, for each row.
        is_valid: False for padding.
        page_offset: the pool's page that is page 0 of this layer.
        num_pages: pages that one layer owns.
    """
    total_pages, num_kv_heads, page_size, head_dim = pool.shape
    logical = positions // page_size
    in_table = is_valid & (positions >= 0) & (logical < page_table.shape[1])
    pages = jnp.take_along_axis(page_table, jnp.where(in_table, logical, 0), axis=1)
    is_kept = in_table & (pages >= 0) & (pages < num_pages)
    slots = positions % page_size
    rows = rows.astype(pool.dtype)
    if rows.shape[:2] == (1, 1):
        start = (pages[0, 0] + page_offset, 0, slots[0, 0], 0)
        start = tuple(jnp.where(is_kept[0, 0], index, 0) for index in start)
        row = rows[0, 0][None, :, None, :]
        old = jax.lax.dynamic_slice(pool, start, row.shape)
        return jax.lax.dynamic_update_slice(pool, jnp.where(is_kept[0, 0], row, old), start)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    index = ((pages + page_offset)[..., None] * num_kv_heads + heads[None, None]) * page_size + slots[..., None]
    # Past the whole pool, so that `mode="drop"` sees it (a negative index would wrap), and each its own index.
    past = total_pages * num_kv_heads * page_size + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    index = jnp.where(is_kept[..., None], index, past)
    flat = pool.reshape(-1, head_dim)
    flat = flat.at[index.reshape(-1)].set(rows.reshape(-1, head_dim), mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)
