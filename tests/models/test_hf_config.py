"""config.json files as transformers writes them, and the keys that must not pass unread."""

import json
from pathlib import Path

import pytest

from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig
from jkv.models.families import FAMILIES
from jkv.models.hf_config import config_from_hf
from jkv.models.model_config import MixtureConfig
from jkv.models.sizes import sizes_of
from jkv.plan.decoder import parameters

GOLDEN = Path(__file__).parents[1] / "golden"
# Config.json files of each family, with all that the hub's have, and parameters as model cards and headers of
# checkpoints count them: Gemma's without the vision tower, DeepSeek's without layers past the decoder's.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def make_hf(family: str = "Llama", **changes: object) -> dict:
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    return config | changes


def read_golden(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("published", PUBLISHED, ids=[model["hub_id"] for model in PUBLISHED])
def test_a_published_model_is_read_as_it_lies_on_the_hub(published: dict):
    config = config_from_hf(published["config"])
    assert (config.family, config.max_length) == (published["family"], published["max_length"])
    if "parameters" in published:
        assert sum(part.num_parameters() for part in parameters(sizes_of(config))) == published["parameters"]


def test_every_family_has_a_published_model():
    assert {model["family"] for model in PUBLISHED} == set(FAMILIES)


def test_a_golden_llama_is_read_whole():
    config = config_from_hf(read_golden("llama"))
    assert (config.family, config.vocab_size, config.num_layers) == ("llama", 320, 3)
    assert (config.embed_dim, config.mlp_dim, config.norm_eps) == (64, 96, 1e-6)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert config.rope == RopeConfig(dim=8, theta=10_000.0)
    assert config.windows == (None, None, None)
    assert (config.max_length, config.is_tied) == (512, False)
    assert config.eos_token_ids == (2,)
    assert not config.has_qk_norm
    assert not config.has_qkv_bias


def test_golden_scaled_rotary_is_llama3():
    rope = config_from_hf(read_golden("llama3_rope")).rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("llama3", 8.0, 64)


def test_golden_mistral_slides_in_every_layer():
    assert config_from_hf(read_golden("mistral_sliding")).windows == (16, 16, 16)


def test_golden_qwen3_normalizes_queries_and_keys_and_does_not_slide():
    config = config_from_hf(read_golden("qwen3_qknorm"))
    assert config.has_qk_norm
    assert (config.head_dim, config.has_qkv_bias, config.has_output_bias) == (16, False, False)
    assert config.windows == (None, None, None)


def test_the_old_and_the_new_rotary_entries_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    old = make_hf(rope_theta=500_000.0, rope_scaling={"type": "llama3", **scaling})
    new = make_hf(rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **scaling})
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).rope.theta == 500_000.0


def test_yarn_extends_the_length_that_a_card_leaves_as_it_was():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert (
        config_from_hf(make_hf("Qwen3", max_position_embeddings=40960, rope_scaling=yarn)).max_length
        == 131072
    )
    long = make_hf("Qwen3", max_position_embeddings=262144, rope_scaling=yarn)
    assert config_from_hf(long).max_length == 262144
    unnamed = make_hf("Qwen3", max_position_embeddings=32768, rope_scaling={"type": "yarn", "factor": 4.0})
    assert config_from_hf(unnamed).max_length == 32768


def test_mixtrals_base_is_a_million_unless_told_otherwise():
    keys = {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert config_from_hf(make_hf("Mixtral", **keys)).rope.theta == 1_000_000.0
    assert config_from_hf(make_hf("Mixtral", **keys, rope_theta=1e4)).rope.theta == 10_000.0


def test_sizes_that_old_files_leave_out_follow_from_the_others():
    config = config_from_hf(make_hf())
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (8, 8, 10_000.0)
    assert (config.is_tied, config.eos_token_ids) == (False, ())


@pytest.mark.parametrize(
    ("family", "keys", "num_kv_heads", "head_dim"),
    [
        ("Llama", {}, 32, 2),
        ("Mistral", {}, 8, 2),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 8, 2),
        ("Qwen3", {}, 32, 128),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
            4,
            2,
        ),
        ("Gemma2", {}, 4, 256),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, 8, 64),
        ("Olmo2", {}, 32, 2),
        ("Phi3", {}, 32, 2),
    ],
)
def test_sizes_of_heads_that_a_file_leaves_out_are_those_of_transformers(
    family: str, keys: dict, num_kv_heads: int, head_dim: int
):
    config = config_from_hf(make_hf(family, num_attention_heads=32, **keys))
    assert (config.num_kv_heads, config.head_dim) == (num_kv_heads, head_dim)


def test_the_model_type_serves_where_no_architecture_is_named():
    config = make_hf()
    del config["architectures"]
    assert config_from_hf(config).family == "llama"


def test_a_type_that_is_no_familys_leaves_the_architecture_to_say():
    assert config_from_hf(make_hf(model_type="another")) == config_from_hf(make_hf())


def test_several_end_tokens_are_kept_in_order():
    assert config_from_hf(make_hf(eos_token_id=[9, 7])).eos_token_ids == (9, 7)


def test_llamas_attention_bias_is_on_the_output_too():
    config = config_from_hf(make_hf(attention_bias=True, mlp_bias=True))
    assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, True, True)


def test_qwen2_always_has_biases_but_not_on_the_output():
    config = config_from_hf(make_hf("Qwen2"))
    assert (config.has_qkv_bias, config.has_output_bias) == (True, False)


def test_mistral_slides_by_4096_unless_told_otherwise():
    assert config_from_hf(make_hf("Mistral")).windows == (4096,) * 4
    assert config_from_hf(make_hf("Mistral", sliding_window=None)).windows == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, (None, None, None, None)),
        ({"sliding_window": 64, "use_sliding_window": True}, (None, None, None, None)),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 64)),
        (
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (64, None, 64, None),
        ),
    ],
)
def test_qwen_slides_from_max_window_layers_on_or_as_layer_types_say(changes: dict, windows: tuple):
    assert config_from_hf(make_hf("Qwen2", **changes)).windows == windows


def test_a_gemma_3_of_transformers_4_has_its_local_layers_and_their_rotation():
    keys = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    }
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    activation = {"hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma3_text"}
    config = config_from_hf(make_hf("Gemma3", **keys, **scaling, **activation))
    assert config.windows == (16, 16, None, 16)
    assert config.rope == RopeConfig(dim=256, theta=1e6, scaling="linear", factor=8.0)
    assert config.window_rope == RopeConfig(dim=256, theta=10_000.0)
    assert (config.is_tied, config.attention_scale, config.embed_scale) == (True, 256**-0.5, 8.0)


def test_a_gpt_oss_of_transformers_4_has_yarn_and_every_second_layer_a_window():
    keys = {"num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "experts_per_token": 2}
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 4096
    config = config_from_hf(make_hf("GptOss", **keys, rope_scaling=yarn, initial_context_length=4096))
    assert config.windows == (128, None, 128, None)
    assert (config.rope.scaling, config.rope.theta, config.rope.truncate) == ("yarn", 150_000.0, False)
    assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, True, True)
    assert config.mixture == MixtureConfig(Routing(8, 2, is_normalized=True, has_bias=True), 96)
    assert config_from_hf(make_hf("GptOss", **keys)).rope == config.rope


def test_a_phi_4_mini_rotates_three_quarters_of_its_heads_by_longrope():
    factors = {"short_factor": [1] * 48, "long_factor": [1] * 47 + [32.5]}
    published = make_hf(
        "Phi3",
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", **factors},
        sliding_window=262_144,
        tie_word_embeddings=True,
    )
    config = config_from_hf(published)
    assert (config.head_dim, config.rope.dim, config.rope.scaling) == (128, 96, "longrope")
    assert (config.rope.factor, config.rope.original_max_position) == (32.0, 4096)
    assert (config.max_length, config.is_tied) == (131_072, True)
    assert config.rope.for_capacity(4096) == config.rope
    assert config.rope.for_capacity(4097).frequency_factors == (1.0,) * 47 + (32.5,)
    published["rope_scaling"]["type"] = "su"
    assert config_from_hf(published) == config


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, r"lacks \['long_factor'\]"),
        (
            "Phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            r"must have 4 numbers as short and as long factors, .* 8 rotated entries, got \[1, 4\]",
        ),
        ("Phi3", {"partial_rotary_factor": 1.5}, "above 0 and at most 1, got 1.5"),
        ("Phi3", {"partial_rotary_factor": 0.1}, "even number from 2 to the head's 8, got 0"),
        ("Phi3", {"partial_rotary_factor": 0.4}, "even number from 2 to the head's 8, got 3"),
        ("Phi3", {"full_attn_mod": 2}, "full_attn_mod must be 1, got 2"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ("Gemma3", {"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0"),
        (
            "Mixtral",
            {"num_experts_per_tok": 2},
            r"as num_local_experts or num_experts or .* got \[\], without",
        ),
        ("Mixtral", {"num_local_experts": 4}, r"got \[4\], without \['num_experts_per_tok'\]"),
        (
            "Mixtral",
            {"num_local_experts": 4, "num_experts": 8, "num_experts_per_tok": 2},
            r"one number of experts .* got \[4, 8\]",
        ),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "use 1 to 4 experts"),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\], got \[0\]"),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
        ("Llama", {"num_local_experts": 4}, r"does not compute: \['num_local_experts'\]"),
        ("Olmo2", {"clip_qkv": 8}, r"does not compute: \['clip_qkv'\]"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_its_key(family: str, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_hf(make_hf(family, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"one of .*'LlamaForCausalLM'.* got \['GemmaForCausalLM'\]",
        ),
        ({"model_type": "mistral"}, "model_type must be 'llama', that of a LlamaForCausalLM, got 'mistral'"),
        ({"rms_norm_eps": None, "vocab_size": None}, r"lacks \['rms_norm_eps', 'vocab_size'\]"),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": {},
                "audio_config": {},
            },
            r"does not compute: \['audio_config'\]",
        ),
        ({"text_config": {}}, r"does not compute: \['text_config'\]"),
        ({"residual_multiplier": 0.2}, r"does not compute: \['residual_multiplier'\]"),
        ({"sliding_window": 64}, r"does not compute: \['sliding_window'\]"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1, got 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "a rotary base above 1, got 1.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"a": 1}}, "differ"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'fp8' or 'mxfp4', got 'awq'"),
        ({"num_key_value_heads": 3}, "got 8 and 3"),
    ],
)
def test_what_could_change_the_model_unseen_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_hf(make_hf(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must be 4 of"),
        ({"layer_types": ["linear_attention"] * 4}, "must be 4 of"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding_window is in use"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_hf(make_hf("Qwen3", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, 'hidden_size must be a whole number from 1 to 2147483647, got "64"'),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number from 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"vocab_size": True}, "vocab_size must be a whole number .* got true"),
        ({"rms_norm_eps": [1]}, r"rms_norm_eps must be a number of at least 0, got \[1\]"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number of at least 0, got NaN"),
        (
            {"eos_token_id": [1, "2"]},
            r'eos_token_id must be a whole number .* or a list, each .*, got \[1, "2"\]',
        ),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings must be true or false, got "yes"'),
        ({"rope_scaling": "linear"}, 'rope_scaling must be a mapping, got "linear"'),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number above 0"),
        ({"quantization_config": [1]}, "quantization_config must be a mapping"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "quantization_config.weight_block_size must be a list of two",
        ),
        ({"head_dim": 7}, "even number of entries, got 7"),
        ({"hidden_size": 4}, r"even number of entries, got 0 \(4 over 8 heads"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_hf(make_hf(**changes))


def test_every_field_of_a_wrong_kind_is_named_at_once():
    with pytest.raises(ValueError, match=r"vocab_size must be .*, and config.json's hidden_size must be"):
        config_from_hf(make_hf(vocab_size="a", hidden_size=1.5))


def test_a_null_is_as_good_as_a_missing_key():
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    nulls = {"max_window_layers": None, "layer_types": None, "rope_scaling": None, "head_dim": None}
    assert config_from_hf(make_hf("Qwen2", **windowed, **nulls)) == config_from_hf(
        make_hf("Qwen2", **windowed)
    )


def test_keys_about_training_and_storage_are_ignored():
    harmless = {"torch_dtype": "bfloat16", "use_cache": False, "attention_dropout": 0.1, "pad_token_id": 0}
    assert config_from_hf(make_hf(**harmless)) == config_from_hf(make_hf())
