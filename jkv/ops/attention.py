"""Attention through a cache: the step's rows are written, then all that each sequence holds is attended to.

Knows caches and batches; no layer and no model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache, Pool
from jkv.ops.causal import causal_attention
from jkv.ops.checks import Where, check_heads, check_options, check_own, check_place, check_step, find_group
from jkv.ops.choice import Implementation, check_layout, check_name, choose, choose_writer, module_of
from jkv.ops.pools import recent_keys, stored_pages, turned, write, write_runs
from jkv.ops.shards import run
from jkv.ops.stripes import own_columns, own_sinks
from jkv.sharding import Sharding
from kernels_pallas import latent_attention, paged_attention
from kernels_pallas.latent_attention import LatentArguments, UpProjections
from kernels_pallas.paged_attention import PagedArguments, Stripe, Tiling


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: the attended values; zero for padding.
        cache: holds the new rows; None without one.
        log_sum: float32 log-sum-exp of the logits, sinks included, by which partial results are merged; -inf
            for padding.
    """

    out: Float[Array, "row time q_head value_dim"]
    cache: Cache | None
    log_sum: Float[Array, "row time q_head"]


def attend(
    query: Float[Array, "row time q_head head_dim"],
    key: Float[Array, "row time kv_head head_dim"] | None,
    value: Float[Array, "row time kv_head value_dim"] | None,
    cache: Cache | None = None,
    where: Where | None = None,
    batch: TokenBatch | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    sharding: Sharding | None = None,
) -> Attended:
    """Write the step's keys and values, then attend to all that each sequence holds, this step included.

    A query at position p sees positions <= p of its own sequence. Logits, softmax and sums are float32.
    Without a cache it is ordinary causal attention over `time`, which differentiates and is always plain JAX.

    Args:
        query: rotated queries, in rows as the step's: padded or ragged.
        key: rotated keys of the new tokens; None (with `value`) only reads.
        value: values of the new tokens; as wide as keys where there is a cache.
        cache: consumed where the caller donates it; None for attention among the new tokens alone.
        where: the cache group and the layer's index in it, which may be traced.
        batch: the step, from `cache.begin` or `cache.begin_ragged`.
        scale: multiplies the logits.
        window: latest positions that a query sees, its own included.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: a logit for each query head that takes probability and adds no value.
        implementation: `auto`, or one by name.
        tiling: how the walk over the cache, and a ragged step, is cut.
        sharding: that of the cache; runs in `shard_map`, sequences, heads and pages split by its rules.

    Raises:
        ValueError: shapes disagree, an option is out of range, `where` or `batch` is missing, `where` is no
            layer of the cache (a traced index is taken on trust), the cache has other shards than the
            sharding, a ragged step is of sequences that are split, a kernel is named that the device has not,
            or a gradient is taken through a cache.
    """
    check_name(implementation)
    check_options(query, scale, window, soft_cap, sinks)
    if cache is None:
        if key is None or value is None:
            raise ValueError("attention without a cache needs keys and values, got None")
        if batch is not None:
            raise ValueError("a batch is a step of a cache, got a batch and no cache")
        check_own(query, key, value)
        out, log_sum = causal_attention(
            query, key, value, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
        return Attended(out, None, log_sum)
    if (key is None) != (value is None):
        raise ValueError("keys and values are given together or not at all, got one of the two")
    where, batch = check_place(cache, where, batch, window, sharding, query, key, value)
    group, _ = where
    spec = cache.spec.groups[group]
    if spec.kind != "gqa":
        raise ValueError(f"cache group {group} holds latents: call `attend_latent`")
    check_heads(spec, key, value)
    device = _device_of(implementation, sharding, query, cache)
    writer = choose_writer(implementation, device)
    if query.shape[-1] != spec.head_dim:
        raise ValueError(f"query head_dim must be the cache's, {spec.head_dim}, got {query.shape[-1]}")

    def local(heads: Any, pool: Pool, batch: TokenBatch, layer: Any, stripe: Stripe | None):
        query, key, value, sinks = heads
        pieces = batch.pieces((tiling or Tiling()).query_tokens)
        recent = recent_keys(pool, key, batch, pieces, layer)
        if key is not None:
            pool = write(cache.spec, pool, (key, value), batch, (group, layer), writer)
            pool = write_runs(pool, key, recent, batch, pieces, layer, cache.spec.page_size)
        arguments = PagedArguments(
            pieces.cut(turned(spec.codecs[0], query)),
            *stored_pages(cache.spec, pool, group, layer),
            pieces.of_sequences(own_columns(pool.page_table, stripe)),
            pieces.starts,
            pieces.lens,
            layer * pool.num_pages,
            recent,
            stripe,
        )
        paged_attention.check(arguments, num_pages=pool.num_pages, window=window)
        chosen = choose(implementation, arguments, tiling, device)
        check_layout(chosen, cache.spec.layout, arguments, tiling)
        options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
        out, log_sum = module_of(chosen, arguments).paged_attention(
            arguments,
            num_pages=pool.num_pages,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=own_sinks(sinks, stripe),
            **options,
        )
        out = turned(spec.codecs[1], out, is_inverse=True)
        return pieces.join(out, 0.0), pieces.join(log_sum, -jnp.inf), pool

    heads = ("seq", None, "q_head", None)
    axes = (heads, heads, heads, ("q_head",))
    out, log_sum, written = run(local, (query, key, value, sinks), axes, cache, where, batch, sharding)
    return Attended(out, written, log_sum)


def attend_latent(
    query: Float[Array, "row time q_head width"],
    rope_query: Float[Array, "row time q_head rope"],
    latent: Float[Array, "row time latent"],
    rope: Float[Array, "row time rope"],
    cache: Cache,
    where: Where | None,
    batch: TokenBatch | None,
    *,
    scale: float,
    up: UpProjections | None = None,
    window: int | None = None,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    sharding: Sharding | None = None,
) -> Attended:
    """Write the step's latents, then attend to all that each sequence holds, this step included.

    A door of its own beside `attend`: queries come in two parts, and what is returned is as wide as a latent.
    `kernels_pallas.latent_attention.LatentArguments` defines the two forms. They differ by rounding only:
    both see latents as they are stored, this step's too.

    Args:
        query: without `up`, queries taken to latents by the key's up-projection; with it, those of the heads.
        rope_query: their rotated part.
        latent: of the new tokens, what all heads share.
        rope: the rotated part beside it.
        cache: consumed where the caller donates it.
        where: see `attend`; the group is one of latents.
        batch: see `attend`.
        scale: multiplies the logits.
        up: the up-projections, by which a block of latents becomes keys and values of every head; None
            attends to latents, and returns them.
        window: latest positions that a query sees, its own included.
        implementation: see `attend`.
        tiling: see `attend`.
        sharding: see `attend`; every device holds the latents whole.

    Raises:
        ValueError: as `attend`.
    """
    check_name(implementation)
    check_options(query, scale, window)
    where, batch = check_place(cache, where, batch, window, sharding, query, rope_query, latent, rope)
    group, _ = where
    spec = cache.spec.groups[group]
    if spec.kind != "latent":
        raise ValueError(f"cache group {group} holds keys and values: call `attend`")
    check_heads(spec, latent[:, :, None], rope[:, :, None])
    device = _device_of(implementation, sharding, query, cache)
    writer = choose_writer(implementation, device)

    def local(heads: Any, pool: Pool, batch: TokenBatch, layer: Any, stripe: Stripe | None):
        query, rope_query, latent, rope, up = heads
        pieces = batch.pieces((tiling or Tiling()).query_tokens)
        heads_of_latents = latent[:, :, None], rope[:, :, None]
        pool = write(cache.spec, pool, heads_of_latents, batch, (group, layer), writer)
        arguments = LatentArguments(
            pieces.cut(query if up else turned(spec.codecs[0], query)),
            pieces.cut(turned(spec.codecs[1], rope_query)),
            *stored_pages(cache.spec, pool, group, layer),
            pieces.of_sequences(own_columns(pool.page_table, stripe)),
            pieces.starts,
            pieces.lens,
            layer * pool.num_pages,
            jax.tree.map(functools.partial(turned, spec.codecs[0]), up),
            stripe,
        )
        latent_attention.check(arguments, num_pages=pool.num_pages, window=window)
        chosen = choose(implementation, arguments, tiling, device)
        check_layout(chosen, cache.spec.layout, arguments, tiling)
        options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
        out, log_sum = module_of(chosen, arguments).latent_attention(
            arguments, num_pages=pool.num_pages, scale=scale, window=window, **options
        )
        out = out if up else turned(spec.codecs[0], out, is_inverse=True)
        return pieces.join(out, 0.0), pieces.join(log_sum, -jnp.inf), pool

    heads, rows = ("seq", None, "q_head", None), ("seq", None, None)
    axes = (heads, heads, rows, rows, ("q_head", None, None))
    out, log_sum, cache = run(
        local, (query, rope_query, latent, rope, up), axes, cache, where, batch, sharding
    )
    return Attended(out, cache, log_sum)


def append(
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    key: Float[Array, "row time kv_head head_dim"],
    value: Float[Array, "row time kv_head value_dim"],
    *,
    implementation: Implementation = "auto",
    sharding: Sharding | None = None,
) -> Cache:
    """Write the step's keys and values as `attend` does, and attend to nothing.

    Of latents, `key` is the latent and `value` its rotated part, each with one KV head.

    Raises:
        ValueError: as `attend`.
    """
    check_step(cache, batch, sharding, key, value)
    spec = find_group(cache, where)
    check_heads(spec, key, value)
    writer = choose_writer(implementation, _device_of(implementation, sharding, key, cache))

    def local(heads: Any, pool: Pool, batch: TokenBatch, layer: Any, stripe: Stripe | None):
        pieces = batch.pieces(Tiling().query_tokens)
        recent = recent_keys(pool, heads[0], batch, pieces, layer)
        pool = write(cache.spec, pool, heads, batch, (where[0], layer), writer)
        return None, None, write_runs(pool, heads[0], recent, batch, pieces, layer, cache.spec.page_size)

    heads = ("seq", None, spec.head_axis, None)
    _, _, written = run(local, (key, value), (heads, heads), cache, where, batch, sharding)
    return written


def _device_of(
    implementation: Implementation, sharding: Sharding | None, query: jax.Array, cache: Cache
) -> Any:
    """Return a device that a call runs on; None is this process's.

    What `auto` takes in a program without a sharding is this process's choice. A kernel by name may be for
    another machine's program, whose shapes lie on its mesh.
    """
    if sharding is not None:
        return sharding.device
    if not isinstance(query, Tracer):
        return next(iter(query.devices()))
    if implementation == "auto":
        return None
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves((query, cache)))
    named = next((mesh.abstract_device for mesh in meshes if mesh.abstract_device is not None), None)
    # One that is here says more of itself.
    kind = named and named.device_kind
    return next((device for device in jax.local_devices() if device.device_kind == kind), named)
