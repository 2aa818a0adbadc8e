"""The calculator: a page that computes a cache's bytes wherever a browser is, without a network.

Fills a template with the codecs, the presets and the first settings; the template holds the arithmetic.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jkv.cache.codec import CODECS, MAX_SPAN, MIN_SPAN, OF_VALUES, PoolLayout
from jkv.cache.spec import GPU_BLOCK, GPU_SMALL_PAGES, CacheGroup, CacheSpec
from jkv.config import SizesSection
from jkv.plan.decoder import cache_groups, parameters

_TEMPLATE = Path(__file__).with_name("calculator.html")
_ENTRY_BITS = {"f32": 32, "bf16": 16, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int4": 4}


@dataclass(frozen=True)
class Settings:
    """What the page shows first.

    Attributes:
        spec: the cache.
        num_sequences: rows of the batch.
        num_tokens: of each.
        memory: bytes of the device.
        taken: bytes of it that the cache cannot have; shown in whole megabytes.
    """

    spec: CacheSpec
    num_sequences: int = 32
    num_tokens: int = 8192
    memory: int = 141 * 10**9
    taken: int = 0


def page(models: Mapping[str, SizesSection], settings: Settings) -> str:
    """Return the page.

    Args:
        models: sizes of the models to choose from, by name.
        settings: what is shown first.
    """
    spec = settings.spec
    first = spec.groups[0]
    data = {
        "codecs": {
            name: {"bits": _ENTRY_BITS[codec.entry], "scaling": codec.scaling}
            for name, codec in CODECS.items()
        },
        "of_values": OF_VALUES,
        "min_span": MIN_SPAN,
        "max_span": MAX_SPAN,
        "max_chunk": spec.max_chunk,
        "layouts": get_args(PoolLayout),
        "gpu_pages": {"small": GPU_SMALL_PAGES, "block": GPU_BLOCK},
        "presets": {name: _preset(sizes) for name, sizes in models.items()},
        "initial": {
            "b": settings.num_sequences,
            "s": settings.num_tokens,
            "page": spec.page_size,
            "hbm": settings.memory / 10**9,
            "rest": -(-settings.taken // 10**6) / 1000,
            "k": first.codec,
            "v": first.value_codec or first.codec,
            "layout": spec.layout,
            **_sizes(spec.groups),
        },
    }
    # A script element ends at the first "</", wherever it stands.
    return _TEMPLATE.read_text("utf-8").replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def _preset(sizes: SizesSection) -> dict[str, Any]:
    weights = sum(part.num_bytes("bfloat16") for part in parameters(sizes))
    return {**_sizes(cache_groups(sizes, "bf16")), "rest": round(weights / 10**9, 2)}


def _sizes(groups: list[CacheGroup] | tuple[CacheGroup, ...]) -> dict[str, int]:
    """Return the page's fields of the cache's groups: they differ in their windows alone."""
    windows = [group.window for group in groups if group.window is not None]
    num_global = sum(group.num_layers for group in groups if group.window is None)
    return {
        "l": sum(group.num_layers for group in groups),
        "h": groups[0].num_kv_heads,
        "d": groups[0].head_dim,
        "w": max(windows, default=0),
        "g": num_global if windows else 0,
        "r": groups[0].rope_dim,
    }
