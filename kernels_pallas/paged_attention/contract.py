"""What paged attention may be called with, and how its work is tiled.

Checks shapes only; every refusal names the sizes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Tiling:
    """How the walk over a sequence's tokens is cut; fixed by configuration, never by the batch.

    Attributes:
        block_tokens: keys and values that one step of the online softmax takes, rounded to whole pages.
    """

    block_tokens: int = 128


class PagedArguments(NamedTuple):
    """The arrays of one call, in the `plain` pool layout (KV-head-major within a page).

    Attributes:
        query: the new tokens, padded per sequence.
        key_pool: pages of all layers; a page is `[kv_head, slot, head_dim]`.
        value_pool: the same for values.
        page_table: logical page of a sequence -> page of its layer; ids past `num_pages` or negative: none.
        starts: tokens that each sequence held before this step.
        lens: new tokens of each sequence, already written to the pool; 0 for an idle row.
        page_offset: the pool's page that is page 0 of this layer.
    """

    query: Float[Array, "seq time q_head head_dim"]
    key_pool: Float[Array, "page kv_head slot head_dim"]
    value_pool: Float[Array, "page kv_head slot head_dim"]
    page_table: Int[Array, "seq max_pages"]
    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    page_offset: Int[Array, ""] | int


def check(arguments: PagedArguments, *, num_pages: int, window: int | None) -> None:
    """Refuse shapes that no implementation computes.

    Raises:
        ValueError: sizes disagree; the message names them.
    """
    query, keys, values = arguments.query, arguments.key_pool, arguments.value_pool
    if keys.shape != values.shape:
        raise ValueError(f"key and value pools must have one shape, got {keys.shape} and {values.shape}")
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(f"query head_dim must equal the pool's, got {query.shape[-1]} and {keys.shape[-1]}")
    if query.shape[2] % keys.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query.shape[2]} and {keys.shape[1]}"
        )
    if keys.shape[0] % num_pages:
        raise ValueError(
            f"pool pages must be a multiple of pages a layer, got {keys.shape[0]} and {num_pages}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not jax.numpy.issubdtype(keys.dtype, jax.numpy.floating):
        raise ValueError(f"pool dtype must be floating, got {keys.dtype}")
