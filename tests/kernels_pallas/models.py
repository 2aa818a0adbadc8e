"""Calls of attention at a model's sizes, as shapes: what compilers are given."""

import jax
import jax.numpy as jnp

from jkv.cache.codec import Codec, PoolLayout, find_codecs
from jkv.cache.runs import num_runs
from jkv.cache.spec import CacheGroup
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes
from kernels_pallas.paged_attention.shapes import Shape


def model_arguments(
    shape: Shape, codec_name: str, num_layers: int = 2, layout: PoolLayout = "tpu"
) -> tuple[PagedArguments, int]:
    """Return the shapes of a bfloat16 model's call, each sequence with its own pages, and a layer's pages."""
    codecs, num_seqs = find_codecs(*codec_name.split("/")), len(shape.totals)
    width = -(-max(shape.totals) // shape.page_size)
    num_pages = num_seqs * width

    def make() -> PagedArguments:
        query = jnp.zeros((num_seqs, shape.time, shape.num_heads, shape.head_dim), jnp.bfloat16)
        sizes = {"page_size": shape.page_size, "head_dim": shape.head_dim}
        of_pool = {"num_pages": num_layers * num_pages, "num_kv_heads": shape.num_kv_heads}
        keys, values = (make_pages(codec, of_pool, sizes, layout) for codec in codecs)
        rows, table = jnp.zeros(num_seqs, jnp.int32), jnp.zeros((num_seqs, width), jnp.int32)
        recent = None
        if keys.run_slots is not None:
            num_recent = num_runs(shape.time, keys.run_slots) * keys.run_slots
            recent = jnp.zeros((num_seqs, shape.num_kv_heads, num_recent, shape.head_dim), jnp.bfloat16)
        return PagedArguments(query, keys, values, table, rows, rows, rows[0], recent)

    return jax.eval_shape(make), num_pages


def latent_arguments(
    shape: LatentShape, codec_name: str, num_layers: int = 2, layout: PoolLayout = "tpu"
) -> tuple[LatentArguments, int]:
    """Return the same of an absorbed call of latent attention."""
    group = CacheGroup(num_layers, 1, shape.latent_dim, codec_name, kind="latent", rope_dim=shape.rope_dim)
    num_seqs = len(shape.totals)
    width = -(-max(shape.totals) // shape.page_size)
    num_pages = num_seqs * width

    def make() -> LatentArguments:
        query, rope_query = (
            jnp.zeros((num_seqs, shape.time, shape.num_heads, dim), jnp.bfloat16) for dim in group.dims
        )
        of_pool = {"num_pages": num_layers * num_pages, "num_kv_heads": 1}
        latents, ropes = (
            make_pages(codec, of_pool, {"page_size": shape.page_size, "head_dim": dim}, layout)
            for codec, dim in zip(group.codecs, group.dims, strict=True)
        )
        rows, table = jnp.zeros(num_seqs, jnp.int32), jnp.zeros((num_seqs, width), jnp.int32)
        return LatentArguments(query, rope_query, latents, ropes, table, rows, rows, rows[0])

    return jax.eval_shape(make), num_pages


def make_pages(
    codec: Codec, of_pool: dict[str, int], sizes: dict[str, int], layout: PoolLayout = "tpu"
) -> Pages:
    """Return pages of zeros.

    Args:
        codec: how they are stored.
        of_pool: `num_pages` and `num_kv_heads`.
        sizes: `page_size` and `head_dim`.
        layout: of the pool.
    """
    arrays = {
        name: jnp.zeros(array.shape, array.dtype)
        for name, array in codec.page_arrays(**of_pool, **sizes, layout=layout).items()
    }
    if codec.scaling == "static":
        arrays["scale"] = jnp.zeros(of_pool["num_kv_heads"])
    scales = codec.page_shapes(**sizes).get("scale")
    entry = codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2", "int4") else "number"
    return Pages(**arrays, entry=entry, stated=PageSizes(**sizes, scales=scales and scales.shape))
