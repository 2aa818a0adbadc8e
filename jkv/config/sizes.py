"""A model's sizes as data, so that a deployment is planned without its files.

Knows numbers of one decoder; what they cost is `jkv.plan`'s to count.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from jkv.config.section import Conflict, Count, Section

Whole = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


@dataclass(frozen=True)
class LatentSizes(Section):
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
        dim: entries of the latent that a token leaves in the cache (kv_lora_rank).
        rope_dim: entries of its rotated part, which all heads share.
        query_rank: entries that queries are compressed to; null projects them at once.
        value_dim: entries of a head's value; null is as its key's.
        has_norm: RMSNorm over compressed vectors.
    """

    dim: Count
    rope_dim: Count
    query_rank: Count | None = None
    value_dim: Count | None = None
    has_norm: bool = True


@dataclass(frozen=True)
class ExpertSizes(Section):
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts: routed experts of a layer.
        num_active: experts that a token is sent to.
        mlp_dim: width of one expert.
        num_shared: experts that every token goes through.
        num_dense_layers: first layers that have an MLP instead.
        has_router_bias: a bias on the routing scores.
    """

    num_experts: Count
    num_active: Count
    mlp_dim: Count
    num_shared: Whole = 0
    num_dense_layers: Whole = 0
    has_router_bias: bool = False


@dataclass(frozen=True)
class SizesSection(Section):
    """Everything about a decoder that takes memory.

    Attributes:
        num_layers: decoder blocks.
        embed_dim: width of the residual stream.
        vocab_size: rows of the embedding.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: entries of a head; of a latent's, without the rotated part.
        mlp_dim: width of the gated MLP.
        max_length: positions that the model was made for.
        is_tied: the output head is the embedding.
        num_norms: norms of the residual stream in a layer.
        has_qk_norm: a norm over each query and key head.
        is_qk_norm_wide: that norm is over all heads of a token at once.
        has_qkv_bias: biases on the query, key and value projections.
        has_output_bias: a bias on the attention's output projection.
        has_mlp_bias: biases in the MLP or the experts.
        has_sinks: a learned logit a query head that no token has.
        window: latest positions that a layer sees; null is all.
        num_global_layers: layers without the window.
        latent: of latent attention; null has keys and values.
        experts: null has an MLP in every layer.
    """

    num_layers: Count
    embed_dim: Count
    vocab_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    mlp_dim: Count
    max_length: Count
    is_tied: bool = False
    num_norms: Literal[2, 4] = 2
    has_qk_norm: bool = False
    is_qk_norm_wide: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    window: Count | None = None
    num_global_layers: Whole = 0
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None

    @property
    def num_dense_layers(self) -> int:
        """Layers with an MLP."""
        return self.num_layers if self.experts is None else self.experts.num_dense_layers

    def conflicts(self) -> list[Conflict]:
        """Heads divide, and parts of the layers are not more than all."""
        conflicts = []
        if self.num_heads % self.num_kv_heads:
            reason = f"must divide num_heads, got {self.num_kv_heads} and {self.num_heads}"
            conflicts.append((("num_kv_heads",), reason))
        if self.num_global_layers > self.num_layers or (self.num_global_layers and self.window is None):
            reason = f"must be at most num_layers, beside a window, got {self.num_global_layers}"
            conflicts.append((("num_global_layers",), f"{reason} of {self.num_layers}, window {self.window}"))
        if self.num_dense_layers > self.num_layers:
            reason = f"must be at most num_layers, got {self.num_dense_layers} of {self.num_layers}"
            conflicts.append((("experts", "num_dense_layers"), reason))
        return conflicts
