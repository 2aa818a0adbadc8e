"""The one door to `kernels_pallas`: checks the call, writes the new rows, chooses an implementation.

Knows caches and batches; no layer and no model.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.batch import Pieces, TokenBatch
from jkv.cache.cache import Cache, Pool, pool_axes
from jkv.cache.codec import Codec
from jkv.cache.encoding import Stored, encode, rotate
from jkv.cache.runs import keys_as_given, recent_slots, rounded, whole_runs
from jkv.cache.spec import CacheGroup
from jkv.sharding import Sharding
from kernels_pallas import page_write, paged_attention
from kernels_pallas.paged_attention import PagedArguments, Pages, Tiling

Implementation = Literal["auto", "reference", "xla"]
Chosen = Literal["reference", "xla"]
Where = tuple[int, Int[Array, ""] | int]


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: the attended values; zero for padding.
        cache: holds the new rows; None without one.
        log_sum: float32 log-sum-exp of the logits, sinks included, by which partial results are merged; -inf
            for padding.
    """

    out: Float[Array, "row time q_head head_dim"]
    cache: Cache | None
    log_sum: Float[Array, "row time q_head"]


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
    query: Float[Array, "row time q_head head_dim"],
    key: Float[Array, "row time kv_head head_dim"] | None,
    value: Float[Array, "row time kv_head head_dim"] | None,
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
    Without a cache it is ordinary causal attention over `time`, which differentiates.

    Args:
        query: rotated queries, in rows as the step's: padded or ragged.
        key: rotated keys of the new tokens; None (with `value`) only reads.
        value: values of the new tokens.
        cache: consumed where the caller donates it; None for attention among the new tokens alone.
        where: the cache group and the layer's index in it, which may be traced.
        batch: the step, from `cache.begin` or `cache.begin_ragged`.
        scale: multiplies the logits.
        window: latest positions that a query sees, its own included.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: a logit for each query head that takes probability and adds no value.
        implementation: `auto`, or one by name.
        tiling: how the walk over the cache, and a ragged step, is cut.
        sharding: runs in `shard_map`, sequences and heads split by its rules.

    Raises:
        ValueError: shapes disagree, `where` or `batch` is missing, `where` names no layer of the cache (a
            traced index is taken on trust), a ragged step is to run on a mesh, or a gradient is taken through
            a cache.
    """
    chosen = choose(implementation)
    if cache is None:
        if key is None or value is None:
            raise ValueError("attention without a cache needs keys and values, got None")
        out, log_sum = causal_attention(
            query, key, value, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
        return Attended(out, None, log_sum)
    if where is None or batch is None:
        raise ValueError("attention with a cache needs `where` and the `batch` that `cache.begin` returned")
    if (key is None) != (value is None):
        raise ValueError("keys and values are given together or not at all, got one of the two")
    if sharding is not None and batch.sequences is not None:
        raise ValueError("a ragged step runs on one device, got a mesh; open it with `cache.begin`")
    group, layer = where
    if not 0 <= group < len(cache.pools):
        raise ValueError(f"cache group must be in [0, {len(cache.pools)}), got {group}")
    num_layers = cache.spec.groups[group].num_layers
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}) of cache group {group}, got {layer}")

    spec = cache.spec.groups[group]
    _check_call(query, key, value, cache, group, window)
    tiling = tiling or Tiling()
    options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
    compute = functools.partial(
        getattr(paged_attention, chosen), scale=scale, window=window, soft_cap=soft_cap, **options
    )

    def local(query: Any, key: Any, value: Any, pool: Pool, batch: TokenBatch, layer: Any, sinks: Any):
        pieces = batch.pieces(tiling.query_tokens)
        recent = _keys_as_given(pool, key, batch, pieces, layer)
        if key is not None:
            pool = _write(pool, spec.codecs, key, value, batch, group, layer)
            pool = _write_runs(pool, key, recent, batch, pieces, layer)
        arguments = PagedArguments(
            pieces.cut(rotate(spec.codecs[0], query.astype(jnp.float32)).astype(query.dtype)),
            _pages(spec.codecs[0], pool.keys, _of_layer(pool.key_scale, layer)),
            _pages(spec.codecs[1], pool.values, _of_layer(pool.value_scale, layer)),
            pieces.of_sequences(pool.page_table),
            pieces.starts,
            pieces.lens,
            layer * pool.num_pages,
            recent,
        )
        paged_attention.check(arguments, num_pages=pool.num_pages, window=window)
        out, log_sum = compute(arguments, num_pages=pool.num_pages, sinks=sinks)
        out = rotate(spec.codecs[1], out.astype(jnp.float32), is_inverse=True).astype(query.dtype)
        return pieces.join(out, 0.0), pieces.join(log_sum, -jnp.inf), pool

    call = local if sharding is None else _over_mesh(local, sharding, cache.pools[group], batch)
    query, layer = _refuse_gradient(query), jnp.asarray(layer, jnp.int32)
    out, log_sum, pool = call(query, key, value, cache.pools[group], batch, layer, sinks)
    return Attended(out, _with_pool(cache, group, pool), log_sum)


def append(
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    key: Float[Array, "row time kv_head head_dim"],
    value: Float[Array, "row time kv_head head_dim"],
) -> Cache:
    """Write the step's keys and values as `attend` does, and attend to nothing. One device.

    Raises:
        ValueError: as `attend`.
    """
    group, layer = where
    spec = cache.spec.groups[group]
    _check_heads(spec, key, value)
    pool, layer = cache.pools[group], jnp.asarray(layer, jnp.int32)
    pieces = batch.pieces(Tiling().query_tokens)
    recent = _keys_as_given(pool, key, batch, pieces, layer)
    pool = _write(pool, spec.codecs, key, value, batch, group, layer)
    return _with_pool(cache, group, _write_runs(pool, key, recent, batch, pieces, layer))


def _with_pool(cache: Cache, group: int, pool: Pool) -> Cache:
    return cache.replace(pools=tuple(pool if i == group else other for i, other in enumerate(cache.pools)))


def _write(
    pool: Pool, codecs: tuple[Codec, Codec], key: Any, value: Any, batch: TokenBatch, group: int, layer: Any
) -> Pool:
    """Encode a step's heads, but keys that are encoded in runs, and write them into a layer's slots."""
    offset = layer * pool.num_pages

    def write(stored: Stored, codec: Codec, heads: Any, scales: Any) -> Stored:
        if codec.scaling == "slots":
            return stored
        return jax.tree.map(
            lambda array, rows: page_write.xla(array, rows, batch.slots[group], page_offset=offset),
            stored,
            encode(codec, heads, _of_layer(scales, layer)),
        )

    return pool.replace(
        keys=write(pool.keys, codecs[0], key, pool.key_scale),
        values=write(pool.values, codecs[1], value, pool.value_scale),
    )


def _write_runs(pool: Pool, key: Any, recent: Any, batch: TokenBatch, pieces: Pieces, layer: Any) -> Pool:
    """Keep a step's keys as they are, and encode the runs that it has filled; nothing without such runs."""
    if pool.recent is None:
        return pool
    span, page_size = pool.recent.shape[2] // 2, pool.keys.data.shape[2]
    table = pieces.of_sequences(pool.page_table)
    whole = whole_runs(recent, table, pieces, page_size=page_size, span=span)

    def write(name: str, slots: Any) -> Any:
        array, rows = getattr(pool.keys, name), getattr(whole.stored, name)
        return page_write.xla(array, rows, slots, page_offset=layer * pool.num_pages)

    return pool.replace(
        keys=Stored(
            data=write("data", whole.slots), scale=write("scale", whole.runs), zero=write("zero", whole.runs)
        ),
        recent=page_write.xla(
            pool.recent, rounded(key), recent_slots(batch, span=span), page_offset=layer * batch.lens.shape[0]
        ),
    )


def _keys_as_given(pool: Pool, key: Any, batch: TokenBatch, pieces: Pieces, layer: Any) -> Any:
    """Return the keys of the runs that pieces touch; None where keys are encoded token by token."""
    if pool.recent is None:
        return None
    num_seqs = batch.lens.shape[0]
    recent = jax.lax.dynamic_slice_in_dim(pool.recent, layer * num_seqs, num_seqs)
    return keys_as_given(recent, None if key is None else rounded(key), batch, pieces)


def _pages(codec: Codec, stored: Stored, scale: Any) -> Pages:
    entry = codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2", "int4") else "number"
    return Pages(stored.data, stored.scale if scale is None else scale, stored.zero, entry)


def _of_layer(scales: Any, layer: Any) -> Any:
    """Return a layer's calibrated scales `[kv_head]`."""
    return None if scales is None else jax.lax.dynamic_index_in_dim(scales, layer, keepdims=False)


def _check_call(query: Any, key: Any, value: Any, cache: Cache, group: int, window: int | None) -> None:
    """Refuse heads that are not the group's, and a window that reaches past what the group keeps."""
    spec = cache.spec.groups[group]
    _check_heads(spec, key, value)
    if query.shape[-1] != spec.head_dim:
        raise ValueError(f"query head_dim must be the cache's, {spec.head_dim}, got {query.shape[-1]}")
    if spec.window is not None and (window is None or window > spec.window):
        raise ValueError(
            f"the cache group keeps the latest {spec.window} tokens, so a window of at most that is needed, "
            f"got {window}"
        )


def _check_heads(spec: CacheGroup, key: Any, value: Any) -> None:
    sizes = (spec.num_kv_heads, spec.head_dim)
    for name, rows in (("keys", key), ("values", value)):
        if rows is not None and rows.shape[2:] != sizes:
            raise ValueError(
                f"{name} must have the cache's KV heads and head_dim, {sizes}, got {rows.shape[2:]}"
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
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Attend causally among the tokens given, differentiably, in float32; no cache.

    Returns:
        The attended values, and the log-sum-exp of the logits, sinks included.

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
    log_sum = jax.nn.logsumexp(logits, axis=-1).transpose(0, 3, 1, 2).reshape(query.shape[:3])
    return out.reshape(query.shape).astype(query.dtype), log_sum


def _over_mesh(local: Any, sharding: Sharding, pool: Pool, batch: TokenBatch) -> Any:
    """Wrap `local` so that each device sees its own sequences, heads and pages."""
    spec = sharding.spec
    rows = spec("seq")
    heads = spec("seq", None, "q_head", None)
    pool_specs = pool_axes(pool, spec)
    table = spec("seq", None)
    slots = tuple(table for _ in batch.slots)
    batch_specs = batch.replace(starts=rows, lens=rows, positions=table, is_valid=table, slots=slots)

    def call(query: Any, key: Any, value: Any, pool: Any, batch: Any, layer: Any, sinks: Any) -> Any:
        return jax.shard_map(
            local,
            mesh=sharding.mesh,
            in_specs=(heads, heads, heads, pool_specs, batch_specs, spec(), spec("q_head")),
            out_specs=(heads, spec("seq", None, "q_head"), pool_specs),
            check_vma=False,
        )(query, key, value, pool, batch, layer, sinks)

    return call


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    return x


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError("a gradient through a cache is refused; call the layer without a cache to train it")
