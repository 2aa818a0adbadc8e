"""What goes into the pages of one layer, and what comes out of them.

Knows codecs and runs of slots; attends to nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkv.cache.batch import Pieces, TokenBatch
from jkv.cache.cache import Cache, Pool
from jkv.cache.codec import Codec
from jkv.cache.encoding import Stored, encode, hadamard, rotate
from jkv.cache.runs import keys_as_given, recent_slots, rounded, whole_runs
from jkv.cache.spec import CacheSpec
from jkv.ops.choice import Writer
from kernels_pallas import page_write
from kernels_pallas.paged_attention import Pages, PageSizes
from kernels_pallas.slots import as_matrices, slots_of


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


def write(
    spec: CacheSpec,
    pool: Pool,
    heads: tuple[Any, Any],
    batch: TokenBatch,
    where: tuple[int, Any],
    writer: Writer,
) -> Pool:
    """Encode a step's heads, but keys that are encoded in runs, and write them into a layer's slots.

    Args:
        spec: of the cache.
        pool: of the group.
        heads: keys and values.
        batch: the step.
        where: the group and the layer.
        writer: see `choose_writer`.
    """
    group, layer = where
    codecs, slots = spec.groups[group].codecs, batch.slots[group]
    page_offset, pages = layer * pool.num_pages, stored_pages(spec, pool, group, layer)
    is_rotated = all(codec.is_rotated for codec in codecs)
    if is_rotated and (write_heads := writer.encoding(pages, heads)) is not None:
        rotations = tuple(map(hadamard, spec.groups[group].dims))
        written = write_heads(pages, heads, rotations, slots, page_offset=page_offset)
        keys, values = (Stored(data=data, scale=scale) for data, scale in written)
        return pool.replace(keys=keys, values=values)

    def write(stored: Stored, codec: Codec, heads: Any, scales: Any) -> Stored:
        if codec.scaling == "slots":
            return stored
        return jax.tree.map(
            lambda array, rows: writer.rows(
                array, rows, slots, page_offset=page_offset, page_size=spec.page_size
            ),
            stored,
            encode(codec, heads, _of_layer(scales, layer)),
        )

    return pool.replace(
        keys=write(pool.keys, codecs[0], heads[0], pool.key_scale),
        values=write(pool.values, codecs[1], heads[1], pool.value_scale),
    )


def write_runs(
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
        # Of entries the runs' slots, of scales and zero points one a run.
        slots = span if rows.ndim == 5 else 1
        place = {"page_offset": layer * pool.num_pages, "page_size": page_size // span * slots}
        return page_write.xla(array, rows, whole.places * slots, **place)

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


def recent_keys(pool: Pool, key: Any, batch: TokenBatch, pieces: Pieces, layer: Any) -> Any:
    """Return the keys of the runs that pieces touch; None where keys are encoded token by token."""
    if pool.recent is None:
        return None
    num_seqs = batch.lens.shape[0]
    recent = jax.lax.dynamic_slice_in_dim(pool.recent, layer * num_seqs, num_seqs)
    return keys_as_given(recent, None if key is None else rounded(key), batch, pieces)


def stored_pages(spec: CacheSpec, pool: Pool, group: int, layer: Any) -> tuple[Pages, Pages]:
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


def turned(codec: Codec, x: Any, *, is_inverse: bool = False) -> Any:
    """Rotate heads as the codec does, in float32; returns their dtype."""
    return rotate(codec, x.astype(jnp.float32), is_inverse=is_inverse).astype(x.dtype)
