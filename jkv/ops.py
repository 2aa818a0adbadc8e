"""The one door to `kernels_pallas`: checks the call, writes the new rows, chooses an implementation.

Knows caches and batches; no layer and no model.
"""

import functools
import importlib
import logging
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.batch import Pieces, TokenBatch
from jkv.cache.cache import Cache, Pool, pool_axes
from jkv.cache.codec import Codec
from jkv.cache.encoding import Stored, encode, rotate
from jkv.cache.runs import keys_as_given, recent_slots, rounded, whole_runs
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.sharding import Sharding
from kernels_pallas import latent_attention, page_write, paged_attention
from kernels_pallas.latent_attention import LatentArguments, UpProjections
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes, Tiling
from kernels_pallas.slots import as_matrices, padded, slots_of

Chosen = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Implementation = Literal["auto", Chosen]
Where = tuple[int, Int[Array, ""] | int]

_LOGGER = logging.getLogger(__name__)


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


def choose(
    implementation: Implementation,
    arguments: PagedArguments | LatentArguments | None = None,
    tiling: Tiling | None = None,
) -> Chosen:
    """Return the implementation that runs: a name is itself; `auto` is the platform's kernel, or `xla`.

    The platform is that of this process's devices: a program for others names its kernel. What `auto` chooses
    for a call is logged, with the reason where it is not a kernel.

    Args:
        implementation: `auto`, or one by name.
        arguments: the call; None asks for the platform's choice, whatever is called.
        tiling: of the call.

    Raises:
        ValueError: the name is unknown.
    """
    names = get_args(Implementation)
    if implementation not in names:
        raise ValueError(
            f"attention implementation must be one of {', '.join(names)}, got {implementation!r}"
        )
    if implementation != "auto":
        return implementation
    kernel = _kernel_of_platform()
    if arguments is None:
        return kernel or "xla"
    if kernel is None:
        reason = f"{jax.local_devices()[0].device_kind} has no kernel"
    elif isinstance(arguments, LatentArguments):
        reason = "latents have no kernel"
    else:
        reason = _module(kernel).refusal(arguments, tiling)
    chosen = kernel if kernel is not None and reason is None else "xla"
    _LOGGER.info("attention: auto -> %s%s", chosen, "" if reason is None else f": {reason}")
    return chosen


def _kernel_of_platform() -> Chosen | None:
    """Return the kernel for the devices here; None where there is none."""
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        return "pallas_tpu"
    # Products of a warp group are an instruction of compute capability 9.0 alone.
    if device.platform == "gpu" and device.compute_capability == "9.0":
        return "pallas_gpu"
    return None


def _module(name: Chosen) -> Any:
    """Return an implementation's module; a kernel's takes a second to import, so only who runs it does."""
    return importlib.import_module(f"kernels_pallas.paged_attention.{name}")


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
        sharding: runs in `shard_map`, sequences and heads split by its rules.

    Raises:
        ValueError: shapes disagree, an option is out of range, `where` or `batch` is missing, `where` is no
            layer of the cache (a traced index is taken on trust), a ragged step is to run on a mesh, or a
            gradient is taken through a cache.
    """
    choose(implementation)
    _check_options(query, window, soft_cap, sinks)
    if cache is None:
        if key is None or value is None:
            raise ValueError("attention without a cache needs keys and values, got None")
        out, log_sum = causal_attention(
            query, key, value, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
        return Attended(out, None, log_sum)
    if (key is None) != (value is None):
        raise ValueError("keys and values are given together or not at all, got one of the two")
    where, batch = _check_place(cache, where, batch, window, sharding)
    group, _ = where
    spec = cache.spec.groups[group]
    if spec.kind != "gqa":
        raise ValueError(f"cache group {group} holds latents: call `attend_latent`")
    _check_heads(spec, key, value)
    if query.shape[-1] != spec.head_dim:
        raise ValueError(f"query head_dim must be the cache's, {spec.head_dim}, got {query.shape[-1]}")

    def local(heads: Any, pool: Pool, batch: TokenBatch, layer: Any):
        query, key, value, sinks = heads
        pieces = batch.pieces((tiling or Tiling()).query_tokens)
        recent = _keys_as_given(pool, key, batch, pieces, layer)
        if key is not None:
            pool = _write(cache.spec, pool, key, value, batch, group, layer)
            pool = _write_runs(pool, key, recent, batch, pieces, layer, cache.spec.page_size)
        arguments = PagedArguments(
            pieces.cut(_turned(spec.codecs[0], query)),
            *_stored_pages(cache.spec, pool, group, layer),
            pieces.of_sequences(pool.page_table),
            pieces.starts,
            pieces.lens,
            layer * pool.num_pages,
            recent,
        )
        paged_attention.check(arguments, num_pages=pool.num_pages, window=window)
        chosen = choose(implementation, arguments, tiling)
        options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
        out, log_sum = _module(chosen).paged_attention(
            arguments,
            num_pages=pool.num_pages,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            **options,
        )
        out = _turned(spec.codecs[1], out, is_inverse=True)
        return pieces.join(out, 0.0), pieces.join(log_sum, -jnp.inf), pool

    heads = ("seq", None, "q_head", None)
    axes = (heads, heads, heads, ("q_head",))
    return _run(local, (query, key, value, sinks), axes, cache, where, batch, sharding)


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
    if implementation not in ("auto", "reference", "xla"):
        raise ValueError(f"latents are attended to by 'reference' or 'xla', got {implementation!r}")
    where, batch = _check_place(cache, where, batch, window, sharding)
    group, _ = where
    spec = cache.spec.groups[group]
    if spec.kind != "latent":
        raise ValueError(f"cache group {group} holds keys and values: call `attend`")
    _check_heads(spec, latent[:, :, None], rope[:, :, None])
    tiling = tiling or Tiling()

    def local(heads: Any, pool: Pool, batch: TokenBatch, layer: Any):
        query, rope_query, latent, rope, up = heads
        pieces = batch.pieces(tiling.query_tokens)
        pool = _write(cache.spec, pool, latent[:, :, None], rope[:, :, None], batch, group, layer)
        turned = functools.partial(_turned, spec.codecs[0])
        arguments = LatentArguments(
            pieces.cut(query if up else turned(query)),
            pieces.cut(_turned(spec.codecs[1], rope_query)),
            *_stored_pages(cache.spec, pool, group, layer),
            pieces.of_sequences(pool.page_table),
            pieces.starts,
            pieces.lens,
            layer * pool.num_pages,
            jax.tree.map(turned, up),
        )
        latent_attention.check(arguments, num_pages=pool.num_pages, window=window)
        chosen = choose(implementation, arguments)
        options: dict[str, Any] = {} if chosen == "reference" else {"tiling": tiling}
        compute = getattr(latent_attention, chosen)
        out, log_sum = compute(arguments, num_pages=pool.num_pages, scale=scale, window=window, **options)
        out = out if up else turned(out, is_inverse=True)
        return pieces.join(out, 0.0), pieces.join(log_sum, -jnp.inf), pool

    heads, rows = ("seq", None, "q_head", None), ("seq", None, None)
    axes = (heads, heads, rows, rows, ("q_head", None, None))
    return _run(local, (query, rope_query, latent, rope, up), axes, cache, where, batch, sharding)


def append(
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    key: Float[Array, "row time kv_head head_dim"],
    value: Float[Array, "row time kv_head value_dim"],
) -> Cache:
    """Write the step's keys and values as `attend` does, and attend to nothing. One device.

    Of latents, `key` is the latent and `value` its rotated part, each with one KV head.

    Raises:
        ValueError: as `attend`.
    """
    group, layer = where
    spec = _find_group(cache, where)
    _check_heads(spec, key, value)
    pool, layer = cache.pools[group], jnp.asarray(layer, jnp.int32)
    pieces = batch.pieces(Tiling().query_tokens)
    recent = _keys_as_given(pool, key, batch, pieces, layer)
    pool = _write(cache.spec, pool, key, value, batch, group, layer)
    pool = _write_runs(pool, key, recent, batch, pieces, layer, cache.spec.page_size)
    return _with_pool(cache, group, pool)


def read_pages(cache: Cache, group: int, which: int, pages: Int[Array, "seq page"]) -> Stored:
    """Return pages as they are stored, `[seq, page, slot, kv_head, ...]`, a run's scales for each slot.

    Args:
        cache: read only.
        group: of the cache.
        which: 0 is keys, 1 values.
        pages: of the group's pool, all layers in one.
    """
    spec, pool = cache.spec.groups[group], cache.pools[group]
    page_size = cache.spec.page_size
    shapes = spec.codecs[which].page_shapes(page_size=page_size, head_dim=spec.dims[which])

    def read(array: Array, shape: tuple[int, ...]) -> Array:
        slots = slots_of(as_matrices(array)[pages], shape)
        return jnp.repeat(jnp.moveaxis(slots, 3, 2), page_size // shape[0], axis=2)

    stored = (pool.keys, pool.values)[which]
    return Stored(**{name: read(getattr(stored, name), array.shape) for name, array in shapes.items()})


def _with_pool(cache: Cache, group: int, pool: Pool) -> Cache:
    return cache.replace(pools=tuple(pool if i == group else other for i, other in enumerate(cache.pools)))


def _write(
    spec: CacheSpec, pool: Pool, key: Any, value: Any, batch: TokenBatch, group: int, layer: Any
) -> Pool:
    """Encode a step's heads, but keys that are encoded in runs, and write them into a layer's slots."""
    codecs, slots = spec.groups[group].codecs, batch.slots[group]
    place = {"page_offset": layer * pool.num_pages, "page_size": spec.page_size}

    def write(stored: Stored, codec: Codec, heads: Any, scales: Any) -> Stored:
        if codec.scaling == "slots":
            return stored
        return jax.tree.map(
            lambda array, rows: page_write.xla(array, rows, slots, **place),
            stored,
            encode(codec, heads, _of_layer(scales, layer)),
        )

    return pool.replace(
        keys=write(pool.keys, codecs[0], key, pool.key_scale),
        values=write(pool.values, codecs[1], value, pool.value_scale),
    )


def _write_runs(
    pool: Pool, key: Any, recent: Any, batch: TokenBatch, pieces: Pieces, layer: Any, page_size: int
) -> Pool:
    """Keep a step's keys as they are, and encode the runs that it has filled; nothing without such runs."""
    if pool.recent is None:
        return pool
    num_recent = pool.recent.shape[2]
    span = num_recent // 2
    table = pieces.of_sequences(pool.page_table)
    whole = whole_runs(recent, table, pieces, page_size=page_size, span=span)

    def write(array: Any, rows: Any) -> Any:
        rows = padded(rows, array.shape[-1])
        place = {"page_offset": layer * pool.num_pages, "page_size": page_size // span}
        return page_write.xla(array, rows, whole.places, **place)

    return pool.replace(
        keys=jax.tree.map(write, pool.keys, whole.stored),
        recent=page_write.xla(
            pool.recent,
            rounded(key),
            recent_slots(batch, span=span),
            page_offset=layer * batch.lens.shape[0],
            page_size=num_recent,
        ),
    )


def _keys_as_given(pool: Pool, key: Any, batch: TokenBatch, pieces: Pieces, layer: Any) -> Any:
    """Return the keys of the runs that pieces touch; None where keys are encoded token by token."""
    if pool.recent is None:
        return None
    num_seqs = batch.lens.shape[0]
    recent = jax.lax.dynamic_slice_in_dim(pool.recent, layer * num_seqs, num_seqs)
    return keys_as_given(recent, None if key is None else rounded(key), batch, pieces)


def _stored_pages(spec: CacheSpec, pool: Pool, group: int, layer: Any) -> tuple[Pages, Pages]:
    """Return what the pool holds as kernels take it, keys and values or latents and their rotated parts."""
    codecs, dims = spec.groups[group].codecs, spec.groups[group].dims

    def pages(codec: Codec, head_dim: int, stored: Stored, scales: Any) -> Pages:
        own = codec.page_shapes(page_size=spec.page_size, head_dim=head_dim).get("scale")
        return Pages(
            stored.data,
            stored.scale if scales is None else _of_layer(scales, layer),
            stored.zero,
            codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2", "int4") else "number",
            PageSizes(spec.page_size, head_dim, None if own is None else own.shape),
        )

    return (
        pages(codecs[0], dims[0], pool.keys, pool.key_scale),
        pages(codecs[1], dims[1], pool.values, pool.value_scale),
    )


def _of_layer(scales: Any, layer: Any) -> Any:
    """Return a layer's calibrated scales `[kv_head]`."""
    return None if scales is None else jax.lax.dynamic_index_in_dim(scales, layer, keepdims=False)


def _turned(codec: Codec, x: Any, *, is_inverse: bool = False) -> Any:
    """Rotate heads as the codec does, in float32; returns their dtype."""
    return rotate(codec, x.astype(jnp.float32), is_inverse=is_inverse).astype(x.dtype)


def _check_options(query: Any, window: int | None, soft_cap: float | None, sinks: Any) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}; None is none")
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(f"sinks must be one a query head, {query.shape[2:3]}, got {sinks.shape}")


def _check_place(
    cache: Cache,
    where: Where | None,
    batch: TokenBatch | None,
    window: int | None,
    sharding: Sharding | None,
) -> tuple[Where, TokenBatch]:
    """Refuse a place that the cache has not, and a window that reaches past what its group keeps."""
    if where is None or batch is None:
        raise ValueError("attention with a cache needs `where` and the `batch` that `cache.begin` returned")
    if sharding is not None and batch.sequences is not None:
        raise ValueError("a ragged step runs on one device, got a mesh; open it with `cache.begin`")
    spec = _find_group(cache, where)
    if spec.window is not None and (window is None or window > spec.window):
        raise ValueError(
            f"the cache group keeps the latest {spec.window} tokens, so a window of at most that is needed, "
            f"got {window}"
        )
    return where, batch


def _find_group(cache: Cache, where: Where) -> CacheGroup:
    """Return the group of a place that the cache has; refuse others, but for traced layers."""
    group, layer = where
    if not 0 <= group < len(cache.pools):
        raise ValueError(f"cache group must be in [0, {len(cache.pools)}), got {group}")
    spec = cache.spec.groups[group]
    if isinstance(layer, int) and not 0 <= layer < spec.num_layers:
        raise ValueError(f"layer must be in [0, {spec.num_layers}) of cache group {group}, got {layer}")
    return spec


def _check_heads(spec: CacheGroup, key: Any, value: Any) -> None:
    names = ("latents", "rotated parts") if spec.kind == "latent" else ("keys", "values")
    for name, rows, dim in zip(names, (key, value), spec.dims, strict=True):
        sizes = (spec.num_kv_heads, dim)
        if rows is not None and rows.shape[2:] != sizes:
            raise ValueError(
                f"{name} must have the cache's KV heads and head_dim, {sizes}, got {rows.shape[2:]}"
            )


def causal_attention(
    query: Float[Array, "seq time q_head head_dim"],
    key: Float[Array, "seq time kv_head head_dim"],
    value: Float[Array, "seq time kv_head value_dim"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
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
    products = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    logits = products("btkgd,bskd->bkgts", rows, key.astype(jnp.float32)) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    past = jnp.arange(time)[:, None] - jnp.arange(time)[None]
    is_seen = past >= 0 if window is None else (past >= 0) & (past < window)
    logits = jnp.where(is_seen[None, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :time]
    out = products("bkgts,bskd->btkgd", weights, value.astype(jnp.float32))
    log_sum = jax.nn.logsumexp(logits, axis=-1).transpose(0, 3, 1, 2).reshape(query.shape[:3])
    return out.reshape(*query.shape[:3], -1).astype(query.dtype), log_sum


def _run(
    local: Any,
    heads: tuple[Any, ...],
    axes: tuple[tuple[str | None, ...], ...],
    cache: Cache,
    where: Where,
    batch: TokenBatch,
    sharding: Sharding | None,
) -> Attended:
    """Call `local(heads, pool, batch, layer)`, on a mesh with what each device has of the logical axes."""
    group, layer = where
    pool, kind = cache.pools[group], cache.spec.groups[group]
    call = local if sharding is None else _over_mesh(local, axes, sharding, kind, pool, batch)
    heads = jax.tree.map(_refuse_gradient, heads)
    out, log_sum, pool = call(heads, pool, batch, jnp.asarray(layer, jnp.int32))
    return Attended(out, _with_pool(cache, group, pool), log_sum)


def _over_mesh(
    local: Any,
    axes: tuple[tuple[str | None, ...], ...],
    sharding: Sharding,
    group: CacheGroup,
    pool: Pool,
    batch: TokenBatch,
) -> Any:
    """Wrap `local` so that each device sees its own sequences, heads and pages."""
    spec = sharding.spec
    rows = spec("seq")
    pool_specs = pool_axes(pool, group, spec)
    table = spec("seq", None)
    slots = tuple(table for _ in batch.slots)
    batch_specs = batch.replace(starts=rows, lens=rows, positions=table, is_valid=table, slots=slots)
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(tuple(spec(*names) for names in axes), pool_specs, batch_specs, spec()),
        out_specs=(spec("seq", None, "q_head", None), spec("seq", None, "q_head"), pool_specs),
        check_vma=False,
    )


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    return x


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError("a gradient through a cache is refused; call the layer without a cache to train it")
