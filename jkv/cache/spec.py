"""What a KV cache is made of and what it costs: sizes and bytes, no arrays.

Imports no JAX, so that capacity can be planned anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Codec = Literal["f32", "bf16"]
CODEC_BYTES: dict[str, int] = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have one shape, and so share one pool of pages.

    Attributes:
        num_layers: layers of the group; layer `i` owns its pages at offset `i * num_pages`.
        num_kv_heads: key heads, and as many value heads.
        head_dim: entries of one head.
        codec: how keys and values are stored.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: Codec = "f32"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers of the group."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * CODEC_BYTES[self.codec]


@dataclass(frozen=True)
class CacheSpec:
    """The declared form of a cache: its groups and its page size.

    Attributes:
        groups: cache groups in the order that layers name them.
        page_size: tokens of one page.
    """

    groups: tuple[CacheGroup, ...]
    page_size: int

    @classmethod
    def create(cls, groups: Sequence[CacheGroup], *, page_size: int) -> "CacheSpec":
        """Check and build a specification.

        Raises:
            ValueError: a size is not positive, a codec is unknown, or there is no group.
        """
        if not groups:
            raise ValueError("a cache needs at least one group, got none")
        for group in groups:
            sizes = (group.num_layers, group.num_kv_heads, group.head_dim)
            if min(sizes) < 1:
                raise ValueError(f"a group's layers, KV heads and head_dim must be positive, got {sizes}")
            if group.codec not in get_args(Codec):
                raise ValueError(f"codec must be one of {get_args(Codec)}, got {group.codec!r}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        return cls(tuple(groups), page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, page rounding aside."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers of all groups."""
        return self.page_size * self.bytes_per_token

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that a sequence of `num_tokens` takes."""
        return -(-num_tokens // self.page_size)

    def dense_bytes(self, num_sequences: int, capacity: int) -> int:
        """Return the bytes of a dense cache's pools, `2 * B * S * L * H_kv * d_h * p`, S in whole pages."""
        return num_sequences * self.pages_for(capacity) * self.bytes_per_page

    def tokens_in(self, budget_bytes: int) -> int:
        """Return the tokens, in whole pages, whose keys and values fit in `budget_bytes`."""
        return budget_bytes // self.bytes_per_page * self.page_size

    def pool_shape(self, group: int, num_pages: int) -> tuple[int, int, int, int]:
        """Return the shape `(page, kv_head, slot, head_dim)` of a group's key pool, `num_pages` a layer."""
        sizes = self.groups[group]
        return (sizes.num_layers * num_pages, sizes.num_kv_heads, self.page_size, sizes.head_dim)
