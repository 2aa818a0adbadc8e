"""The sizes and switches of one decoder, and what of them must fit.

Knows no family and reads no file.
"""

from dataclasses import dataclass, replace

from jkv.layers.latent import LatentDims
from jkv.layers.mlp import SWIGLU, Gating
from jkv.layers.moe import Routing, check_routing
from jkv.layers.rope import RopeConfig
from jkv.sharding import would_divide

# Published decoders have up to 200; each layer of a model is built before its tensors are looked for.
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class MixtureConfig:
    """A mixture of experts in place of the MLP; hashable.

    Attributes:
        routing: how tokens find their experts.
        mlp_dim: width of one expert.
        shared_dim: width of the MLP that every token goes through beside its experts; None is none.
        num_dense_layers: first layers that have an MLP instead.
    """

    routing: Routing
    mlp_dim: int
    shared_dim: int | None = None
    num_dense_layers: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes a decoder; hashable.

    Attributes:
        family: key of `jkv.models.families.FAMILIES`.
        vocab_size: rows of the embedding.
        num_layers: decoder blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads, copies included; divides `num_heads`.
        head_dim: entries of one head; of latent attention's keys, without the rotated part.
        mlp_dim: width of the gated MLP.
        norm_eps: added to the mean square in every RMSNorm.
        rope: the rotary embedding.
        window_rope: that of layers with a window; None is as the others.
        max_length: positions that the checkpoint was made for.
        windows: per layer, how many latest positions a query sees, its own included; None is all.
        has_qk_norm: RMSNorm over each query and key head before rotation.
        is_qk_norm_wide: that norm is over all heads of a token at once.
        has_qkv_bias: biases on the query, key and value projections.
        has_output_bias: a bias on the attention's output projection.
        has_mlp_bias: biases in the MLP or the experts.
        has_sinks: a learned logit for each query head that takes probability and adds no value.
        has_pre_norms: norms of what enters attention and MLP.
        has_post_norms: norms of what leaves them.
        attention_scale: multiplies attention's logits; None is the layer's own, see `GQAttention` and
            `LatentAttention`.
        attention_soft_cap: limits attention's logits, see `jkv.ops.attend`; None does not.
        logit_soft_cap: limits the model's logits in the same way.
        embed_scale: multiplies token vectors where they enter the first layer.
        gating: of the MLP and the experts.
        mixture: None has an MLP in every layer.
        latent: widths of latent attention; None is grouped-query attention.
        kv_copies: neighbouring KV heads that are copies of one of the checkpoint's; see `with_kv_copies`.
        is_tied: the output head is the embedding.
        eos_token_ids: tokens that end generation.
    """

    family: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    rope: RopeConfig
    max_length: int
    windows: tuple[int | None, ...]
    window_rope: RopeConfig | None = None
    has_qk_norm: bool = False
    is_qk_norm_wide: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    gating: Gating = SWIGLU
    mixture: MixtureConfig | None = None
    latent: LatentDims | None = None
    kv_copies: int = 1
    is_tied: bool = False
    eos_token_ids: tuple[int, ...] = ()


def check_sizes(config: ModelConfig) -> ModelConfig:
    """Return `config`, or raise a ValueError that names the sizes which do not fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            "the query heads must be a multiple of the KV heads, "
            f"got {config.num_heads} and {config.num_kv_heads}"
        )
    if config.latent is None and (config.head_dim < 2 or config.head_dim % 2):
        raise ValueError(
            f"a head must have an even number of entries, got {config.head_dim} "
            f"({config.embed_dim} over {config.num_heads} heads where no size is named)"
        )
    if config.latent is None and not (2 <= config.rope.dim <= config.head_dim and config.rope.dim % 2 == 0):
        raise ValueError(
            f"rotated entries must be an even number from 2 to the head's {config.head_dim}, "
            f"got {config.rope.dim}"
        )
    if config.latent is not None and config.latent.rope % 2:
        raise ValueError(
            f"latent attention must have an even number of rotated entries, got {config.latent.rope}"
        )
    for rope in (config.rope, config.window_rope):
        if rope is not None and rope.scaling == "yarn" and rope.theta <= 1:
            raise ValueError(f"yarn must have a rotary base above 1, got {rope.theta}")
    if any(window is not None and window < 1 for window in config.windows):
        raise ValueError(f"a sliding window must hold at least one token, got {config.windows}")
    if config.mixture is not None:
        check_routing(config.mixture.routing)
    return config


def with_kv_copies(config: ModelConfig, copies: int) -> ModelConfig:
    """Return the model with each KV head copied, so that more devices than KV heads have one each.

    It computes the same; its cache, and its key and value projections, are as many times as large.

    Raises:
        ValueError: the query heads of a KV head do not split over its copies, those of a token are normed at
            once, or there are latents instead.
    """
    if copies == 1:
        return config
    if config.latent is not None:
        raise ValueError(
            f"kv_copies must be 1 for latent attention, whose latents lie whole on each device, got {copies}"
        )
    assert config.kv_copies == 1, "copies of copies"
    if config.is_qk_norm_wide:
        raise ValueError(
            f"kv_copies must be 1 for a model that norms all heads of a token at once, got {copies}; split "
            f"its {config.num_kv_heads} KV heads over no more devices"
        )
    group = config.num_heads // config.num_kv_heads
    if group % copies:
        raise ValueError(
            f"kv_copies must divide the {group} query heads of a KV head, got {copies}; choose "
            f"{would_divide(group, copies)}, or another mesh"
        )
    return replace(config, num_kv_heads=config.num_kv_heads * copies, kv_copies=copies)
