"""What a KV cache is made of and what it costs: sizes and bytes, no arrays.

Imports no JAX, so that capacity can be planned anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_args

from jkv.cache.codec import ArraySpec, Codec, PoolLayout, find_codecs

GroupKind = Literal["gqa", "latent"]

# Pages that share a block of the GPU kernel's 64 tokens; larger ones hold whole blocks. Mosaic's tiles for a
# GPU's matrix units are 8 rows high.
GPU_BLOCK, GPU_SMALL_PAGES = 64, (8, 16, 32)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have one shape, and so share one pool of pages.

    A `latent` group (multi-head latent attention, DeepSeek-V2, section 2.1) holds one vector a token that all
    heads share, and beside it the part of the keys that is rotated.

    Attributes:
        num_layers: layers of the group; layer `i` owns its pages at offset `i * num_pages`.
        num_kv_heads: key heads, and as many value heads; 1 of a latent.
        head_dim: entries of one head, or of the latent.
        codec: how keys are stored, and values too unless they have a codec of their own; or the latent.
        value_codec: how values are stored; None is as keys.
        window: latest tokens that the layers see; older ones are overwritten. None keeps all.
        kind: what a token leaves behind.
        rope_dim: entries of the rotated part beside a latent.
        rope_codec: how that part is stored; None is f32 beside a latent in f32, else bf16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: str = "f32"
    value_codec: str | None = None
    window: int | None = None
    kind: GroupKind = "gqa"
    rope_dim: int = 0
    rope_codec: str | None = None

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and values, or of the latent, which is both, and its rotated part."""
        if self.kind == "latent":
            rope_codec = self.rope_codec or ("f32" if self.codec == "f32" else "bf16")
            return find_codecs(self.codec)[1], find_codecs(rope_codec)[1]
        return find_codecs(self.codec, self.value_codec)

    @property
    def dims(self) -> tuple[int, int]:
        """The entries of a key and of a value, or of the latent and its rotated part."""
        return self.head_dim, self.rope_dim if self.kind == "latent" else self.head_dim

    @property
    def head_axis(self) -> str | None:
        """The logical axis of heads in the group's arrays; None of a latent, which devices hold whole."""
        return None if self.kind == "latent" else "kv_head"

    @property
    def scale_arrays(self) -> list[ArraySpec]:
        """The arrays of calibrated scales, of keys and of values, that the group keeps beside its pages."""
        scales = ArraySpec((self.num_layers, self.num_kv_heads), "float32")
        return [scales for codec in self.codecs if codec.scaling == "static"]

    def page_arrays(
        self, num_pages: int, page_size: int, layout: PoolLayout = "plain"
    ) -> tuple[dict[str, ArraySpec], dict[str, ArraySpec]]:
        """Return what holds `num_pages` pages of every layer: the arrays of keys and of values, by name."""
        sizes: dict[str, Any] = {
            "num_pages": self.num_layers * num_pages,
            "num_kv_heads": self.num_kv_heads,
            "page_size": page_size,
            "layout": layout,
        }
        (keys, values), (key_dim, value_dim) = self.codecs, self.dims
        return keys.page_arrays(**sizes, head_dim=key_dim), values.page_arrays(**sizes, head_dim=value_dim)

    def page_bytes(self, page_size: int, layout: PoolLayout = "plain") -> int:
        """Return the bytes of one page in all layers of the group, scales included."""
        arrays = self.page_arrays(1, page_size, layout)
        return sum(array.padded_bytes(layout) for part in arrays for array in part.values())

    def recent_keys(self, num_sequences: int, page_size: int) -> ArraySpec | None:
        """Return the array of each sequence's latest keys as they were given; None where no codec needs it.

        It holds two runs of slots: the open one, and one that a truncation may open again.
        """
        codec, _ = self.codecs
        if codec.scaling != "slots":
            return None
        rows = self.num_layers * num_sequences
        return ArraySpec((rows, self.num_kv_heads, 2 * codec.span(page_size), self.head_dim), "bfloat16")

    def sequence_bytes(self, page_size: int, layout: PoolLayout = "plain") -> int:
        """Return the bytes that a sequence takes beside its pages."""
        recent = self.recent_keys(1, page_size)
        return 0 if recent is None else recent.padded_bytes(layout)

    def split_heads(self, num_ways: int) -> "CacheGroup":
        """Return the group of one device of `num_ways` that share the KV heads; each holds a latent whole.

        Raises:
            ValueError: the heads do not split evenly.
        """
        if self.kind == "latent":
            return self
        if not is_whole(num_ways, at_least=1) or self.num_kv_heads % num_ways:
            raise ValueError(
                f"KV heads must split evenly over devices, got {self.num_kv_heads} over {num_ways}; "
                "split them fewer ways"
            )
        return replace(self, num_kv_heads=self.num_kv_heads // num_ways)


@dataclass(frozen=True)
class CacheSpec:
    """The declared form of a cache: its groups, its page size, its longest step.

    Attributes:
        groups: cache groups in the order that layers name them.
        page_size: tokens of one page.
        max_chunk: new tokens that a sequence may get in one step where a group has a window.
        layout: how the slots of a page lie, and the device whose padding and limits hold; `plain` has none.
        num_stripes: devices that share the pages of each sequence, those of the rule `context`: page `p` is
            on device `p` modulo their number.
    """

    groups: tuple[CacheGroup, ...]
    page_size: int
    max_chunk: int
    layout: PoolLayout = "plain"
    num_stripes: int = 1

    @classmethod
    def create(
        cls,
        groups: Sequence[CacheGroup],
        *,
        page_size: int,
        max_chunk: int = 256,
        layout: PoolLayout = "plain",
        num_stripes: int = 1,
    ) -> "CacheSpec":
        """Check and build a specification.

        Raises:
            ValueError: a size is not positive or does not fit its codec or the layout, a name is unknown, or
                there is no group.
        """
        if not groups:
            raise ValueError("a cache needs at least one group, got none")
        for group in groups:
            _check_group(group)
        if not is_whole(page_size, max_chunk, at_least=1):
            raise ValueError(
                f"page_size and max_chunk must be whole and at least 1 token, got {page_size} and {max_chunk}"
            )
        for group in groups:
            for codec, dim in zip(group.codecs, group.dims, strict=True):
                codec.check(head_dim=dim, page_size=page_size)
        if not is_whole(num_stripes, at_least=1):
            raise ValueError(f"pages must have at least 1 stripe, got {num_stripes}")
        spec = cls(tuple(groups), page_size, max_chunk, layout, num_stripes)
        _check_layout(spec)
        return spec

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, page rounding aside; of a window, while it is in it."""
        return self.bytes_per_page // self.page_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers of all groups, before a device pads them."""
        return sum(group.page_bytes(self.page_size) for group in self.groups)

    @property
    def padded_bytes_per_page(self) -> int:
        """Bytes of one page in all layers of all groups on the layout's device."""
        return sum(group.page_bytes(self.page_size, self.layout) for group in self.groups)

    @property
    def padded_bytes_per_token(self) -> int:
        """Bytes that one token takes on the layout's device, a part of a byte rounded up."""
        return -(-self.padded_bytes_per_page // self.page_size)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that a sequence takes beside its pages on the layout's device: its latest keys as given."""
        return sum(group.sequence_bytes(self.page_size, self.layout) for group in self.groups)

    @property
    def scale_bytes(self) -> int:
        """Bytes of calibrated scales on the layout's device."""
        return sum(array.padded_bytes(self.layout) for group in self.groups for array in group.scale_arrays)

    def pages_for(self, num_tokens: int, group: int = 0) -> int:
        """Return the pages that a sequence of `num_tokens` takes in a group, those of all stripes.

        A window's are bounded, by as many of each stripe.

        Raises:
            ValueError: the tokens are no count, here and in all that follows.
        """
        _check_counts("num_tokens", num_tokens)
        pages, window = -(-num_tokens // self.page_size), self.groups[group].window
        if window is None:
            return pages
        kept = -(-(window + self.max_chunk) // self.page_size)
        return min(pages, -(-kept // self.num_stripes) * self.num_stripes)

    def stripe_pages(self, num_tokens: int, group: int = 0) -> int:
        """Return the pages of `pages_for` that a device has: of several stripes the first, which has most."""
        return -(-self.pages_for(num_tokens, group) // self.num_stripes)

    def table_width(self, capacity: int, group: int = 0) -> int:
        """Return the columns of a group's page table: whole rounds of stripes."""
        return self.num_stripes * self.stripe_pages(capacity, group)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that a sequence of `num_tokens` takes, in whole pages and with their padding.

        Of several stripes those on the first device, as in all that follows.
        """
        return self.bytes_per_sequence + sum(
            self.stripe_pages(num_tokens, index) * group.page_bytes(self.page_size, self.layout)
            for index, group in enumerate(self.groups)
        )

    def dense_bytes(self, num_sequences: int, capacity: int) -> int:
        """Return the bytes of a dense cache's pools, and what sequences have beside them.

        Without a codec's scales, windows and padding it is `2 * B * S * L * H_kv * d_h * p`, S in whole
        pages.
        """
        _check_counts("num_sequences", num_sequences)
        return num_sequences * self.bytes_for(capacity) + self.scale_bytes

    def paged_bytes(self, num_sequences: int, num_pages: Sequence[int]) -> int:
        """Return the bytes of the pools of a paged cache with so many pages a group."""
        _check_counts("num_sequences", num_sequences)
        _check_counts("num_pages", *num_pages)
        if len(num_pages) != len(self.groups):
            raise ValueError(
                f"num_pages must have one entry a group, got {len(num_pages)} for {len(self.groups)}"
            )
        return (
            num_sequences * self.bytes_per_sequence
            + self.scale_bytes
            + sum(
                pages * group.page_bytes(self.page_size, self.layout)
                for pages, group in zip(num_pages, self.groups, strict=True)
            )
        )

    def table_bytes(self, num_sequences: int, capacity: int) -> int:
        """Return the bytes of the page tables, and of three counts a sequence."""
        _check_counts("num_sequences", num_sequences)
        width = sum(self.table_width(capacity, group) for group in range(len(self.groups)))
        return 4 * num_sequences * (width + 3)

    def tokens_in(self, budget_bytes: int) -> int:
        """Return the tokens, in whole pages, whose keys and values fit in `budget_bytes` of each device."""
        _check_counts("budget_bytes", budget_bytes)
        return self.num_stripes * (budget_bytes // self.padded_bytes_per_page) * self.page_size

    def split_heads(self, num_ways: int) -> "CacheSpec":
        """Return the specification of one device of `num_ways` that share the KV heads.

        Raises:
            ValueError: the heads do not split evenly.
        """
        return replace(self, groups=tuple(group.split_heads(num_ways) for group in self.groups))


def is_whole(*sizes: Any, at_least: int) -> bool:
    """Whether all sizes are integers, Python's or NumPy's, of at least so much."""
    wholes = [int(size) for size in sizes if isinstance(size, Integral) and not isinstance(size, bool)]
    return len(wholes) == len(sizes) and all(size >= at_least for size in wholes)


def _check_counts(name: str, *counts: Any) -> None:
    if not is_whole(*counts, at_least=0):
        raise ValueError(f"{name} must be whole and at least 0, got {', '.join(map(str, counts))}")


def _check_group(group: CacheGroup) -> None:
    sizes = (group.num_layers, group.num_kv_heads, group.head_dim)
    if not is_whole(*sizes, at_least=1):
        raise ValueError(f"a group's layers, KV heads and head_dim must be whole and positive, got {sizes}")
    if group.window is not None and not is_whole(group.window, at_least=1):
        raise ValueError(f"window must be whole and at least 1 token, got {group.window}")
    if group.kind not in get_args(GroupKind):
        raise ValueError(f"a group's kind must be one of {get_args(GroupKind)}, got {group.kind!r}")
    is_rotated = is_whole(group.rope_dim, at_least=1)
    if group.kind == "latent" and (group.num_kv_heads != 1 or not is_rotated or group.value_codec):
        raise ValueError(
            "a latent group must have 1 KV head, a positive rope_dim and no value_codec, "
            f"got {group.num_kv_heads}, {group.rope_dim} and {group.value_codec}; codec is that of both"
        )
    if group.kind == "gqa" and (group.rope_dim or group.rope_codec):
        raise ValueError(
            "rope_dim and rope_codec belong to a latent group, "
            f"got {group.rope_dim} and {group.rope_codec} in one of kind 'gqa'"
        )


def _check_layout(spec: CacheSpec) -> None:
    if spec.layout not in get_args(PoolLayout):
        raise ValueError(f"a pool's layout must be one of {get_args(PoolLayout)}, got {spec.layout!r}")
    if spec.layout == "gpu" and spec.page_size not in GPU_SMALL_PAGES and spec.page_size % GPU_BLOCK:
        raise ValueError(
            f"page_size must be {', '.join(map(str, GPU_SMALL_PAGES))} or a multiple of {GPU_BLOCK} in the "
            f"layout 'gpu', got {spec.page_size}"
        )
