"""What a KV cache is made of and what it costs: sizes and bytes, no arrays.

Imports no JAX, so that capacity can be planned anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jkv.cache.codec import ArraySpec, Codec, find_codec


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have one shape, and so share one pool of pages.

    Attributes:
        num_layers: layers of the group; layer `i` owns its pages at offset `i * num_pages`.
        num_kv_heads: key heads, and as many value heads.
        head_dim: entries of one head.
        codec: how keys are stored, and values too unless they have a codec of their own.
        value_codec: how values are stored; None is as keys.
        window: latest tokens that the layers see; older ones are overwritten. None keeps all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: str = "f32"
    value_codec: str | None = None
    window: int | None = None

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and values."""
        return find_codec(self.codec), find_codec(self.value_codec or self.codec)

    @property
    def num_scales(self) -> int:
        """Calibrated scales, of keys and values, that the group keeps beside its pages."""
        return sum(codec.scaling == "static" for codec in self.codecs) * self.num_layers * self.num_kv_heads

    def page_arrays(
        self, num_pages: int, page_size: int
    ) -> tuple[dict[str, ArraySpec], dict[str, ArraySpec]]:
        """Return what holds `num_pages` pages of every layer: the arrays of keys and of values, by name."""
        sizes = {
            "num_pages": self.num_layers * num_pages,
            "num_kv_heads": self.num_kv_heads,
            "page_size": page_size,
            "head_dim": self.head_dim,
        }
        keys, values = self.codecs
        return keys.page_arrays(**sizes), values.page_arrays(**sizes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers of the group, scales included."""
        return sum(array.nbytes for arrays in self.page_arrays(1, 1) for array in arrays.values())


@dataclass(frozen=True)
class CacheSpec:
    """The declared form of a cache: its groups, its page size, its longest step.

    Attributes:
        groups: cache groups in the order that layers name them.
        page_size: tokens of one page.
        max_chunk: new tokens that a sequence may get in one step where a group has a window.
    """

    groups: tuple[CacheGroup, ...]
    page_size: int
    max_chunk: int

    @classmethod
    def create(cls, groups: Sequence[CacheGroup], *, page_size: int, max_chunk: int = 256) -> "CacheSpec":
        """Check and build a specification.

        Raises:
            ValueError: a size is not positive or does not fit its codec, a codec is unknown, or there is no
                group.
        """
        if not groups:
            raise ValueError("a cache needs at least one group, got none")
        for group in groups:
            sizes = (group.num_layers, group.num_kv_heads, group.head_dim)
            if min(sizes) < 1:
                raise ValueError(f"a group's layers, KV heads and head_dim must be positive, got {sizes}")
            if any(codec.entry == "int4" for codec in group.codecs) and group.head_dim % 2:
                raise ValueError(f"head_dim must be even for int4, two entries a byte, got {group.head_dim}")
            if group.window is not None and group.window < 1:
                raise ValueError(f"window must be at least 1 token, got {group.window}")
        if page_size < 1 or max_chunk < 1:
            raise ValueError(
                f"page_size and max_chunk must be at least 1 token, got {page_size} and {max_chunk}"
            )
        return cls(tuple(groups), page_size, max_chunk)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, page rounding aside; of a window, while it is in it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers of all groups."""
        return self.page_size * self.bytes_per_token

    def pages_for(self, num_tokens: int, group: int = 0) -> int:
        """Return the pages that a sequence of `num_tokens` takes in a group; a window's are bounded."""
        window = self.groups[group].window
        if window is not None:
            num_tokens = min(num_tokens, window + self.max_chunk)
        return -(-num_tokens // self.page_size)

    def dense_bytes(self, num_sequences: int, capacity: int) -> int:
        """Return the bytes of a dense cache's pools.

        Without a codec's scales and windows it is `2 * B * S * L * H_kv * d_h * p`, S in whole pages.
        """
        return sum(
            num_sequences * self.pages_for(capacity, index) * self.page_size * group.bytes_per_token
            + 4 * group.num_scales
            for index, group in enumerate(self.groups)
        )

    def tokens_in(self, budget_bytes: int) -> int:
        """Return the tokens, in whole pages, whose keys and values fit in `budget_bytes`."""
        return budget_bytes // self.bytes_per_page * self.page_size
