"""The smallest model that has every part, and variations on it."""

from typing import Any

from jkv.layers.rope import RopeConfig
from jkv.models.model_config import ModelConfig


def make_config(**sizes: Any) -> ModelConfig:
    """Return a llama of one layer with the sizes that a test cares for."""
    defaults: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 32,
        "num_layers": 1,
        "embed_dim": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "mlp_dim": 16,
        "norm_eps": 1e-6,
        "max_length": 64,
        "windows": (None,) * sizes.get("num_layers", 1),
    }
    values: dict[str, Any] = defaults | sizes
    values.setdefault("rope", RopeConfig(dim=values["head_dim"]))
    return ModelConfig(**values)
