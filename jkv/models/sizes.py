"""A model's configuration as sizes, and sizes as a configuration. Knows both forms; reads no file."""

from jkv.config import ExpertSizes, LatentSizes, SizesSection
from jkv.layers.latent import LatentDims
from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig
from jkv.models.model_config import MixtureConfig, ModelConfig

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


def config_of(sizes: SizesSection) -> ModelConfig:
    """Return a configuration of such sizes, for what is planned, compiled, or run with random weights.

    What sizes do not say is what a Llama has, and changes numbers but no shape. Layers without a window come
    first.
    """
    num_windowed = 0 if sizes.window is None else sizes.num_layers - sizes.num_global_layers
    latent = sizes.latent
    return ModelConfig(
        **{name: getattr(sizes, name) for name in _SAME},
        family="llama",
        norm_eps=1e-6,
        rope=RopeConfig(dim=sizes.head_dim if latent is None else latent.rope_dim),
        windows=(None,) * (sizes.num_layers - num_windowed) + (sizes.window,) * num_windowed,
        has_post_norms=sizes.num_norms == 4,
        latent=None if latent is None else _latent_dims(latent, sizes.head_dim),
        mixture=None if sizes.experts is None else _mixture(sizes.experts),
    )


def _latent_dims(latent: LatentSizes, head_dim: int) -> LatentDims:
    value = latent.value_dim or head_dim
    return LatentDims(latent.dim, latent.rope_dim, head_dim, value, latent.query_rank)


def _mixture(experts: ExpertSizes) -> MixtureConfig:
    routing = Routing(experts.num_experts, experts.num_active, has_correction=experts.has_router_bias)
    shared_dim = experts.num_shared * experts.mlp_dim or None
    return MixtureConfig(routing, experts.mlp_dim, shared_dim, experts.num_dense_layers)
