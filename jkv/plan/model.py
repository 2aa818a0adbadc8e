"""A model's configuration as sizes. Knows both forms; reads no file."""

from jkv.config import ExpertSizes, LatentSizes, SizesSection
from jkv.layers.latent import LatentDims
from jkv.models.families import MixtureConfig, ModelConfig

# Fields that both forms have.
_SAME = (
    "num_layers",
    "embed_dim",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "max_length",
    "is_tied",
    "has_qk_norm",
    "is_qk_norm_wide",
    "has_qkv_bias",
    "has_output_bias",
    "has_mlp_bias",
    "has_sinks",
)


def sizes_of(config: ModelConfig) -> SizesSection:
    """Return what of the configuration takes memory.

    Raises:
        ValueError: its layers have windows of several sizes.
    """
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"a model's windows must be of one size to be planned, got {sorted(windows)}")
    return SizesSection(
        **{name: getattr(config, name) for name in _SAME},
        num_norms=4 if config.has_pre_norms and config.has_post_norms else 2,
        window=min(windows, default=None),
        num_global_layers=config.windows.count(None) if windows else 0,
        latent=None if config.latent is None else _latent_of(config.latent),
        experts=None if config.mixture is None else _experts_of(config.mixture),
    )


def _latent_of(dims: LatentDims) -> LatentSizes:
    return LatentSizes(
        dims.latent, dims.rope, query_rank=dims.query, value_dim=dims.value, has_norm=dims.has_norm
    )


def _experts_of(mixture: MixtureConfig) -> ExpertSizes:
    routing = mixture.routing
    return ExpertSizes(
        num_experts=routing.num_experts,
        num_active=routing.num_active,
        mlp_dim=mixture.mlp_dim,
        num_shared=(mixture.shared_dim or 0) // mixture.mlp_dim,
        num_dense_layers=mixture.num_dense_layers,
        has_router_bias=routing.has_bias or routing.has_correction,
    )
