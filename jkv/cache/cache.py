"""The KV cache: an immutable value of page pools, a page table and lengths.

Knows nothing of attention: it gives new tokens their places and says what did not fit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.batch import Outputs, TokenBatch
from jkv.cache.checks import Scales, check_counted, check_integers, check_mesh, check_scales
from jkv.cache.encoding import Stored
from jkv.cache.spec import CacheGroup, CacheSpec, is_whole
from jkv.pytree import State, pytree, static
from jkv.sharding import Sharding


@pytree
class Pool(State):
    """Pages of one cache group, all its layers in one array, and the table that names them.

    Layer `i` owns pages `[i * num_pages, (i + 1) * num_pages)` of each shard. Page `p` of a sequence is named
    in column `p` of the table, modulo its width: a window's table is as wide as the pages that it keeps. Its
    width is a multiple of the stripes, so that page and column are of one stripe, whose shard has the page.

    Attributes:
        keys: arrays whose leading axes are page and KV head; how slots lie in a page is the layout's.
        values: the same of values.
        page_table: pages of each sequence, in `[0, num_pages)`; another number names none.
        key_scale: calibrated scales of keys, where their codec is static.
        value_scale: those of values.
        recent: each sequence's latest keys as they were given, row `i * seq + r` those of sequence `r` in
            layer `i`, where keys are encoded in runs of slots; see `jkv.cache.runs`.
        num_pages: pages that one layer owns in a shard.
    """

    keys: Stored
    values: Stored
    page_table: Int[Array, "seq max_pages"]
    key_scale: Float[Array, "layer kv_head"] | None
    value_scale: Float[Array, "layer kv_head"] | None
    recent: Float[Array, "layer_seq kv_head recent head_dim"] | None
    num_pages: int = static()


@pytree
class Cache(State):
    """The whole state of a batch of sequences: pools, table and lengths.

    Attributes:
        pools: one for each group of `spec`.
        lengths: tokens written to each sequence.
        peaks: the most tokens that each sequence has held; a window has overwritten what lies too far behind.
        num_dropped: tokens that were refused because they did not fit, since the cache was made.
        spec: sizes and codecs.
        capacity: tokens that a sequence may hold.
    """

    pools: tuple[Pool, ...]
    lengths: Int[Array, " seq"]
    peaks: Int[Array, " seq"]
    num_dropped: Int[Array, " seq"]
    spec: CacheSpec = static()
    capacity: int = static()

    @classmethod
    def dense(
        cls,
        spec: CacheSpec,
        *,
        num_sequences: int,
        capacity: int,
        scales: Scales | None = None,
        sharding: Sharding | None = None,
    ) -> "Cache":
        """Return an empty cache in which every sequence owns consecutive pages for `capacity` tokens.

        Args:
            spec: sizes and codecs.
            num_sequences: rows of the batch.
            capacity: tokens that a sequence may hold; storage is rounded up to whole pages.
            scales: for each group the scales of keys and values, where their codec is static.
            sharding: where the arrays are born; nothing is ever materialized whole.

        Raises:
            ValueError: a size is not positive or past what 32 bits count, scales are missing or not
                positive, or the mesh does not divide it.
        """
        if not is_whole(num_sequences, capacity, at_least=1):
            raise ValueError(
                f"a dense cache needs at least one sequence and one token, got {num_sequences} and {capacity}"
            )
        check_mesh(spec, num_sequences, sharding)
        rows = num_sequences // (sharding.size("seq") if sharding else 1)
        pages = [rows * spec.stripe_pages(capacity, index) for index in range(len(spec.groups))]
        check_counted(spec, capacity, pages)
        make = _maker(spec, num_sequences, capacity, None, sharding)
        return make(check_scales(spec, scales))

    @classmethod
    def paged(
        cls,
        spec: CacheSpec,
        *,
        num_sequences: int,
        capacity: int,
        num_pages: Sequence[int],
        scales: Scales | None = None,
        sharding: Sharding | None = None,
    ) -> "Cache":
        """Return an empty cache whose sequences own no page yet; see `assign`.

        Args:
            spec: sizes and codecs.
            num_sequences: rows of the batch.
            capacity: tokens that a sequence may hold; the width of the tables follows from it.
            num_pages: pages of each group, that all sequences share; on a mesh, those of each shard of the
                sequences and of their stripes.
            scales: as `dense`.
            sharding: as `dense`.

        Raises:
            ValueError: as `dense`.
        """
        if not isinstance(num_pages, Sequence):
            raise ValueError(f"num_pages must be a list with one entry a group, got {num_pages}")
        if not is_whole(num_sequences, capacity, *num_pages, at_least=1):
            raise ValueError(
                "a paged cache needs at least one sequence, one token and one page, "
                f"got {num_sequences}, {capacity} and {tuple(num_pages)}"
            )
        if len(num_pages) != len(spec.groups):
            raise ValueError(
                f"num_pages must have one entry a group, got {len(num_pages)} for {len(spec.groups)}"
            )
        check_mesh(spec, num_sequences, sharding)
        check_counted(spec, capacity, num_pages)
        make = _maker(spec, num_sequences, capacity, tuple(num_pages), sharding)
        return make(check_scales(spec, scales))

    def assign(self, tables: Sequence[Int[Array, "seq _"]]) -> "Cache":
        """Return the cache with other page tables, one a group; -1 is no page.

        Raises:
            ValueError: a table's shape is not that of the one it replaces, or it holds no integers.
        """
        check_integers("page tables", tables, [pool.page_table.shape for pool in self.pools])
        pairs = zip(self.pools, tables, strict=True)
        return self.replace(
            pools=tuple(pool.replace(page_table=jnp.asarray(table, jnp.int32)) for pool, table in pairs)
        )

    def begin(
        self, lens: Int[Array, " seq"], *, time: int, outputs: Outputs = "last"
    ) -> tuple["Cache", TokenBatch]:
        """Open a step that adds `lens` tokens to each sequence, and return the advanced cache and the batch.

        A row whose tokens do not all fit, in `time`, in its capacity and in the pages that its tables name,
        is refused whole: it adds nothing, and `num_dropped` counts it.

        Args:
            lens: new tokens of each sequence; negative counts as 0.
            time: width that the step's rows are padded to.
            outputs: see `TokenBatch`.

        Raises:
            ValueError: `time` is none, or more than the `max_chunk` that the windows keep room for, `lens` is
                not one integer a sequence, or `outputs` is unknown.
        """
        self._check_step("time", time, lens, outputs)
        if time > self.spec.max_chunk and any(self.is_ring(group) for group in range(len(self.pools))):
            raise ValueError(
                f"a step must have at most max_chunk = {self.spec.max_chunk} tokens a sequence where a group "
                f"has a window, got {time}"
            )
        lens = jnp.maximum(lens, 0)
        steps = jnp.arange(time, dtype=jnp.int32)[None]
        accepted = jnp.where((lens <= time) & self._has_room(lens), lens, 0)
        return self._opened(
            lens,
            accepted,
            positions=self.lengths[:, None] + steps,
            is_valid=steps < accepted[:, None],
            outputs=outputs,
        )

    def begin_ragged(
        self, lens: Int[Array, " seq"], *, num_tokens: int, outputs: Outputs = "last"
    ) -> tuple["Cache", TokenBatch]:
        """Open a step whose tokens stand in one row, sequence after sequence, and padding at its end.

        A sequence is refused as by `begin`; its tokens stay where they are, as padding.

        Args:
            lens: new tokens of each sequence; negative counts as 0.
            num_tokens: width that the row is padded to.
            outputs: see `TokenBatch`.

        Raises:
            ValueError: `num_tokens` is none, `lens` is not one integer a sequence, or `outputs` is unknown.
        """
        self._check_step("num_tokens", num_tokens, lens, outputs)
        lens = jnp.maximum(lens, 0)
        # What cannot fit is not counted further: a sum of it might overflow.
        counts = jnp.minimum(lens, num_tokens + 1)
        ends = jnp.cumsum(counts)
        is_fitting = (ends <= num_tokens) & self._has_room(counts)
        if any(self.is_ring(group) for group in range(len(self.pools))):
            is_fitting &= lens <= self.spec.max_chunk
        accepted = jnp.where(is_fitting, lens, 0)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        sequences = jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)
        is_valid = tokens < ends[-1]
        sequences = jnp.minimum(sequences, lens.shape[0] - 1)
        offsets = ends - counts
        return self._opened(
            lens,
            accepted,
            positions=(self.lengths[sequences] + tokens - offsets[sequences])[None],
            is_valid=(is_valid & (accepted[sequences] > 0))[None],
            sequences=sequences[None],
            offsets=offsets,
            outputs=outputs,
        )

    def _check_step(self, name: str, width: int, lens: Any, outputs: Outputs) -> None:
        if not is_whole(width, at_least=1):
            raise ValueError(f"{name} must be whole and at least 1, got {width}")
        check_integers("lens", [lens], [self.lengths.shape])
        if outputs not in get_args(Outputs):
            raise ValueError(f"outputs must be one of {get_args(Outputs)}, got {outputs!r}")

    def _has_room(self, lens: Int[Array, " seq"]) -> Bool[Array, " seq"]:
        """Whether each sequence's new tokens fit in its capacity and in the pages that its tables name."""
        ends = self.lengths + lens
        is_fitting = ends <= self.capacity
        for group in range(len(self.pools)):
            is_fitting &= ends <= self._room(group)
        return is_fitting

    def _opened(
        self, lens: Int[Array, " seq"], accepted: Int[Array, " seq"], **fields: Any
    ) -> tuple["Cache", TokenBatch]:
        """Return the advanced cache and the batch of these fields."""
        places = (fields.get("sequences"), fields["positions"], fields["is_valid"], self.spec.page_size)
        slots = tuple(_slots(pool, *places) for pool in self.pools)
        batch = TokenBatch(starts=self.lengths, lens=accepted, slots=slots, **fields)
        # Computed once: XLA's CPU backend would repeat this arithmetic inside every layer's fusions.
        batch = jax.lax.optimization_barrier(batch)
        ends = self.lengths + accepted
        num_dropped = self.num_dropped + lens - accepted
        return self.replace(lengths=ends, peaks=jnp.maximum(self.peaks, ends), num_dropped=num_dropped), batch

    def truncate(self, lengths: Int[Array, " seq"]) -> "Cache":
        """Return the cache with each sequence cut to at most `lengths` tokens; negative counts as 0.

        A sequence is left as it is where a window has overwritten what the shorter one would see, or where
        its end lies within a run of slots whose keys are no longer kept as they were given.

        Raises:
            ValueError: `lengths` is not one integer a sequence.
        """
        check_integers("lengths", [lengths], [self.lengths.shape])
        shorter = jnp.minimum(self.lengths, jnp.maximum(lengths, 0))
        can_cut = jnp.ones_like(shorter, bool)
        for index, (pool, group) in enumerate(zip(self.pools, self.spec.groups, strict=True)):
            if pool.recent is not None:
                num_recent = pool.recent.shape[2]
                past_run = shorter % (num_recent // 2)
                can_cut &= (past_run == 0) | (shorter - past_run >= self.peaks - num_recent)
            if self.is_ring(index):
                assert group.window is not None
                oldest = self.peaks - pool.page_table.shape[1] * self.spec.page_size
                can_cut &= jnp.maximum(shorter - group.window + 1, 0) >= oldest
        is_empty = shorter == 0
        lengths = jnp.where(can_cut | is_empty, shorter, self.lengths)
        # Of a sequence that starts anew nothing is overwritten.
        return self.replace(lengths=lengths, peaks=jnp.where(is_empty, 0, self.peaks))

    def is_ring(self, group: int) -> bool:
        """Whether a group's tables name fewer slots than a sequence may hold, and so are used in turn."""
        width = self.pools[group].page_table.shape[1]
        return self.spec.groups[group].window is not None and width * self.spec.page_size < self.capacity

    def _room(self, group: int) -> Int[Array, " seq"]:
        """Return the tokens that the pages of each sequence's table have room for."""
        pool = self.pools[group]
        is_page = (pool.page_table >= 0) & (pool.page_table < pool.num_pages)
        columns = jnp.arange(is_page.shape[1], dtype=jnp.int32)[None]
        num_leading = jnp.min(jnp.where(is_page, is_page.shape[1], columns), axis=1)
        room = num_leading * self.spec.page_size
        if self.is_ring(group):
            return jnp.where(num_leading == is_page.shape[1], self.capacity, room)
        return room


def cache_axes(cache: Cache, place: Callable[..., Any]) -> Any:
    """Return a cache-shaped tree of what `place`, of a `Sharding`, makes of each array's logical axes."""
    rows = place("seq")
    pairs = zip(cache.pools, cache.spec.groups, strict=True)
    pools = tuple(pool_axes(pool, group, place) for pool, group in pairs)
    return cache.replace(pools=pools, lengths=rows, peaks=rows, num_dropped=rows)


def pool_axes(pool: Pool, group: CacheGroup, place: Callable[..., Any]) -> Any:
    """Return a pool-shaped tree of what `place` makes of each array's logical axes.

    Pages go with their sequences and stripes, heads over their axis; a stripe has the tables of all.
    """
    heads = group.head_axis

    def split(first: Any) -> Callable[[Any], Any]:
        return lambda array: place(first, heads, *[None] * (array.ndim - 2))

    return pool.replace(
        keys=jax.tree.map(split(("page", "context")), pool.keys),
        values=jax.tree.map(split(("page", "context")), pool.values),
        recent=jax.tree.map(split("seq"), pool.recent),
        page_table=place("seq", None),
        key_scale=jax.tree.map(split(None), pool.key_scale),
        value_scale=jax.tree.map(split(None), pool.value_scale),
    )


def check_shards(cache: Cache, sharding: Sharding | None) -> None:
    """Refuse pools of other shards than the sharding's, in which a page id names another page.

    Raises:
        ValueError: says how many shards there are, and how many are asked for.
    """
    asked = sharding.size("seq") * sharding.size("context") if sharding else 1
    for group, pool in zip(cache.spec.groups, cache.pools, strict=True):
        num_shards = pool.keys.data.shape[0] // (group.num_layers * pool.num_pages)
        if num_shards != asked:
            raise ValueError(
                f"page ids are those of a shard, got a cache of {num_shards} shards in a call of {asked};"
                " give the sharding that it was made with, or call this inside shard_map without one"
            )
    if sharding is None and cache.spec.num_stripes > 1:
        raise ValueError(
            f"each device has one of {cache.spec.num_stripes} stripes of a sequence's pages; give the "
            "sharding that the cache was made with, outside shard_map"
        )


def _slots(
    pool: Pool,
    sequences: Int[Array, "row time"] | None,
    positions: Int[Array, "row time"],
    is_valid: Bool[Array, "row time"],
    page_size: int,
) -> Int[Array, "row time"]:
    """Return each token's place among a layer's pages, -1 where it has none."""
    width = jnp.int32(pool.page_table.shape[1])
    column = jax.lax.rem(jax.lax.div(positions, jnp.int32(page_size)), width)
    if sequences is None:
        pages = jnp.take_along_axis(pool.page_table, column, axis=1)
    else:
        pages = pool.page_table.at[sequences, column].get(mode="promise_in_bounds")
    return jnp.where(is_valid, pages * page_size + jax.lax.rem(positions, jnp.int32(page_size)), -1)


@functools.lru_cache(maxsize=64)
def _maker(
    spec: CacheSpec,
    num_sequences: int,
    capacity: int,
    num_pages: tuple[int, ...] | None,
    sharding: Sharding | None,
) -> Callable[[Scales], Cache]:
    """Return the program that makes an empty cache where it lives, compiled once for each form."""
    make = functools.partial(_empty, spec, num_sequences, capacity, num_pages, sharding)
    placement = None
    if sharding is not None:
        shapes = [
            tuple(
                jax.ShapeDtypeStruct((group.num_layers, group.num_kv_heads), jnp.float32)
                if codec.scaling == "static"
                else None
                for codec in group.codecs
            )
            for group in spec.groups
        ]
        placement = cache_axes(jax.eval_shape(make, shapes), sharding.named)
    return jax.jit(make, out_shardings=placement)


def _empty(
    spec: CacheSpec,
    num_sequences: int,
    capacity: int,
    num_pages: tuple[int, ...] | None,
    sharding: Sharding | None,
    scales: Scales,
) -> Cache:
    """Make an empty cache; without `num_pages` every sequence owns its pages."""
    num_shards = sharding.size("seq") if sharding else 1
    rows = num_sequences // num_shards
    pools = []
    for index, (group, (key_scale, value_scale)) in enumerate(zip(spec.groups, scales, strict=True)):
        width = spec.table_width(capacity, index)
        if num_pages is None:
            pages = rows * spec.stripe_pages(capacity, index)
            table = jnp.arange(pages, dtype=jnp.int32).reshape(rows, -1)
            table = jnp.tile(jnp.repeat(table, spec.num_stripes, axis=1), (num_shards, 1))
        else:
            pages = num_pages[index]
            table = jnp.full((num_sequences, width), -1, jnp.int32)
        keys, values = _empty_pages(spec, group, num_shards * spec.num_stripes * pages)
        recent = group.recent_keys(num_sequences, spec.page_size)
        pools.append(
            Pool(
                keys=keys,
                values=values,
                page_table=table,
                # Copied: a donated cache must not take the caller's arrays with it.
                key_scale=jax.tree.map(jnp.copy, key_scale),
                value_scale=jax.tree.map(jnp.copy, value_scale),
                recent=None if recent is None else jnp.zeros(recent.shape, recent.dtype),
                num_pages=pages,
            )
        )
    counts = functools.partial(jnp.zeros, num_sequences, jnp.int32)
    return Cache(
        pools=tuple(pools),
        lengths=counts(),
        peaks=counts(),
        num_dropped=counts(),
        spec=spec,
        capacity=capacity,
    )


def _empty_pages(spec: CacheSpec, group: CacheGroup, num_pages: int) -> tuple[Stored, Stored]:
    keys, values = (
        Stored(**{name: jnp.zeros(array.shape, array.dtype) for name, array in arrays.items()})
        for arrays in group.page_arrays(num_pages, spec.page_size, spec.layout)
    )
    return keys, values
