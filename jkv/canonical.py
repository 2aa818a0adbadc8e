"""A cache as plain float32 arrays, independent of layout, codec and page order; and back.

For tests, snapshots and moves from one layout to another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv import ops
from jkv.cache.cache import Cache, cache_axes, check_shards
from jkv.cache.encoding import decode
from jkv.cache.spec import is_whole
from jkv.pytree import State, pytree
from jkv.sharding import Sharding


@pytree
class Canonical(State):
    """What a cache's sequences hold.

    Attributes:
        keys: for each group and each of its layers, `[seq, token, kv_head, head_dim]`; zero past a sequence's
            length and before what a window has kept.
        values: the same of values.
        lengths: tokens of each sequence.
    """

    keys: tuple[tuple[Float[Array, "seq token kv_head head_dim"], ...], ...]
    values: tuple[tuple[Float[Array, "seq token kv_head head_dim"], ...], ...]
    lengths: Int[Array, " seq"]


@functools.partial(jax.jit, static_argnames=("num_tokens", "sharding"))
def to_canonical(
    cache: Cache, num_tokens: int | None = None, *, sharding: Sharding | None = None
) -> Canonical:
    """Return what the cache holds, in arrays of `num_tokens` tokens (None: its capacity).

    All of it is on the device at once, in float32: for small caches, or a few sequences of a large one. On a
    mesh each device has its own sequences and heads, and all stripes of them.

    Raises:
        ValueError: `num_tokens` is none, or the cache has other shards than the sharding.
    """
    check_shards(cache, sharding)
    num_tokens = cache.capacity if num_tokens is None else num_tokens
    if not is_whole(num_tokens, at_least=1):
        raise ValueError(f"num_tokens must be whole and at least 1, got {num_tokens}")

    def groups(cache: Cache) -> tuple[Any, Any]:
        found = [_group(cache, index, num_tokens, sharding) for index in range(len(cache.pools))]
        keys, values = zip(*found, strict=True)
        return keys, values

    if sharding is not None:
        heads = tuple(sharding.spec("seq", None, group.head_axis, None) for group in cache.spec.groups)
        groups = jax.shard_map(
            groups,
            mesh=sharding.mesh,
            in_specs=(cache_axes(cache, sharding.spec),),
            out_specs=(heads, heads),
            check_vma=False,
        )
    keys, values = groups(cache)
    return Canonical(keys=keys, values=values, lengths=cache.lengths)


@functools.partial(jax.jit, static_argnames="sharding")
def from_canonical(canonical: Canonical, cache: Cache, *, sharding: Sharding | None = None) -> Cache:
    """Return `cache` with what the canonical form holds written after what its own sequences hold.

    The cache has usually just been made; its tables must name the pages. A sequence that does not fit is
    refused whole and counted, as by `Cache.begin`.

    Raises:
        ValueError: the shapes are not those of the cache, or longer than its windows take at once, or the
            cache has other shards than the sharding.
    """
    layers = [group.num_layers for group in cache.spec.groups]
    for what, groups in (("keys", canonical.keys), ("values", canonical.values)):
        if (got := [len(group) for group in groups]) != layers:
            raise ValueError(f"{what} must be of as many layers a group as the cache's, {layers}, got {got}")
    num_tokens = canonical.keys[0][0].shape[1]
    if sharding is not None and sharding.is_explicit:
        canonical = _placed(canonical, cache, sharding)
    cache, batch = cache.begin(canonical.lengths, time=num_tokens)
    for group, layers in enumerate(zip(canonical.keys, canonical.values, strict=True)):
        for layer, (keys, values) in enumerate(zip(*layers, strict=True)):
            cache = ops.append(cache, (group, layer), batch, keys, values, sharding=sharding)
    return cache


def _placed(canonical: Canonical, cache: Cache, sharding: Sharding) -> Canonical:
    """Return the canonical form as the cache lies: types of an explicit mesh say so."""

    def place(groups: tuple[tuple[jax.Array, ...], ...]) -> Any:
        axes = [sharding.named("seq", None, group.head_axis, None) for group in cache.spec.groups]
        return tuple(jax.reshard(layers, axis) for layers, axis in zip(groups, axes, strict=True))

    lengths = jax.reshard(canonical.lengths, sharding.named("seq"))
    return Canonical(keys=place(canonical.keys), values=place(canonical.values), lengths=lengths)


def _group(
    cache: Cache, index: int, num_tokens: int, sharding: Sharding | None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return the keys and the values of each layer of a group."""
    pool, group, page_size = cache.pools[index], cache.spec.groups[index], cache.spec.page_size
    width = pool.page_table.shape[1]
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    slots = jax.lax.rem(positions, jnp.int32(width * page_size))
    is_page = (pool.page_table >= 0) & (pool.page_table < pool.num_pages)
    table = jnp.where(is_page, pool.page_table, 0)
    is_held = (positions[None] < cache.lengths[:, None]) & jnp.repeat(is_page, page_size, axis=1)[:, slots]
    if cache.is_ring(index):
        is_held &= positions[None] >= (cache.peaks - width * page_size)[:, None]

    def all_stripes(heads: jax.Array) -> jax.Array:
        """Add up what each device has of the tokens."""
        if sharding is None or sharding.size("context") == 1:
            return heads
        stripes = jax.lax.div(positions, jnp.int32(page_size)) % cache.spec.num_stripes
        is_own = (stripes == sharding.index("context"))[None, :, None, None]
        return jax.lax.psum(jnp.where(is_own, heads, 0), sharding.mesh_axis("context"))

    def layer_heads(scales: jax.Array | None, which: int, layer: int) -> jax.Array:
        taken = ops.read_pages(cache, index, which, table + layer * pool.num_pages)
        taken = jax.tree.map(
            lambda array: array.reshape(table.shape[0], -1, *array.shape[3:])[:, slots], taken
        )
        heads = all_stripes(decode(group.codecs[which], taken, None if scales is None else scales[layer]))
        if which == 0 and pool.recent is not None:
            heads = _with_recent(pool.recent, heads, cache.lengths, positions, layer)
        return jnp.where(is_held[..., None, None], heads, 0)

    layers = range(group.num_layers)
    return (
        tuple(layer_heads(pool.key_scale, 0, layer) for layer in layers),
        tuple(layer_heads(pool.value_scale, 1, layer) for layer in layers),
    )


def _with_recent(
    recent: jax.Array, heads: jax.Array, lengths: jax.Array, positions: jax.Array, layer: int
) -> jax.Array:
    """Return a layer's keys with those of the open runs as they were given."""
    num_seqs, num_recent = lengths.shape[0], recent.shape[2]
    own = recent[layer * num_seqs : (layer + 1) * num_seqs, :, positions % num_recent].swapaxes(1, 2)
    is_open = positions[None] >= (lengths - lengths % (num_recent // 2))[:, None]
    return jnp.where(is_open[..., None, None], own.astype(heads.dtype), heads)
