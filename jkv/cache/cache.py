"""The KV cache: an immutable value of page pools, a page table and lengths.

Knows nothing of attention: it gives new tokens their places and says what did not fit.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.spec import CacheSpec
from jkv.pytree import State, pytree, static
from jkv.sharding import Sharding

Outputs = Literal["last", "all"]
CODEC_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@pytree
class Pool(State):
    """Pages of one cache group, all its layers in one array, and the table that names them.

    Layer `i` owns pages `[i * num_pages, (i + 1) * num_pages)` of each shard.
    """

    keys: Float[Array, "page kv_head slot head_dim"]
    values: Float[Array, "page kv_head slot head_dim"]
    page_table: Int[Array, "seq max_pages"]
    num_pages: int = static()


@pytree
class TokenBatch(State):
    """The new tokens of one step, padded per sequence to `time`; made by `Cache.begin`.

    Attributes:
        starts: tokens that each sequence held before the step.
        lens: new tokens of each sequence; 0 for an idle or refused row.
        positions: place of each token in its sequence.
        is_valid: False for padding, which writes nothing and attends to nothing.
        slots: for each cache group, each token's place among its layer's pages, `page * page_size + slot`;
            -1 where it is not stored.
        outputs: the rows whose logits a model computes: each sequence's last new token, or all.
    """

    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    positions: Int[Array, "seq time"]
    is_valid: Bool[Array, "seq time"]
    slots: tuple[Int[Array, "seq time"], ...]
    outputs: Outputs = static(default="last")

    @property
    def last(self) -> Int[Array, " seq"]:
        """Index in `time` of each sequence's last new token; 0 for an idle row."""
        return jnp.maximum(self.lens - 1, 0)

    def select(self, x: Float[Array, "seq time *rest"]) -> Float[Array, "seq *time_rest"]:
        """Return what `outputs` asks for: `x` at each sequence's last new token, or all of `x`."""
        if self.outputs == "all":
            return x
        index = self.last.reshape(-1, *([1] * (x.ndim - 1)))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]


@pytree
class Cache(State):
    """The whole state of a batch of sequences: pools, table and lengths.

    Attributes:
        pools: one for each group of `spec`.
        lengths: tokens written to each sequence.
        num_dropped: tokens that were refused because they did not fit, since the cache was made.
        spec: sizes and codecs.
        capacity: tokens that a sequence may hold.
    """

    pools: tuple[Pool, ...]
    lengths: Int[Array, " seq"]
    num_dropped: Int[Array, " seq"]
    spec: CacheSpec = static()
    capacity: int = static()

    @classmethod
    def dense(
        cls, spec: CacheSpec, *, num_sequences: int, capacity: int, sharding: Sharding | None = None
    ) -> "Cache":
        """Return an empty cache in which every sequence owns consecutive pages for `capacity` tokens.

        Args:
            spec: sizes and codecs.
            num_sequences: rows of the batch.
            capacity: tokens that a sequence may hold; storage is rounded up to whole pages.
            sharding: where the arrays are born; nothing is ever materialized whole.

        Raises:
            ValueError: a size is not positive, or the mesh does not divide it.
        """
        if num_sequences < 1 or capacity < 1:
            raise ValueError(
                f"a dense cache needs at least one sequence and one token, got {num_sequences} and {capacity}"
            )
        if sharding is not None:
            sharding.check_divides("seq", num_sequences)
            for group in spec.groups:
                sharding.check_divides("kv_head", group.num_kv_heads)
        return _dense_maker(spec, num_sequences, capacity, sharding)()

    def begin(
        self, lens: Int[Array, " seq"], *, time: int, outputs: Outputs = "last"
    ) -> tuple["Cache", TokenBatch]:
        """Open a step that adds `lens` tokens to each sequence, and return the advanced cache and the batch.

        A row whose tokens do not all fit is refused whole: it adds nothing, and `num_dropped` counts it.

        Args:
            lens: new tokens of each sequence, at most `time`.
            time: width that the step's rows are padded to.
            outputs: see `TokenBatch`.
        """
        lens = jnp.clip(lens, 0, time)
        starts = self.lengths
        accepted = jnp.where(starts + lens <= self.capacity, lens, 0)
        steps = jnp.arange(time, dtype=jnp.int32)[None]
        positions = starts[:, None] + steps
        is_valid = steps < accepted[:, None]
        batch = TokenBatch(
            starts=starts,
            lens=accepted,
            positions=positions,
            is_valid=is_valid,
            slots=tuple(_slots(pool, positions, is_valid, self.spec.page_size) for pool in self.pools),
            outputs=outputs,
        )
        # Computed once: XLA's CPU backend would repeat this arithmetic inside every layer's fusions.
        batch = jax.lax.optimization_barrier(batch)
        return self.replace(lengths=starts + accepted, num_dropped=self.num_dropped + lens - accepted), batch

    def truncate(self, lengths: Int[Array, " seq"]) -> "Cache":
        """Return the cache with each sequence cut to at most `lengths` tokens; negative counts as 0."""
        return self.replace(lengths=jnp.minimum(self.lengths, jnp.maximum(lengths, 0)))


def cache_sharding(cache: Cache, sharding: Sharding) -> Cache:
    """Return a cache-shaped tree of NamedShardings: pages go with their sequences, heads over their axis."""
    pool = sharding.named("page", "kv_head", None, None)
    rows = sharding.named("seq")
    pools = tuple(
        p.replace(keys=pool, values=pool, page_table=sharding.named("seq", None)) for p in cache.pools
    )
    return cache.replace(pools=pools, lengths=rows, num_dropped=rows)


def _slots(
    pool: Pool, positions: Int[Array, "seq time"], is_valid: Bool[Array, "seq time"], page_size: int
) -> Int[Array, "seq time"]:
    logical = jax.lax.div(positions, jnp.int32(page_size))
    in_table = is_valid & (logical < pool.page_table.shape[1])
    pages = jnp.take_along_axis(pool.page_table, jnp.where(in_table, logical, 0), axis=1)
    is_kept = in_table & (pages >= 0) & (pages < pool.num_pages)
    return jnp.where(is_kept, pages * page_size + jax.lax.rem(positions, jnp.int32(page_size)), -1)


@functools.lru_cache(maxsize=64)
def _dense_maker(
    spec: CacheSpec, num_sequences: int, capacity: int, sharding: Sharding | None
) -> Callable[[], Cache]:
    """Return the program that makes an empty cache where it lives, compiled once for each form."""
    make = functools.partial(_empty_dense, spec, num_sequences, capacity, sharding)
    placement = None if sharding is None else cache_sharding(jax.eval_shape(make), sharding)
    return jax.jit(make, out_shardings=placement)


def _empty_dense(spec: CacheSpec, num_sequences: int, capacity: int, sharding: Sharding | None) -> Cache:
    num_shards = sharding.size("seq") if sharding else 1
    rows = num_sequences // num_shards
    pages = spec.pages_for(capacity)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    pools = []
    for index, group in enumerate(spec.groups):
        layer_pages, *page = spec.pool_shape(index, rows * pages)
        zeros = functools.partial(jnp.zeros, (num_shards * layer_pages, *page), CODEC_DTYPES[group.codec])
        pools.append(
            Pool(
                keys=zeros(),
                values=zeros(),
                page_table=jnp.tile(table, (num_shards, 1)),
                num_pages=rows * pages,
            )
        )
    counts = functools.partial(jnp.zeros, num_sequences, jnp.int32)
    return Cache(pools=tuple(pools), lengths=counts(), num_dropped=counts(), spec=spec, capacity=capacity)
