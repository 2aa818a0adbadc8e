"""GGUF metadata as llama.cpp writes and reads it."""

import pytest

from jkv.layers.latent import LatentDims
from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig, attention_scaling, softmax_correction, yarn_mscale
from jkv.models.gguf_config import config_from_gguf
from jkv.models.model_config import MixtureConfig, ModelConfig


def make_metadata(architecture: str = "llama", **changes: object) -> dict:
    keys = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 320,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in keys.items()
    }


def test_sizes_are_read_and_left_out_ones_follow():
    config = config_from_gguf(make_metadata(), ("output.weight",))
    assert (config.family, config.vocab_size, config.num_layers, config.embed_dim) == ("llama", 320, 2, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_dim) == (8, 2, 8, 96)
    assert config.rope == RopeConfig(dim=8, theta=10_000.0)
    assert (config.is_tied, config.windows) == (False, (None, None))


def test_the_head_is_tied_where_there_is_no_output_tensor():
    assert config_from_gguf(make_metadata(), ()).is_tied


def test_biases_are_read_off_the_tensors():
    config = config_from_gguf(make_metadata("qwen2"), ("blk.0.attn_q.bias", "output.weight"))
    assert (config.family, config.has_qkv_bias, config.has_output_bias) == ("qwen2", True, False)


def test_qwen3_normalizes_queries_and_keys():
    config = config_from_gguf(
        make_metadata("qwen3", attention__key_length=16, attention__value_length=16), ()
    )
    assert (config.has_qk_norm, config.head_dim) == (True, 16)


def test_the_vocabulary_is_counted_where_its_size_is_missing():
    metadata = make_metadata() | {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    del metadata["llama.vocab_size"]
    assert config_from_gguf(metadata, ()).vocab_size == 3
    del metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ValueError, match=r"vocab_size or tokenizer.ggml.tokens, got neither"):
        config_from_gguf(metadata, ())


def test_every_end_token_is_kept_once():
    tokens = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
    }
    assert config_from_gguf(make_metadata() | tokens, ()).eos_token_ids == (2, 5)


def test_a_sliding_window_holds_for_every_layer_and_zero_is_none():
    assert config_from_gguf(make_metadata(attention__sliding_window=16), ()).windows == (16, 16)
    assert config_from_gguf(make_metadata(attention__sliding_window=0), ()).windows == (None, None)


def test_a_factor_without_a_type_is_linear():
    rope = config_from_gguf(make_metadata(rope__scaling__factor=4.0), ()).rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)
    old = config_from_gguf(make_metadata(rope__scale_linear=4.0), ()).rope
    assert old == rope


def test_scaling_of_type_none_ignores_the_factor():
    metadata = make_metadata(rope__scaling__type="none", rope__scaling__factor=4.0)
    assert config_from_gguf(metadata, ()).rope == RopeConfig(dim=8)


def test_yarn_multiplies_its_own_attention_factor():
    metadata = make_metadata(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=1024,
        rope__scaling__attn_factor=0.5,
    )
    rope = config_from_gguf(metadata, ()).rope
    assert (rope.scaling, rope.original_max_position) == ("yarn", 1024)
    assert rope.attention_factor == pytest.approx(0.5 * yarn_mscale(4.0))


def test_the_frequency_tensor_becomes_the_divisors():
    tables = {"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]}
    config = config_from_gguf(make_metadata(), tables, tables)
    assert config.rope.frequency_factors == (1.0, 2.0, 4.0, 8.0)
    with pytest.raises(ValueError, match=r"those of the file, \['rope_freqs.weight'\], got \[\]"):
        config_from_gguf(make_metadata(), tables)
    with pytest.raises(ValueError, match=r"rope_freqs.weight must be a list, each a number above 0"):
        config_from_gguf(make_metadata(), tables, {"rope_freqs.weight": [1.0, 0.0, 4.0, 8.0]})


def make_phi3(short: int = 3, long: int = 3, **changes: object) -> ModelConfig:
    """Return a Phi-3 whose context was extended, by tables of so many numbers; 0 has none."""
    tables = {"rope_factors_short.weight": [1.5] * short, "rope_factors_long.weight": [4.0] * long}
    tables = {name: table for name, table in tables.items() if table}
    keys = {"rope__dimension_count": 6, "rope__scaling__original_context_length": 1024}
    keys |= {"rope__scaling__attn_factor": 1.25} | changes
    return config_from_gguf(make_metadata("phi3", **keys), tables, tables)


def test_longrope_is_two_tables_over_a_part_of_the_head():
    config = make_phi3()
    assert (config.head_dim, config.rope.dim, attention_scaling(config.rope)) == (8, 6, 1.25)
    assert config.rope.for_capacity(1024).frequency_factors == (1.5,) * 3
    assert config.rope.for_capacity(1025).frequency_factors == (4.0,) * 3
    assert make_phi3(rope__scaling__type="longrope") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long": 0}, r"must have the tables .*_long.weight'\], got \['rope_factors_short.weight'\]"),
        ({"long": 4}, r"must have 3 numbers as short and as long factors, .*, got \[3, 4\]"),
        ({"rope__dimension_count": 5, "short": 2, "long": 2}, "even number from 2 to the head's 8, got 5"),
        ({"rope__dimension_count": 10, "short": 5, "long": 5}, "even number from 2 to the head's 8, got 10"),
        ({"rope__scaling__type": "yarn"}, "type must be 'longrope' .*, got 'yarn' and 1.0"),
        ({"rope__scaling__factor": 4.0}, "and its factor 1.0, got 'longrope' and 4.0"),
        ({"rope__scaling__original_context_length": 1}, "original context above one token, got 1"),
    ],
)
def test_a_longrope_that_does_not_fit_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_phi3(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, r"lacks \['llama.expert_used_count'\]"),
        ({"rope__freq_base_swa": 1.0}, r"does not compute: \['llama.rope.freq_base_swa'\]"),
        ({"expert_shared_feed_forward_length": 8}, "expert_shared_feed_forward_length must be 0, got 8"),
        ({"tensor_data_layout": "reference"}, "tensor_data_layout must be 'Meta AI original pth'"),
        ({"logit_scale": 0.5}, r"does not compute: \['llama.logit_scale'\]"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count must be the head's size 8, got 4"),
        ({"attention__value_length": 16}, "llama.attention.value_length must be the head's size 8, got 16"),
        ({"rope__scaling__type": "dynamic"}, "rope.scaling.type must be one of .* got 'dynamic'"),
        ({"rope__scaling__type": "longrope"}, r"longrope must have the tables .*, got \[\]"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier must be 0.0, got 0.1"),
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor must be 1.0 without yarn, got 2.0"),
    ],
)
def test_what_could_change_the_model_unseen_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(make_metadata(**changes), ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_length": "64"}, 'llama.embedding_length must be a whole number from 1 .*, got "64"'),
        (
            {"attention__head_count": [8, 8]},
            r"llama.attention.head_count must be a whole number .*, got \[8, 8\]",
        ),
        ({"attention__head_count": 0}, "llama.attention.head_count must be a whole number from 1"),
        ({"rope__freq_base": 0.0}, "llama.rope.freq_base must be a number above 0, got 0.0"),
        ({"rope__scaling__type": 3}, "llama.rope.scaling.type must be text, got 3"),
    ],
)
def test_a_key_of_a_wrong_kind_is_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(make_metadata(**changes), ())


def test_a_token_id_of_a_wrong_kind_is_named():
    metadata = make_metadata() | {"tokenizer.ggml.eos_token_id": "2"}
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.eos_token_id must be a whole number"):
        config_from_gguf(metadata, ())


def test_missing_sizes_are_listed():
    metadata = make_metadata()
    del metadata["llama.block_count"], metadata["llama.context_length"]
    with pytest.raises(ValueError, match=r"lacks \['llama.block_count', 'llama.context_length'\]"):
        config_from_gguf(metadata, ())


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match=r"one of .*'llama', .*'qwen2', .*, got 'gemma' without experts"):
        config_from_gguf(make_metadata("gemma"), ())
    with pytest.raises(ValueError, match=r"as its family is, got 'qwen2' with experts"):
        config_from_gguf(make_metadata("qwen2", expert_count=4), ())


# What converters write of DeepSeek-V2, which splits 160 experts into groups, and its tensors' telling names.
DEEPSEEK_V2 = {
    "attention__head_count_kv": 1,
    "attention__q_lora_rank": 48,
    "attention__kv_lora_rank": 32,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 16,
    "rope__dimension_count": 8,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 40.0,
    "rope__scaling__original_context_length": 4096,
    "rope__scaling__yarn_log_multiplier": 0.0707,
    "leading_dense_block_count": 1,
    "expert_count": 160,
    "expert_used_count": 6,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
    "expert_group_count": 8,
    "expert_group_used_count": 3,
    "expert_weights_scale": 16.0,
}


def make_deepseek(tensor_names: tuple[str, ...] = ("output.weight",), **changes: object) -> ModelConfig:
    keys = {key: value for key, value in (DEEPSEEK_V2 | changes).items() if value is not None}
    return config_from_gguf(make_metadata("deepseek2", **keys), tensor_names)


def test_latents_and_experts_in_groups_are_read():
    config = make_deepseek()
    assert (config.family, config.num_kv_heads, config.head_dim) == ("deepseek_v2", 8, 16)
    assert config.latent == LatentDims(latent=32, rope=8, key=16, value=16, query=48)
    routing = Routing(160, 6, num_groups=8, num_active_groups=3, scale=16.0)
    assert config.mixture == MixtureConfig(routing, mlp_dim=24, shared_dim=48, num_dense_layers=1)


def test_a_correction_of_the_choice_tells_deepseek_v3_from_v2():
    config = make_deepseek(("blk.1.exp_probs_b.bias",), expert_gating_func=2, expert_weights_norm=True)
    assert config.mixture is not None
    routing = config.mixture.routing
    assert (config.family, routing.score, routing.group_score) == ("deepseek_v3", "sigmoid", "top2")
    assert routing.is_normalized
    assert routing.has_correction


def test_blocks_that_predict_later_tokens_are_no_layers_of_the_decoder():
    names = ("output.weight", "blk.2.attn_norm.weight")
    num_layers = make_deepseek(names, nextn_predict_layers=0).num_layers
    past = f"blk.{num_layers - 1}."
    shortened = make_deepseek((*names, f"{past}nextn.eh_proj.weight"), nextn_predict_layers=1)
    assert (shortened.num_layers, len(shortened.windows)) == (num_layers - 1, num_layers - 1)
    assert make_deepseek(nextn_predict_layers=1) == shortened
    with pytest.raises(ValueError, match=rf"{past[:-1]} must have a nextn tensor"):
        make_deepseek((*names, f"{past}attn_norm.weight"), nextn_predict_layers=1)


def test_yarn_beside_latents_corrects_the_softmax_and_no_rotation():
    rope = make_deepseek().rope
    assert (rope.dim, attention_scaling(rope)) == (8, 1.0)
    assert softmax_correction(rope) == pytest.approx(yarn_mscale(40.0, 0.707) ** 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__kv_lora_rank": None}, r"lacks \['deepseek2.attention.kv_lora_rank'\]"),
        (
            {"attention__key_length": 24},
            "key_length must be 40 beside a latent of 32 entries and 8 .*, got 24",
        ),
        ({"attention__key_length_mla": None}, "head_count_kv must be 8 beside .*, got 1"),
        (
            {"attention__key_length_mla": 8},
            "key_length_mla must be above the 8 rotated entries .*, got 8 and",
        ),
        ({"attention__value_length_mla": None}, "beside attention.value_length_mla, got 24 and None"),
        ({"expert_gating_func": 2}, r"expert_gating_func must be 1 \(softmax\) without exp_probs_b, got 2"),
        ({"expert_group_used_count": None}, "expert_group_used_count must be given together, got one"),
        ({"expert_group_count": 7}, "groups must divide the experts .*, got 160 experts, 7 groups"),
        ({"rope__scaling__attn_factor": 0.5}, "attn_factor must be 1.0, got 0.5"),
        (
            {"attention__temperature_scale": 0.1},
            r"does not compute: \['deepseek2.attention.temperature_scale'\]",
        ),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers must be below block_count, got 4 of"),
    ],
)
def test_what_could_change_latents_or_their_experts_unseen_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_deepseek(**changes)
