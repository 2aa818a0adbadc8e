"""What follows from a decoder's sizes: its parameters, its cache groups, the widths of a step.

Knows shapes and logical axes; allocates nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from jkv.cache.spec import CacheGroup
from jkv.config import ExpertSizes, LatentSizes, MeshSection, SizesSection

Stored = Literal["float32", "bfloat16", "int8", "int4"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# `jkv.layers.quantized`: a float32 scale an output, or a scale and a minimum for each 32 inputs.
_SCALE_BYTES, _GROUP = 4, 32


@dataclass(frozen=True)
class Parameters:
    """Parameters of one shape.

    Attributes:
        count: how many arrays there are.
        axes: logical axis and entries of each dimension; an axis without a name is never split.
        role: a head or an embedding is packed in no less than 8 bits; `other` is not packed.
    """

    count: int
    axes: tuple[tuple[str, int], ...]
    role: Literal["projection", "head", "other"] = "other"

    def num_parameters(self, mesh: MeshSection | None = None) -> int:
        """Return the entries of all arrays, or of one device's part of them."""
        ways = [mesh.shards(axis) if mesh else 1 for axis, _ in self.axes]
        return self.count * prod(size // part for (_, size), part in zip(self.axes, ways, strict=True))

    def num_bytes(self, stored: Stored, mesh: MeshSection | None = None) -> int:
        """Return the bytes of one device's part.

        Packed weights `[in, out]` take `in * out + 4 * out` in int8 and `in * out * (1/2 + 8/32)` in int4;
        what is not packed stays in float32 beside them.
        """
        entries = self.num_parameters(mesh)
        if stored in ITEM_BYTES:
            return entries * ITEM_BYTES[stored]
        if self.role == "other":
            return entries * ITEM_BYTES["float32"]
        if stored == "int4" and self.role == "projection":
            return entries // 2 + entries // _GROUP * 2 * _SCALE_BYTES
        inputs = self.axes[0][1] // (mesh.shards(self.axes[0][0]) if mesh else 1)
        return entries + entries // inputs * _SCALE_BYTES


def parameters(sizes: SizesSection) -> list[Parameters]:
    """Return every parameter of the decoder, equal ones together."""
    embed, layers = ("embed", sizes.embed_dim), sizes.num_layers
    table = Parameters(1, (embed, ("vocab", sizes.vocab_size)), "head")
    found = [table] if sizes.is_tied else [table, table]
    found += [Parameters(layers * sizes.num_norms + 1, (embed,))]
    attention = _grouped(sizes) if sizes.latent is None else _latent(sizes, sizes.latent)
    found += [*attention, *_mlp(sizes.num_dense_layers, sizes.embed_dim, sizes.mlp_dim, sizes.has_mlp_bias)]
    if sizes.experts is not None:
        found += _experts(sizes, sizes.experts)
    return found


def _matrix(
    count: int, inputs: tuple[str, int], outputs: tuple[str, int], has_bias: bool
) -> Iterator[Parameters]:
    yield Parameters(count, (inputs, outputs), "projection")
    if has_bias:
        yield Parameters(count, (outputs,))


def _grouped(sizes: SizesSection) -> Iterator[Parameters]:
    layers, embed = sizes.num_layers, ("embed", sizes.embed_dim)
    queries = ("q_head", sizes.num_heads * sizes.head_dim)
    keys = ("kv_head", sizes.num_kv_heads * sizes.head_dim)
    yield from _matrix(layers, embed, queries, sizes.has_qkv_bias)
    yield from _matrix(2 * layers, embed, keys, sizes.has_qkv_bias)
    yield from _matrix(layers, queries, embed, sizes.has_output_bias)
    if sizes.has_qk_norm and sizes.is_qk_norm_wide:
        yield Parameters(layers, (queries,))
        yield Parameters(layers, (keys,))
    elif sizes.has_qk_norm:
        yield Parameters(2 * layers, (("", sizes.head_dim),))
    if sizes.has_sinks:
        yield Parameters(layers, (("q_head", sizes.num_heads),))


def _latent(sizes: SizesSection, latent: LatentSizes) -> Iterator[Parameters]:
    layers, embed, heads = sizes.num_layers, ("embed", sizes.embed_dim), sizes.num_heads
    value_dim, has_bias = latent.value_dim or sizes.head_dim, sizes.has_qkv_bias
    queries = ("q_head", heads * (sizes.head_dim + latent.rope_dim))
    rank = embed
    if latent.query_rank is not None:
        rank = ("", latent.query_rank)
        yield from _matrix(layers, embed, rank, has_bias)
        if latent.has_norm:
            yield Parameters(layers, (rank,))
    yield from _matrix(layers, rank, queries, has_bias=False)
    yield from _matrix(layers, embed, ("", latent.dim + latent.rope_dim), has_bias)
    if latent.has_norm:
        yield Parameters(layers, (("", latent.dim),))
    # Never packed: the absorbed form multiplies by the transposes.
    yield Parameters(layers, (("", latent.dim), ("q_head", heads * (sizes.head_dim + value_dim))))
    yield from _matrix(layers, ("q_head", heads * value_dim), embed, sizes.has_output_bias)


def _mlp(count: int, embed_dim: int, mlp_dim: int, has_bias: bool) -> Iterator[Parameters]:
    if count:
        embed, mlp = ("embed", embed_dim), ("mlp", mlp_dim)
        yield from _matrix(2 * count, embed, mlp, has_bias)
        yield from _matrix(count, mlp, embed, has_bias)


def _experts(sizes: SizesSection, experts: ExpertSizes) -> Iterator[Parameters]:
    layers = sizes.num_layers - experts.num_dense_layers
    yield from _matrix(layers, ("embed", sizes.embed_dim), ("", experts.num_experts), experts.has_router_bias)
    for part in _mlp(layers, sizes.embed_dim, experts.mlp_dim, sizes.has_mlp_bias):
        yield Parameters(part.count, (*part.axes, ("expert", experts.num_experts)), part.role)
    if experts.num_shared:
        yield from _mlp(layers, sizes.embed_dim, experts.num_shared * experts.mlp_dim, sizes.has_mlp_bias)


def input_widths(sizes: SizesSection) -> list[int]:
    """Return the inputs of each projection."""
    return [part.axes[0][1] for part in parameters(sizes) if part.role == "projection"]


def cache_groups(
    sizes: SizesSection,
    codec: str,
    value_codec: str | None = None,
    *,
    window_codec: str | None = None,
    keeps_all: bool = False,
) -> list[CacheGroup]:
    """Return the decoder's cache groups: layers without a window, and layers with it.

    Args:
        sizes: layers, heads and window.
        codec: how keys are stored, and values unless they have a codec of their own.
        value_codec: how values are stored.
        window_codec: how layers with a window store keys and values; None is as the others.
        keeps_all: layers with a window keep every token, as a dense cache's do.
    """
    num_windowed = 0 if sizes.window is None else sizes.num_layers - sizes.num_global_layers
    codecs = (codec, value_codec)
    parts = (
        (sizes.num_layers - num_windowed, None, codecs),
        (num_windowed, None if keeps_all else sizes.window, (window_codec, None) if window_codec else codecs),
    )
    return [_group(sizes, count, window, *codecs) for count, window, codecs in parts if count]


def _group(
    sizes: SizesSection, num_layers: int, window: int | None, codec: str, value_codec: str | None
) -> CacheGroup:
    latent = sizes.latent
    if latent is None:
        return CacheGroup(num_layers, sizes.num_kv_heads, sizes.head_dim, codec, value_codec, window)
    return CacheGroup(
        num_layers, 1, latent.dim, codec, value_codec, window, kind="latent", rope_dim=latent.rope_dim
    )


def attention_width(sizes: SizesSection, mesh: MeshSection) -> int:
    """Return the activations of a token that a device holds while a layer attends.

    The residual stream, queries, scaled queries, keys, values and what attention returns. A latent is
    attended with its up-projection absorbed (DeepSeek-V2, section 2.1.2): queries are as wide as its entry.
    """
    embed = sizes.embed_dim // mesh.shards("embed")
    heads, kv_heads = sizes.num_heads // mesh.shards("q_head"), sizes.num_kv_heads // mesh.shards("kv_head")
    if sizes.latent is None:
        return embed + (3 * heads + 2 * kv_heads) * sizes.head_dim
    entry = sizes.latent.dim + sizes.latent.rope_dim
    return embed + heads * (2 * entry + sizes.latent.dim) + entry


def mlp_width(sizes: SizesSection, mesh: MeshSection) -> int:
    """Return the activations of a token that a device holds in a layer's MLP.

    The residual stream, the normed input, gate, up and their product; of each expert that a token is sent to
    a row of the input and its gate, up and product. Shared experts are an MLP beside the sum of the others.
    Where tokens travel, a device holds them for those of all.
    """
    embed, ways = sizes.embed_dim // mesh.shards("embed"), mesh.shards("mlp")
    tokens = mesh.gathered("mlp")
    moments = [tokens * 3 * sizes.mlp_dim // ways if sizes.num_dense_layers else 0]
    if sizes.experts is not None:
        width = sizes.experts.mlp_dim // ways
        sent = mesh.gathered("mlp", "expert") * sizes.experts.num_active
        moments += [sent * (sizes.embed_dim + 3 * width)]
        moments += [embed + tokens * 3 * sizes.experts.num_shared * width]
    return 2 * embed + max(moments)
