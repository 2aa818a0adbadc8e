"""What follows from sizes, beside what was published and what gets allocated."""

from math import prod

import jax
import numpy as np
import pytest
from flax import nnx

from jkv.config import MeshSection, SizesSection, load_config
from jkv.config.compose import bundled_configs
from jkv.layers.latent import LatentDims
from jkv.layers.moe import Routing
from jkv.layers.quantized import quantize
from jkv.layers.rope import RopeConfig
from jkv.models.decoder import Decoder
from jkv.models.load import abstract_decoder, parameter_targets
from jkv.models.model_config import MixtureConfig
from jkv.models.sizes import sizes_of
from jkv.models.weights.model import open_model
from jkv.plan.decoder import Stored, attention_width, cache_groups, mlp_width, parameters

from ..tiny import make_config

# As model cards and the headers of checkpoints say; Gemma's without the vision tower.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2-135m": 134_515_008,
}
ONE = load_config("smollm2-cpu").mesh


def preset(name: str) -> SizesSection:
    sizes = load_config("smollm2-cpu", ["--model", name]).model.sizes
    assert sizes is not None
    return sizes


def split(ways: int) -> MeshSection:
    return MeshSection((("data", 1), ("model", ways)), ONE.axis_types, ONE.rules)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str):
    assert sum(part.num_parameters() for part in parameters(preset(name))) == PUBLISHED[name]


def test_every_bundled_model_has_a_published_count():
    assert {file.stem for file in (bundled_configs() / "models").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.model
def test_the_bundled_model_s_preset_is_its_file_s():
    assert preset("smollm2-135m") == sizes_of(open_model("smollm2-135m").config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_tied": True, "has_qk_norm": True, "has_qkv_bias": True},
        {"has_qk_norm": True, "is_qk_norm_wide": True, "has_pre_norms": False, "has_post_norms": True},
        {
            "num_layers": 3,
            "has_post_norms": True,
            "has_sinks": True,
            "has_mlp_bias": True,
            "mixture": MixtureConfig(Routing(4, 2, has_bias=True), 8, shared_dim=16, num_dense_layers=1),
        },
        {"latent": LatentDims(8, 4, 6, 10), "head_dim": 6, "rope": RopeConfig(4)},
        {"latent": LatentDims(8, 4, 6, 10, query=12, has_norm=False), "head_dim": 6, "rope": RopeConfig(4)},
        {
            "latent": LatentDims(8, 4, 6, 10, query=12),
            "head_dim": 6,
            "rope": RopeConfig(4),
            "has_qkv_bias": True,
            "has_output_bias": True,
        },
    ],
)
def test_parameters_are_the_decoder_s(changes: dict):
    config = make_config(**changes)
    targets = parameter_targets(abstract_decoder(config))
    count = sum(prod(target.shape) for target in targets.values())
    assert sum(part.num_parameters() for part in parameters(sizes_of(config))) == count


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_packed_weights_take_the_bytes_that_are_planned(stored: Stored):
    config = make_config(embed_dim=64, num_heads=8, num_kv_heads=8, mlp_dim=128, has_qkv_bias=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    quantize(model, stored)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    planned = sum(part.num_bytes(stored) for part in parameters(sizes_of(config)))
    assert planned == sum(np.asarray(leaf).nbytes for leaf in leaves)


def test_a_device_holds_its_part_of_what_is_split():
    sizes = preset("llama-3.1-8b")
    whole = sum(part.num_bytes("bfloat16", ONE) for part in parameters(sizes))
    norms = 2 * 65 * 4096
    assert (
        sum(part.num_bytes("bfloat16", split(4)) for part in parameters(sizes))
        == norms + (whole - norms) // 4
    )
    assert mlp_width(sizes, split(4)) == 2 * 4096 + 3 * 14336 // 4
    assert attention_width(sizes, split(4)) == 4096 + (3 * 32 + 2 * 8) * 128 // 4


def test_a_token_s_experts_and_its_latent_are_counted():
    sizes = preset("deepseek-v3")
    assert mlp_width(sizes, ONE) == 2 * 7168 + 8 * (7168 + 3 * 2048)
    assert attention_width(sizes, ONE) == 7168 + 128 * (2 * 576 + 512) + 576


def test_layers_with_a_window_are_a_group_of_their_own():
    wide, narrow = cache_groups(preset("gemma-3-27b"), "int8")
    assert (wide.num_layers, wide.window, narrow.num_layers, narrow.window) == (10, None, 52, 1024)
    (only,) = cache_groups(preset("mistral-7b-v0.1"), "bf16")
    assert (only.num_layers, only.window) == (32, 4096)
    (latent,) = cache_groups(preset("deepseek-v3"), "bf16")
    assert latent.page_bytes(1) == 61 * (512 + 64) * 2


def test_windows_of_a_model_become_two_numbers():
    sizes = sizes_of(make_config(num_layers=3, windows=(4, None, 4)))
    assert (sizes.window, sizes.num_global_layers) == (4, 1)
    with pytest.raises(ValueError, match=r"one size to be planned, got \[4, 8\]"):
        sizes_of(make_config(num_layers=2, windows=(4, 8)))
