"""The one door to `kernels_pallas`: checks the call, writes the new rows, chooses an implementation.

Knows caches and batches; no layer and no model.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.cache import Cache, Pool, TokenBatch
from jkv.sharding import Sharding
from kernels_pallas import page_write, paged_attention
from kernels_pallas.paged_attention import PagedArguments, Tiling

Implementation = Literal["auto", "reference", "xla"]
Chosen = Literal["reference", "xla"]
Where = tuple[int, Int[Array, ""] | int]


def choose(implementation: Implementation) -> Chosen:
    """Return the implementation that runs: `auto` is `xla` on every platform; a name is itself.

    Raises:
        ValueError: the name is unknown.
    """
    if implementation == "auto":
        return "xla"
    if implementation not in ("reference", "xla"):
        raise ValueError(
            f"attention implementation must be 'auto', 'reference' or 'xla', got {implementation!r}"
        )
    return implementation


def attend(
    query: Float[Array, "seq time q_head head_dim"],
    key: Float[Array, "seq time kv_head head_dim"] | None,
    value: Float[Array, "seq time kv_head head_dim"] | None,
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
) -> tuple[Float[Array, "seq time q_head head_dim"], Cache | None]:
    """Write the step's keys and values, then attend to all that each sequence holds, this step included.

    A query at position p sees positions <= p of its own sequence. Logits, softmax and sums are float32.
    Without a cache it is ordinary causal attention over `time`, which differentiates.

    Args:
        query: rotated queries.
        key: rotated keys of the new tokens; None (with `value`) only reads.
        value: values of the new tokens.
        cache: consumed where the caller donates it; None for attention among the new tokens alone.
        where: the cache group and the layer's index in it, which may be traced.
        batch: the step, from `cache.begin`.
        scale: multiplies the logits.
        window: latest positions that a query sees, its own included.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: a logit for each query head that takes probability and adds no value.
        implementation: `auto`, or one by name.
        tiling: how the walk over the cache is cut.
        sharding: runs in `shard_map`, sequences and heads split by its rules.

    Returns:
        The attended values and the cache that holds the new rows.

    Raises:
        ValueError: shapes disagree, `where` or `batch` is missing, or a gradient is taken through a cache.
    """
    chosen = choose(implementation)
    if cache is None:
        if key is None or value is None:
            raise ValueError("attention without a cache needs keys and values, got None")
        return causal_attention(
            query, key, value, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        ), None
    if where is None or batch is None:
        raise ValueError("attention with a cache needs `where` and the `batch` that `cache.begin` returned")
    if (key is None) != (value is None):
        raise ValueError("keys and values are given together or not at all, got one of the two")
    group, layer = where
    if not 0 <= group < len(cache.pools):
        raise ValueError(f"cache group must be in [0, {len(cache.pools)}), got {group}")

    def local(query: Any, key: Any, value: Any, pool: Pool, batch: TokenBatch, layer: Any, sinks: Any):
        offset = layer * pool.num_pages
        arguments = PagedArguments(
            query, pool.keys, pool.values, pool.page_table, batch.starts, batch.lens, offset
        )
        paged_attention.check(arguments, num_pages=pool.num_pages, window=window)
        if key is not None:
            _check_rows(key, value, pool)
            pool = pool.replace(
                keys=page_write.xla(pool.keys, key, batch.slots[group], page_offset=offset),
                values=page_write.xla(pool.values, value, batch.slots[group], page_offset=offset),
            )
            arguments = arguments._replace(key_pool=pool.keys, value_pool=pool.values)
        options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
        out, _ = getattr(paged_attention, chosen)(
            arguments,
            num_pages=pool.num_pages,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            **options,
        )
        return out, pool

    call = local if sharding is None else _over_mesh(local, sharding, cache.pools[group], batch)
    query = _refuse_gradient(query)
    out, pool = call(query, key, value, cache.pools[group], batch, jnp.asarray(layer, jnp.int32), sinks)
    pools = tuple(pool if i == group else other for i, other in enumerate(cache.pools))
    return out, cache.replace(pools=pools)


def _check_rows(key: jax.Array, value: jax.Array, pool: Pool) -> None:
    """Refuse keys and values whose heads are not the pool's."""
    _, num_heads, _, head_dim = pool.keys.shape
    for name, rows in (("keys", key), ("values", value)):
        if rows.shape[2:] != (num_heads, head_dim):
            raise ValueError(
                f"{name} must have the cache's KV heads and head_dim, {(num_heads, head_dim)}, "
                f"got {rows.shape[2:]}"
            )


def causal_attention(
    query: Float[Array, "seq time q_head head_dim"],
    key: Float[Array, "seq time kv_head head_dim"],
    value: Float[Array, "seq time kv_head head_dim"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
) -> Float[Array, "seq time q_head head_dim"]:
    """Attend causally among the tokens given, differentiably, in float32; no cache.

    Raises:
        ValueError: the query heads are not a multiple of the KV heads.
    """
    num_seqs, time, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {num_heads} and {num_kv_heads}")
    group = num_heads // num_kv_heads
    rows = query.reshape(num_seqs, time, num_kv_heads, group, head_dim).astype(jnp.float32)
    logits = jnp.einsum("btkgd,bskd->bkgts", rows, key.astype(jnp.float32)) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    past = jnp.arange(time)[:, None] - jnp.arange(time)[None]
    is_seen = past >= 0 if window is None else (past >= 0) & (past < window)
    logits = jnp.where(is_seen[None, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :time]
    out = jnp.einsum("bkgts,bskd->btkgd", weights, value.astype(jnp.float32))
    return out.reshape(query.shape).astype(query.dtype)


def _over_mesh(local: Any, sharding: Sharding, pool: Pool, batch: TokenBatch) -> Any:
    """Wrap `local` so that each device sees its own sequences, heads and pages."""
    spec = sharding.spec
    rows = spec("seq")
    heads = spec("seq", None, "q_head", None)
    pages = spec("page", "kv_head", None, None)
    pool_specs = pool.replace(keys=pages, values=pages, page_table=spec("seq", None))
    table = spec("seq", None)
    slots = tuple(table for _ in batch.slots)
    batch_specs = batch.replace(starts=rows, lens=rows, positions=table, is_valid=table, slots=slots)

    def call(query: Any, key: Any, value: Any, pool: Any, batch: Any, layer: Any, sinks: Any) -> Any:
        return jax.shard_map(
            local,
            mesh=sharding.mesh,
            in_specs=(heads, heads, heads, pool_specs, batch_specs, spec(), spec("q_head")),
            out_specs=(heads, pool_specs),
            check_vma=False,
        )(query, key, value, pool, batch, layer, sinks)

    return call


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    return x


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError("a gradient through a cache is refused; call the layer without a cache to train it")
