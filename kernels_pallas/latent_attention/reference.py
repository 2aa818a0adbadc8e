"""The definition of latent attention: paged attention over keys and values made of every latent, in float32.

The oracle of every other implementation; clarity over speed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.latent_attention.contract import LatentArguments
from kernels_pallas.paged_attention import PagedArguments, Pages
from kernels_pallas.paged_attention import reference as paged_attention
from kernels_pallas.paged_attention.reference import heads_of


def latent_attention(
    arguments: LatentArguments, *, num_pages: int, scale: float, window: int | None = None
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
    """Attend from each new token to the tokens of its own sequence at or before its position.

    Args:
        arguments: pools, table and query; see `LatentArguments`.
        num_pages: pages that one layer owns in the pool.
        scale: multiplies the logits.
        window: latest positions that a query sees, its own included.

    Returns:
        The output in the query's dtype, latents in the absorbed form, values in the expanded one; and the
        float32 log-sum-exp of the logits. Rows past a sequence's `lens` are zero, with a log-sum-exp of -inf.
    """
    latents, ropes, up = _pool(arguments.latents), _pool(arguments.ropes), arguments.up
    if up is None:
        keys, values = latents, latents
    else:
        keys, values = (
            jnp.einsum(
                "pksl,hdl->phsd", latents, weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
            )
            for weight in up
        )
    ropes = jnp.broadcast_to(ropes, (*keys.shape[:3], ropes.shape[-1]))
    out, log_sum = paged_attention(
        PagedArguments(
            jnp.concatenate([arguments.query, arguments.rope_query], axis=-1),
            Pages(jnp.concatenate([keys, ropes], axis=-1)),
            Pages(values),
            *arguments[4:8],
            stripe=arguments.stripe,
        ),
        num_pages=num_pages,
        scale=scale,
        window=window,
    )
    return out, log_sum


def _pool(pages: Pages) -> Float[Array, "page 1 slot width"]:
    """Return the float32 entries of a whole pool."""
    num_pages = pages.data.shape[0]
    heads = heads_of(pages, jnp.arange(num_pages, dtype=jnp.int32)[None])
    return heads.reshape(num_pages, 1, -1, pages.head_dim)
