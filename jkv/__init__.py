"""jkv: a decode stack for JAX whose KV cache is a value.

Names load on first use, so that `import jkv` brings no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv.cache.cache import Cache
    from jkv.cache.spec import CacheGroup, CacheSpec
    from jkv.config import load_config
    from jkv.decode.generate import Decoding, Stream, generate
    from jkv.decode.params import SamplingParams
    from jkv.decode.text import TextStream
    from jkv.layers.attention import GQAttention
    from jkv.layers.latent import LatentAttention, LatentDims
    from jkv.layers.rope import RopeConfig
    from jkv.models.decoder import Decoder
    from jkv.models.load import load_model, load_tokenizer
    from jkv.models.step import split_model
    from jkv.ops import attend
    from jkv.sharding import Sharding

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "CacheGroup",
    "CacheSpec",
    "Decoder",
    "Decoding",
    "GQAttention",
    "LatentAttention",
    "LatentDims",
    "RopeConfig",
    "SamplingParams",
    "Sharding",
    "Stream",
    "TextStream",
    "attend",
    "generate",
    "load_config",
    "load_model",
    "load_tokenizer",
    "split_model",
]

_HOMES = {
    "jkv.cache.cache": ("Cache",),
    "jkv.cache.spec": ("CacheGroup", "CacheSpec"),
    "jkv.config": ("load_config",),
    "jkv.decode.generate": ("Decoding", "Stream", "generate"),
    "jkv.decode.params": ("SamplingParams",),
    "jkv.decode.text": ("TextStream",),
    "jkv.layers.attention": ("GQAttention",),
    "jkv.layers.latent": ("LatentAttention", "LatentDims"),
    "jkv.layers.rope": ("RopeConfig",),
    "jkv.models.decoder": ("Decoder",),
    "jkv.models.load": ("load_model", "load_tokenizer"),
    "jkv.models.step": ("split_model",),
    "jkv.ops": ("attend",),
    "jkv.sharding": ("Sharding",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
