"""Latent attention in plain JAX that reads only the pages in use.

The walk is that of `paged_attention.xla`. Absorbed, all query heads are rows of one KV head whose keys are a
block of latents and of their rotated parts, and whose values are the same latents: a block is gathered once
and stays as it is stored. Expanded, a block of latents becomes keys and values of every head: more products
for each block, and fewer for each query row of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.latent_attention.contract import LatentArguments
from kernels_pallas.paged_attention import Pages, Tiling
from kernels_pallas.paged_attention.contract import check_rows
from kernels_pallas.paged_attention.xla import (
    finish,
    follow,
    gather,
    head_rows,
    logits_of,
    no_sums,
    plan_walk,
    products,
)


def latent_attention(
    arguments: LatentArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.latent_attention` defines; logits, softmax and sums are float32.

    Raises:
        ValueError: rows are not the sequences', or there are none.
    """
    check_rows(arguments)
    query, rope_query, latents, ropes, up = (*arguments[:4], arguments.up)
    num_seqs, time, num_heads, _ = query.shape
    num_kv_heads = 1 if up is None else num_heads
    group = num_heads // num_kv_heads
    rows, rope_rows = head_rows(query * scale, num_kv_heads), head_rows(rope_query * scale, 1)
    walk = plan_walk(
        *arguments[4:8],
        arguments.stripe,
        row_tokens=(time, group),
        num_pages=num_pages,
        page_size=latents.page_size,
        window=window,
        tiling=tiling or Tiling(),
    )

    def absorbed(pages: Int[Array, "seq page"]) -> tuple[jax.Array, Pages]:
        block = gather(latents, pages)
        return logits_of(rows, block) + logits_of(rope_rows, gather(ropes, pages)), block

    def expanded(pages: Int[Array, "seq page"]) -> tuple[jax.Array, Pages]:
        assert up is not None
        block = _entries(gather(latents, pages)).astype(up.key.dtype)
        keys, values = (Pages(products("bksl,hdl->bhsd", block, weight).astype(rows.dtype)) for weight in up)
        rotary = logits_of(rope_rows, gather(ropes, pages))
        rotary = rotary.reshape(num_seqs, time, num_heads, -1).swapaxes(1, 2)
        return logits_of(rows, keys) + rotary, values

    value_dim = latents.head_dim if up is None else up.value.shape[1]
    sums = no_sums((num_seqs, num_kv_heads, time * group), value_dim)
    out, log_sum = finish(follow(walk, sums, absorbed if up is None else expanded), time)
    return out.astype(query.dtype), log_sum


def _entries(block: Pages) -> Float[Array, "seq kv_head slot width"]:
    """Return the float32 numbers that a block stands for."""
    entries = block.read(block.data).astype(jnp.float32)
    if block.scale is None:
        return entries
    scale = block.scale.astype(jnp.float32)
    if block.zero is not None:
        span = entries.shape[-1] // scale.shape[-1]
        zero = jnp.repeat(block.zero.astype(jnp.float32), span, axis=-1)
        return entries * jnp.repeat(scale, span, axis=-1) + zero
    return entries * (scale[None, :, None, None] if scale.ndim == 1 else scale[..., None])
