"""Calls of paged attention at a model's sizes, as shapes: what compilers are given."""

import jax
import jax.numpy as jnp

from jkv.cache.codec import CODECS, Codec
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes
from kernels_pallas.paged_attention.shapes import Shape


def model_arguments(shape: Shape, codec_name: str, num_layers: int = 2) -> tuple[PagedArguments, int]:
    """Return the shapes of a bfloat16 model's call, each sequence with its own pages, and a layer's pages."""
    codec, num_seqs = CODECS[codec_name], len(shape.totals)
    width = -(-max(shape.totals) // shape.page_size)
    num_pages = num_seqs * width

    def make() -> PagedArguments:
        query = jnp.zeros((num_seqs, shape.time, shape.num_heads, shape.head_dim), jnp.bfloat16)
        keys, values = (make_pages(codec, shape, num_layers * num_pages) for _ in range(2))
        rows = jnp.zeros(num_seqs, jnp.int32)
        return PagedArguments(
            query, keys, values, jnp.zeros((num_seqs, width), jnp.int32), rows, rows, rows[0]
        )

    return jax.eval_shape(make), num_pages


def make_pages(codec: Codec, shape: Shape, total_pages: int) -> Pages:
    """Return pages of zeros in the pool layout of TPUs."""
    sizes = {"page_size": shape.page_size, "head_dim": shape.head_dim}
    of_pool = {"num_pages": total_pages, "num_kv_heads": shape.num_kv_heads, "layout": "tpu"}
    arrays = {
        name: jnp.zeros(array.shape, array.dtype)
        for name, array in codec.page_arrays(**of_pool, **sizes).items()
    }
    if codec.scaling == "static":
        arrays["scale"] = jnp.zeros(shape.num_kv_heads)
    scales = codec.page_shapes(**sizes).get("scale")
    entry = codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2", "int4") else "number"
    return Pages(**arrays, entry=entry, stated=PageSizes(**sizes, scales=scales and scales.shape))
