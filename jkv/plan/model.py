"""A model's configuration as sizes. Knows both forms; reads no file."""

from jkv.config import SizesSection
from jkv.models.families import ModelConfig

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
    "has_qkv_bias",
    "has_output_bias",
    "has_mlp_bias",
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
        window=min(windows, default=None),
        num_global_layers=config.windows.count(None) if windows else 0,
    )
