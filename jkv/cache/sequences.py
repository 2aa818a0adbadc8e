"""Functions from cache to cache that move whole sequences: clear, select, fork, copy pages.

Know pages and tables; nothing of what a page holds. Page ids and rows are those of a shard of sequences, and
no sequence leaves its shard: on a mesh `rows` counts from the shard's first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jkv.cache.cache import Cache, Pool, cache_axes, check_shards
from jkv.cache.checks import check_integers
from jkv.sharding import Sharding


def clear(cache: Cache, is_cleared: Bool[Array, " seq"]) -> Cache:
    """Return the cache with the marked sequences empty; their tables still name the same pages.

    Raises:
        ValueError: `is_cleared` is not one boolean a sequence.
    """
    check_integers("is_cleared", [is_cleared], [cache.lengths.shape], np.bool_)
    counts = (cache.lengths, cache.peaks, cache.num_dropped)
    lengths, peaks, num_dropped = (jnp.where(is_cleared, 0, count) for count in counts)
    return cache.replace(lengths=lengths, peaks=peaks, num_dropped=num_dropped)


def select(cache: Cache, rows: Int[Array, " seq"], *, sharding: Sharding | None = None) -> Cache:
    """Return the cache in which sequence `i` holds what sequence `rows[i]` held, copied into its own pages.

    Any row may be named more than once: the beams of a search, or one prompt for all. Every sequence needs as
    many pages of its own as the one that it copies, and no page may be shared; a dense cache has them.

    Args:
        cache: consumed where the caller donates it. One layer of it is copied at a time.
        rows: in `[0, seq)`; a sequence of another row is empty.
        sharding: that of the cache.

    Raises:
        ValueError: `rows` is not one integer a sequence, or the cache has other shards than the sharding.
    """
    check_integers("rows", [rows], [cache.lengths.shape])

    def local(cache: Cache, stripe: Any, rows: Int[Array, " seq"]) -> Cache:
        pools = tuple(
            _copy(pool, _of_stripe(cache, stripe, pool.page_table[rows]), pool.page_table)
            for pool in cache.pools
        )
        return _with_rows(cache.replace(pools=pools), cache, rows)

    return _on_shards(local, cache, sharding, rows)


def fork(
    cache: Cache,
    rows: Int[Array, " seq"],
    pages: Sequence[Int[Array, "seq _"]],
    *,
    sharding: Sharding | None = None,
) -> Cache:
    """Return the cache in which sequence `i` continues sequence `rows[i]`, whole pages shared between them.

    The page that a sequence will write next is copied if it is partly filled; a window's pages all are, since
    all of them will be written. A sequence with `rows[i] == i` stays as it is.

    Args:
        cache: consumed where the caller donates it.
        rows: in `[0, seq)`; a sequence of another row is empty.
        pages: for each group the pages that each sequence copies to: one, or for a window as many as its
            table is wide. -1 where there is nothing to copy. A page that is needed and not given is left out
            of the table, so that the next write is refused. Of several stripes, in that of the page copied.
        sharding: that of the cache.

    Raises:
        ValueError: `rows` or `pages` do not have these shapes or are no integers, or the cache has other
            shards than the sharding.
    """
    num_seqs = cache.lengths.shape[0]
    widths = [
        pool.page_table.shape[1] if cache.is_ring(index) else 1 for index, pool in enumerate(cache.pools)
    ]
    check_integers("rows", [rows], [(num_seqs,)])
    check_integers("pages", pages, [(num_seqs, width) for width in widths])
    return _on_shards(_fork, cache, sharding, rows, *pages)


def _fork(cache: Cache, stripe: Any, rows: Int[Array, " seq"], *pages: Int[Array, "seq _"]) -> Cache:
    num_seqs = cache.lengths.shape[0]
    is_moved = rows != jnp.arange(num_seqs, dtype=rows.dtype)
    page_size = cache.spec.page_size
    pools = []
    for index, (pool, target) in enumerate(zip(cache.pools, pages, strict=True)):
        table = pool.page_table[rows]
        columns = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        is_copied = jnp.ones(table.shape, bool)
        if not cache.is_ring(index):
            lengths = _of_rows(cache.lengths, rows)[:, None]
            is_partial = jax.lax.rem(lengths, jnp.int32(page_size)) > 0
            is_copied = is_partial & (columns == jax.lax.div(lengths, jnp.int32(page_size)))
            # Past what it continues, a sequence owns nothing.
            table = jnp.where(columns * page_size < lengths, table, -1)
        is_copied &= is_moved[:, None]
        forked = jnp.where(is_copied, jnp.asarray(target, jnp.int32), table)
        sources = _of_stripe(cache, stripe, jnp.where(is_copied, table, -1))
        pool = _copy(pool, sources, jnp.where(is_copied, forked, -1))
        pools.append(pool.replace(page_table=jnp.where(is_moved[:, None], forked, pool.page_table)))
    return _with_rows(cache.replace(pools=tuple(pools)), cache, rows)


def copy_pages(
    cache: Cache,
    sources: Sequence[Int[Array, "_"]],
    targets: Sequence[Int[Array, "_"]],
    *,
    sharding: Sharding | None = None,
) -> Cache:
    """Return the cache with pages copied in every layer, as the books of a copy-on-write say.

    Args:
        cache: consumed where the caller donates it; its tables are left to `Cache.assign`.
        sources: pages of each group; -1, as any that is none of the pool's, copies none. On a mesh those of
            each shard of pages, as many of each, one after another: shards of sequences first, of each its
            stripes.
        targets: where each goes, all different.
        sharding: that of the cache.

    Raises:
        ValueError: there is not one array a group, a source has no target, pages are no integers, or the
            cache has other shards than the sharding.
    """
    if len(sources) != len(cache.pools):
        raise ValueError(f"pages are copied in each group, got {len(sources)} for {len(cache.pools)}")
    check_integers("sources", sources, [np.shape(source) for source in sources])
    check_integers("targets", targets, [source.shape for source in sources])

    def local(cache: Cache, stripe: Any, *pages: Int[Array, "_"]) -> Cache:
        triples = zip(cache.pools, pages[: len(sources)], pages[len(sources) :], strict=True)
        return cache.replace(pools=tuple(_copy(*triple) for triple in triples))

    return _on_shards(local, cache, sharding, *sources, *targets, first=("page", "context"))


def _on_shards(
    local: Callable[..., Cache],
    cache: Cache,
    sharding: Sharding | None,
    *arrays: Array,
    first: str | tuple[str, ...] = "seq",
) -> Cache:
    """Call `local(cache, stripe, *arrays)` with what each shard has of the cache and of the arrays."""
    check_shards(cache, sharding)
    if sharding is None:
        return local(cache, 0, *arrays)
    places = cache_axes(cache, sharding.spec)
    return jax.shard_map(
        lambda cache, *arrays: local(cache, sharding.index("context"), *arrays),
        mesh=sharding.mesh,
        in_specs=(places, *[sharding.spec(first, *[None] * (array.ndim - 1)) for array in arrays]),
        out_specs=places,
        check_vma=False,
    )(cache, *arrays)


def _of_stripe(cache: Cache, stripe: Any, table: Int[Array, "seq max_pages"]) -> Int[Array, "seq max_pages"]:
    """Return a table in which only the pages of a stripe are named."""
    columns = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    return jnp.where(columns % cache.spec.num_stripes == stripe, table, -1)


def _with_rows(cache: Cache, old: Cache, rows: Int[Array, " seq"]) -> Cache:
    """Take what sequences have beside their pages from the rows that they continue."""
    counts = {name: _of_rows(getattr(old, name), rows) for name in ("lengths", "peaks", "num_dropped")}

    def recent(pool: Pool) -> jax.Array | None:
        if pool.recent is None:
            return None
        by_layer = pool.recent.reshape(-1, rows.shape[0], *pool.recent.shape[1:])
        return by_layer[:, rows].reshape(pool.recent.shape)

    return cache.replace(pools=tuple(pool.replace(recent=recent(pool)) for pool in cache.pools), **counts)


def _of_rows(counts: Int[Array, " seq"], rows: Int[Array, " seq"]) -> Int[Array, " seq"]:
    """Return each sequence's count in the row that it continues; 0 where there is no such row."""
    is_row = (rows >= 0) & (rows < rows.shape[0])
    return jnp.where(is_row, counts[rows], 0)


def _copy(pool: Pool, sources: Int[Array, "*pair"], targets: Int[Array, "*pair"]) -> Pool:
    """Copy pages within every layer, all of a layer read before any is written; -1 copies none."""
    sources, targets = sources.reshape(-1), targets.reshape(-1)
    is_kept = (sources >= 0) & (sources < pool.num_pages) & (targets >= 0) & (targets < pool.num_pages)
    sources = jnp.where(is_kept, sources, 0)
    total_pages = pool.keys.data.shape[0]

    def copy_layer(layer: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        offset = layer * pool.num_pages
        # Past the whole pool, so that `mode="drop"` sees it.
        places = jnp.where(is_kept, targets + offset, total_pages)
        return tuple(array.at[places].set(array[sources + offset], mode="drop") for array in arrays)

    leaves, tree = jax.tree.flatten((pool.keys, pool.values))
    leaves = jax.lax.fori_loop(0, total_pages // pool.num_pages, copy_layer, tuple(leaves))
    keys, values = jax.tree.unflatten(tree, leaves)
    return pool.replace(keys=keys, values=values)
