"""DeepSeek and GLM checkpoints: what their config.json says, and which tensors fill what."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.cli.inspect import inspect
from jkv.decode.generate import Decoding, generate
from jkv.layers.latent import LatentDims
from jkv.layers.rope import attention_scaling, softmax_correction
from jkv.models.decoder import cache_spec
from jkv.models.hf_config import config_from_hf
from jkv.models.load import abstract_decoder, load_model, parameter_targets
from jkv.models.model_config import ModelConfig
from jkv.models.weights.model import open_model
from jkv.sharding import Sharding

GOLDEN = Path(__file__).parents[1] / "golden"
# What the published files say, without keys that change nothing.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2_lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


def published(name: str, **changes: Any) -> ModelConfig:
    return config_from_hf(PUBLISHED[name] | changes)


def test_a_published_v2_lite_is_read_whole():
    config = published("deepseek_v2_lite")
    assert config.latent == LatentDims(latent=512, rope=64, key=128, value=128)
    assert (config.num_kv_heads, config.head_dim, config.rope.dim) == (16, 128, 64)
    assert attention_scaling(config.rope) == 1
    assert softmax_correction(config.rope) == pytest.approx(1.590, abs=1e-3)
    mixture = config.mixture
    assert mixture is not None
    assert (mixture.mlp_dim, mixture.shared_dim, mixture.num_dense_layers) == (1408, 2816, 1)
    assert (mixture.routing.score, mixture.routing.num_groups, mixture.routing.num_active) == (
        "softmax",
        1,
        6,
    )


def test_a_published_v3_is_read_whole():
    config = published("deepseek_v3")
    assert config.latent == LatentDims(latent=512, rope=64, key=128, value=128, query=1536)
    assert config.mixture is not None
    routing = config.mixture.routing
    assert (routing.num_experts, routing.num_groups, routing.num_active_groups) == (256, 8, 4)
    assert (routing.score, routing.group_score, routing.scale) == ("sigmoid", "top2", 2.5)
    assert routing.has_correction
    assert routing.is_normalized


def test_groups_count_where_experts_are_chosen_within_them():
    config = published("deepseek_v2_lite", topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert config.mixture is not None
    routing = config.mixture.routing
    assert (routing.num_groups, routing.num_active_groups, routing.group_score) == (8, 3, "max")
    with pytest.raises(ValueError, match=r"topk_method must be one of \['greedy', .*, got 'noaux_tc'"):
        published("deepseek_v2_lite", topk_method="noaux_tc")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave must be True, got False"),
        ({"qk_rope_head_dim": 63}, "even number of rotated entries, got 63"),
        ({"qk_head_dim": 128}, "qk_head_dim must be 192, of its parts, got 128"),
        ({"kv_lora_rank": None}, r"latent attention lacks \['kv_lora_rank'\]"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"index_topk": 2048}, r"does not compute: \['index_topk'\]"),
    ],
)
def test_what_could_change_the_model_unseen_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        published("deepseek_v3", **changes)


def test_dense_layers_after_sparse_ones_are_refused():
    description = json.loads((GOLDEN / "glm4_moe_lite" / "config.json").read_text())
    with pytest.raises(ValueError, match="mlp_layer_types must be 2, first 'dense' ones, then 'sparse' ones"):
        config_from_hf(description | {"mlp_layer_types": ["sparse", "dense"]})


def test_rotated_pairs_and_a_head_s_two_parts_find_their_places():
    tensors = load_file(GOLDEN / "deepseek_v3_yarn" / "model.safetensors")
    model = open_model(GOLDEN / "deepseek_v3_yarn")
    parameters = model.load(parameter_targets(abstract_decoder(model.config)))
    prefix, target = "model.layers.1.self_attn.", "layers.1.attention."
    queries = tensors[f"{prefix}q_b_proj.weight"].reshape(4, 20, 24)
    got = np.asarray(parameters[f"{target}q_proj.weight"]).reshape(4, 20, 24)
    np.testing.assert_array_equal(got[:, :12], queries[:, :12])
    np.testing.assert_array_equal(got[:, 12:16], queries[:, 12::2])
    np.testing.assert_array_equal(got[:, 16:], queries[:, 13::2])
    heads = tensors[f"{prefix}kv_b_proj.weight"].reshape(4, 24, 16)
    np.testing.assert_array_equal(parameters[f"{target}key_up"], heads[:, :12])
    np.testing.assert_array_equal(parameters[f"{target}value_up"], heads[:, 12:])


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "deepseek_v3_yarn", folder)
    tensors = load_file(folder / "model.safetensors")
    past = {"model.layers.2.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file(tensors | past, folder / "model.safetensors")
    source = open_model(folder).source
    assert source is not None
    assert source.tensors.keys() == tensors.keys()
    description = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"does not use: .*eh_proj"):
        load_model(folder)


def test_a_latent_cache_is_shown():
    shown = inspect(GOLDEN / "deepseek_v3")
    dims = {"latent": 24, "rope": 8, "key": 16, "value": 16, "query": 32}
    assert shown["architecture"]["latent"] == dims | {"has_norm": True}
    (group,) = shown["sizes"]["cache_groups"]
    # Keys and values of 8 heads would take 8 * (16 + 8 + 16) entries a layer.
    assert (group["kind"], group["bytes_per_token"]) == ("latent", 3 * (24 + 8) * 4)


@pytest.mark.gate
def test_a_model_with_latents_decodes_over_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = dict.fromkeys(("q_head", "kv_head", "mlp", "vocab"), "model")
    sharding = Sharding.create(mesh, {"seq": "data", "page": "data", **split})
    model = load_model(GOLDEN / "deepseek_v3", sharding=sharding)
    with np.load(GOLDEN / "deepseek_v3" / "reference.npz") as arrays:
        tokens, greedy = arrays["tokens"], arrays["greedy"]
    spec = cache_spec(model.config, page_size=4)
    decoding = Decoding(model.step, model.weights, spec, model.config.vocab_size, sharding=sharding)
    generations = generate(decoding, tokens.tolist(), max_new_tokens=16)
    assert [list(row.tokens) for row in generations] == greedy[:, 40:].tolist()
