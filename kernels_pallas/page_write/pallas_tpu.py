"""Page writes on TPUs, in place: windows of pages come in, are written into, and go back.

A window is whole tiles of rows, of all heads: a copy takes no less. What is to be written is put in the order
of its windows, so that each is fetched once and no two copies in flight touch the same. Entries are put into
32-bit words, in which a shift finds their place, so that every dtype is written bit for bit.

Grid: blocks of entries, in order. VMEM: a block's entries, and windows on their way. SMEM: where each goes.
Limits: `refusal`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Num

from kernels_pallas.slots import slot_lanes, windows_of

_LANES, _WORD_BYTES = 128, 4
# Words of a tile, one below another.
_TILE_WORDS = 8
# Bytes of a block's entries and of the windows on their way: a v6e's HBM moves 1.6 MB while a copy begins and
# ends, in about 1 us.
_BLOCK_BYTES, _WINDOW_BYTES = 2**20, 2**21
# Of one window, whose words the kernel works on at once: a tile of 128 heads.
_MAX_WINDOW_BYTES = 2**19
# Entries of a block at most, and windows on their way.
_MAX_BLOCK, _MAX_WINDOWS = 256, 32
# Half of a v7x core's VMEM.
_VMEM_BYTES = 2**25
# Past every window: of what has no place.
_NOWHERE = 2**31 - 1
# Rows of a plan: of each entry in the order of windows its window, its place in the block, and its row and
# lane in the window as one number; of each window its first entry.
_WINDOW, _ITEM, _PLACE, _FIRST = range(4)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a call.

    Attributes:
        window: shape of a window, `[kv_head, row, 128]`, or `[kv_head, 128]` where a page is a single row.
        windows_per_page: one below another.
        dtype: of the pool.
        width: lanes of an entry.
        num_heads: of an entry.
        block: entries of a step of the grid.
        num_buffers: windows on their way.
    """

    window: tuple[int, ...]
    windows_per_page: int
    dtype: Any
    width: int
    num_heads: int
    block: int
    num_buffers: int

    @property
    def window_rows(self) -> int:
        """Rows of a window, of each head."""
        return self.window[1] if len(self.window) == 3 else 1

    @property
    def share(self) -> int:
        """Entries of a word, one below another."""
        return _WORD_BYTES // self.dtype.itemsize


def refusal(pool: Any, rows: Any) -> str | None:
    """Return why the kernel does not write rows into a pool, in one sentence; None where it does."""
    if pool.shape[-1] != _LANES:
        return f"pages must lie in rows of {_LANES} lanes, got {pool.shape[-1]}; use the pool layout 'tpu'"
    if rows.ndim > 4:
        return f"slots must be written one by one, got runs of {rows.shape[3]}; use 'xla'"
    itemsize = pool.dtype.itemsize
    if itemsize not in (1, 2, 4) or (pool.ndim == 3 and itemsize != _WORD_BYTES):
        return f"entries must have 8, 16 or 32 bits, numbers 32, got {pool.dtype} in {pool.ndim} axes"
    sizes = _sizes_of(pool, rows, num_items=1)
    if sizes.window_rows * itemsize % _WORD_BYTES:
        return f"the rows of a page must fill words of 32 bits, got {pool.shape[2]} rows of {pool.dtype}"
    window_bytes = math.prod(sizes.window) * itemsize
    if window_bytes > _MAX_WINDOW_BYTES:
        return (
            f"a window of a page must take at most {_MAX_WINDOW_BYTES:,} bytes, got {window_bytes:,} for "
            f"{sizes.window_rows} rows of {sizes.num_heads} KV heads; use pages of a multiple of "
            f"{_TILE_WORDS * sizes.share} rows"
        )
    return None


def write_pages(
    pool: Num[Array, "page kv_head *row lane"],
    rows: Num[Array, "seq time kv_head *entry"],
    slots: Int[Array, "seq time"],
    *,
    page_offset: Int[Array, ""] | int,
    page_size: int,
) -> Num[Array, "page kv_head *row lane"]:
    """Do what `xla.write_pages` does.

    Raises:
        ValueError: the kernel does not take the call; see `refusal`.
    """
    if (why := refusal(pool, rows)) is not None:
        raise ValueError(f"page writes on TPUs cannot run: {why}")
    is_kept = slots >= 0
    places = jnp.where(is_kept, slots, 0)
    pages, within = jax.lax.div(places, jnp.int32(page_size)), jax.lax.rem(places, jnp.int32(page_size))
    cut = windows_of(rows.astype(pool.dtype), within, page_size=page_size, num_lanes=_LANES)
    sizes = _sizes_of(pool, rows, num_items=cut.row.size)
    window = pages[..., None] * sizes.windows_per_page + jax.lax.div(cut.row, jnp.int32(sizes.window_rows))
    window = jnp.where(is_kept[..., None], window, _NOWHERE)
    place = jax.lax.rem(cut.row, jnp.int32(sizes.window_rows)) * _LANES + cut.lane
    plan = _plan_of(_in_blocks(window.reshape(-1), sizes, _NOWHERE), _in_blocks(place.reshape(-1), sizes, 0))
    page_offset = jnp.asarray(page_offset, jnp.int32)
    return _call(pool, sizes, plan.shape[0])(
        page_offset[None],
        _num_windows(plan, pool.shape[0] - page_offset, sizes),
        plan,
        _in_blocks(_words_of(cut.rows), sizes, 0).reshape(-1, sizes.num_heads, _LANES),
        pool,
    )


def _sizes_of(pool: Any, rows: Any, *, num_items: int) -> _Sizes:
    num_heads, page_rows = pool.shape[1], pool.shape[2]
    tile_rows = _TILE_WORDS * _WORD_BYTES // pool.dtype.itemsize
    window, windows_per_page = pool.shape[1:], 1
    if pool.ndim == 4 and page_rows % tile_rows == 0:
        window, windows_per_page = (num_heads, tile_rows, _LANES), page_rows // tile_rows
    width = 1 if rows.ndim == 3 else min(_LANES, slot_lanes(rows.shape[3], _LANES))
    block = max(8, min(_MAX_BLOCK, _BLOCK_BYTES // _item_bytes(num_heads)))
    window_bytes = math.prod(window) * pool.dtype.itemsize
    return _Sizes(
        window=window,
        windows_per_page=windows_per_page,
        dtype=jnp.dtype(pool.dtype),
        width=width,
        num_heads=num_heads,
        block=min(block, num_items),
        num_buffers=max(2, min(_MAX_WINDOWS, _WINDOW_BYTES // window_bytes)),
    )


def _item_bytes(num_heads: int) -> int:
    """Return the bytes of an entry of all heads in VMEM, where 8 words stand below one another."""
    return -(-num_heads // _TILE_WORDS) * _TILE_WORDS * _LANES * _WORD_BYTES


def _in_blocks(items: Array, sizes: _Sizes, fill: int) -> Array:
    """Return `[step, item, ...]`, filled up to whole blocks."""
    num_steps = -(-items.shape[0] // sizes.block)
    padding = [(0, num_steps * sizes.block - items.shape[0])] + [(0, 0)] * (items.ndim - 1)
    return jnp.pad(items, padding, constant_values=fill).reshape(num_steps, sizes.block, *items.shape[1:])


def _plan_of(
    window: Int[Array, "step item"], place: Int[Array, "step item"]
) -> Int[Array, "step 4 one_more"]:
    """Return the plan of each block. It depends on no layer, so that a loop over layers makes it once."""
    num_items = window.shape[1]
    item = jax.lax.broadcasted_iota(jnp.int32, window.shape, 1)
    window, item, place = jax.lax.sort((window, item, place), dimension=1, num_keys=1)
    # The windows before an entry's own.
    rank = jnp.cumsum(_is_first(window), axis=1, dtype=jnp.int32) - 1
    first = jnp.sum(rank[:, None] < jnp.arange(num_items + 1, dtype=jnp.int32)[None, :, None], axis=2)
    padded = [jnp.pad(each, ((0, 0), (0, 1)), constant_values=0) for each in (window, item, place)]
    return jnp.stack([*padded, first.astype(jnp.int32)], axis=1)


def _is_first(window: Int[Array, "step item"]) -> Array:
    """Return whether an entry's window is another than that of the entry before."""
    before = jnp.pad(window[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return window != before


def _num_windows(
    plan: Int[Array, "step 4 one_more"], num_pages: Int[Array, ""], sizes: _Sizes
) -> Int[Array, " step"]:
    """Return how many windows of a plan there are: those before the end of the pool."""
    window = plan[:, _WINDOW, :-1]
    is_there = jax.lax.div(window, jnp.int32(sizes.windows_per_page)) < num_pages
    return jnp.sum(_is_first(window) & is_there & (window != _NOWHERE), axis=1, dtype=jnp.int32)


def _words_of(rows: Num[Array, "seq time kv_head part one width"]) -> Int[Array, "item kv_head 128"]:
    """Return entries in the low bits of words, repeated along the lanes."""
    rows = rows[..., 0, :].swapaxes(2, 3).reshape(-1, rows.shape[2], rows.shape[-1])
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}"))
    # A signed conversion of words would change nothing, but is refused where they do not fit.
    words = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.int32)
    return jnp.tile(words, (1, 1, _LANES // rows.shape[-1]))


def _call(pool: Array, sizes: _Sizes, num_steps: int) -> Any:
    """Return the call of the kernel on scalars, plan, entries and the pool, which it consumes."""
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_steps,),
            in_specs=[
                pl.BlockSpec((1, 4, sizes.block + 1), lambda step, *_: (step, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec((sizes.block, sizes.num_heads, _LANES), lambda step, *_: (step, 0, 0)),
                in_hbm,
            ],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((sizes.num_buffers, *sizes.window), pool.dtype),
                pltpu.SemaphoreType.DMA((2, sizes.num_buffers)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        name="jkv_page_write",
    )


def _kernel(
    offset_ref,  # int32 [1]                        SMEM, prefetched
    counts_ref,  # int32 [step]                     SMEM, prefetched
    plan_ref,  # int32 [1, 4, item + 1]             SMEM
    rows_ref,  # int32 [item, kv_head, 128]         VMEM
    _,  # the pool, which is the output
    pool_ref,  # [page, kv_head, (row,) 128]        HBM
    windows_ref,  # [buffer, kv_head, (row,) 128]   VMEM
    semaphores,  # [in or out, buffer]
    *,
    sizes: _Sizes,
):
    """Write a block of entries."""
    num_windows, num_buffers = counts_ref[pl.program_id(0)], sizes.num_buffers
    num_ahead = num_buffers // 2

    def ends(index):
        """Return where a window lies in the pool and in VMEM, and its buffer."""
        window = plan_ref[0, _WINDOW, plan_ref[0, _FIRST, index]]
        place = pool_ref.at[offset_ref[0] + jax.lax.div(window, sizes.windows_per_page)]
        if sizes.windows_per_page > 1:
            row = jax.lax.rem(window, sizes.windows_per_page) * sizes.window_rows
            place = place.at[:, pl.ds(pl.multiple_of(row, sizes.window_rows), sizes.window_rows)]
        buffer = jax.lax.rem(index, num_buffers)
        return place, windows_ref.at[buffer], buffer

    def bring(index):
        place, held, buffer = ends(index)
        return pltpu.make_async_copy(place, held, semaphores.at[0, buffer])

    def take_back(index):
        place, held, buffer = ends(index)
        return pltpu.make_async_copy(held, place, semaphores.at[1, buffer])

    def put_item(index, words):
        """Return a window's words with an entry in its place."""
        place = plan_ref[0, _PLACE, index]
        row, begin = jax.lax.div(place, _LANES), jax.lax.rem(place, _LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, words.shape, words.ndim - 1)
        is_place = (lane >= begin) & (lane < begin + sizes.width)
        fresh = rows_ref[plan_ref[0, _ITEM, index]]
        if words.ndim == 3:
            word = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1)
            is_place &= word == jax.lax.div(row, sizes.share)
            fresh = fresh[:, None]
        if sizes.share > 1:
            shift = jax.lax.rem(row, sizes.share) * (32 // sizes.share)
            field = jax.lax.shift_left(jnp.int32(2 ** (32 // sizes.share) - 1), shift)
            fresh = (words & ~field) | jax.lax.shift_left(fresh, jnp.broadcast_to(shift, fresh.shape))
        return jnp.where(is_place, fresh, words)

    def write_window(index, carry):
        later = index + num_ahead

        @pl.when(later < num_windows)
        def _():
            pl.when(later >= num_buffers)(lambda: take_back(later - num_buffers).wait())
            bring(later).start()

        bring(index).wait()
        held = ends(index)[1]
        words = pltpu.bitcast(held[...], jnp.int32)
        first, end = plan_ref[0, _FIRST, index], plan_ref[0, _FIRST, index + 1]
        words = jax.lax.fori_loop(first, end, put_item, words)
        held[...] = pltpu.bitcast(words, sizes.dtype)
        take_back(index).start()
        return carry

    def bring_first(index, carry):
        bring(index).start()
        return carry

    def wait_last(index, carry):
        take_back(index).wait()
        return carry

    jax.lax.fori_loop(0, jnp.minimum(num_ahead, num_windows), bring_first, 0)
    jax.lax.fori_loop(0, num_windows, write_window, 0)
    jax.lax.fori_loop(jnp.maximum(num_windows - num_buffers, 0), num_windows, wait_last, 0)
