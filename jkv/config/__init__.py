"""Configuration: strict YAML files, composed by name, overridden on the command line.

Knows no JAX: a configuration can be read and checked anywhere.
"""

from jkv.config.errors import ConfigError, Place, Problem
from jkv.config.load import config_yaml, load_config
from jkv.config.mesh import MeshRules, MeshSection
from jkv.config.sections import (
    CacheSection,
    CodecName,
    DecodeConfig,
    EngineSection,
    ModelSection,
    SamplingSection,
    UncalibratedCodec,
)
from jkv.config.sizes import ExpertSizes, LatentSizes, SizesSection

__all__ = [
    "CacheSection",
    "CodecName",
    "ConfigError",
    "DecodeConfig",
    "EngineSection",
    "ExpertSizes",
    "LatentSizes",
    "MeshRules",
    "MeshSection",
    "ModelSection",
    "Place",
    "Problem",
    "SamplingSection",
    "SizesSection",
    "UncalibratedCodec",
    "config_yaml",
    "load_config",
]
