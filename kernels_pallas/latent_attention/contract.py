"""What latent attention may be called with, in its two forms.

Checks shapes only; every refusal names the sizes.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention import Pages, Stripe
from kernels_pallas.paged_attention.contract import check_pages, check_rows, check_walk


class UpProjections(NamedTuple):
    """What makes the keys and values of each head of a latent."""

    key: Float[Array, "q_head head_dim latent"]
    value: Float[Array, "q_head value_dim latent"]


class LatentArguments(NamedTuple):
    """The arrays of one call (DeepSeek-V2, sections 2.1.2 and 2.1.3).

    A token has a latent `c` and a rotated part `r`. Expanded, head `h` has the key `[K_h c, r]` and the value
    `V_h c`. Absorbed, its query is `[K_h^T q, q_r]`, so that all heads share the key `[c, r]` and the value
    `c`, and `V_h` is left to the caller.

    Attributes:
        query: the new tokens, padded per sequence; as wide as a latent, or with `up` as a head's key.
        rope_query: the rotated part of the same queries.
        latents: pages of all layers, with one KV head.
        ropes: the same of the rotated parts, in the same places.
        page_table: as `PagedArguments`, as the next three.
        starts: see there.
        lens: see there.
        page_offset: see there.
        up: in the expanded form, `K` and `V`; None is the absorbed one.
        stripe: see there.
    """

    query: Float[Array, "seq time q_head width"]
    rope_query: Float[Array, "seq time q_head rope"]
    latents: Pages
    ropes: Pages
    page_table: Int[Array, "seq max_pages"]
    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    page_offset: Int[Array, ""] | int
    up: UpProjections | None = None
    stripe: Stripe | None = None


def check(arguments: LatentArguments, *, num_pages: int, window: int | None) -> None:
    """Refuse shapes that no implementation computes.

    Raises:
        ValueError: sizes disagree; the message names them.
    """
    query, latents, ropes, up = arguments.query, arguments.latents, arguments.ropes, arguments.up
    check_rows(arguments)
    for pages in (latents, ropes):
        check_pages(pages)
    sizes = [(*pages.data.shape[:2], pages.page_size) for pages in (latents, ropes)]
    if sizes[0] != sizes[1] or latents.data.shape[1] != 1:
        raise ValueError(
            "latents and their rotated parts must have the same pages and slots, and one KV head, "
            f"got {sizes[0]} and {sizes[1]}"
        )
    width = latents.head_dim
    if up is not None:
        _check_up(up, query, latents)
        width = up.key.shape[1]
    sizes, needed = (query.shape[-1], arguments.rope_query.shape[-1]), (width, ropes.head_dim)
    if sizes != needed:
        raise ValueError(f"queries and their rotated parts must have {needed} entries, got {sizes}")
    check_walk(latents.data.shape[0], num_pages=num_pages, window=window)
    if latents.run_slots is not None or ropes.run_slots is not None:
        raise ValueError("latents must be scaled by token, head or channels, got scales of runs of slots")


def _check_up(up: UpProjections, query: jax.Array, latents: Pages) -> None:
    for weight in up:
        if (weight.shape[0], weight.shape[2]) != (query.shape[2], latents.head_dim):
            raise ValueError(
                "up-projections must have the query's heads and the latent's entries, "
                f"{(query.shape[2], latents.head_dim)}, got {(weight.shape[0], weight.shape[2])}"
            )
