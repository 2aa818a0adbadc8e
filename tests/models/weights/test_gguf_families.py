"""Each family in a GGUF file, written with the gguf package's names, against the same in a folder."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jkv.layers.latent import LatentDims
from jkv.layers.rope import RopeConfig, attention_scaling, inverse_frequencies, softmax_correction
from jkv.models.families import FAMILIES
from jkv.models.load import abstract_decoder, load_model, parameter_targets
from jkv.models.model_config import ModelConfig
from jkv.models.weights.model import StoredModel, open_model

from ...compare import assert_close
from .checkpoints import GOLDEN, interleave_rows

ARCHITECTURES = {
    "mistral_sliding": "llama",
    "qwen2": "qwen2",
    "qwen3_qknorm": "qwen3",
    "mixtral_moe": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_local_global": "gemma3",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "phi3_longrope": "phi3",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v3_yarn": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)\.weight")


def write_gguf(
    path: Path, model: StoredModel, architecture: str, *, is_split: bool = True, num_past: int = 0
) -> Path:
    """Write a model that was read from config.json; names and keys are the package's.

    `is_split`: latents' up-projection is two tensors, as converters have it since they know that keys and
    values may stay latent. `num_past`: blocks after the decoder's that predict later tokens.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers + num_past)
    if num_past:
        writer.add_nextn_predict_layers(num_past)
    for layer in range(config.num_layers, config.num_layers + num_past):
        for part in ("nextn.eh_proj", "attn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones((2, 4), np.float32))
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    if config.latent is None:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        add_latent_keys(writer, config, config.latent, is_split=is_split)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if windows := set(config.windows) - {None}:
        writer.add_sliding_window(windows.pop())
    if config.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_soft_cap)
    if config.logit_soft_cap is not None:
        writer.add_final_logit_softcapping(config.logit_soft_cap)
    if config.mixture is not None:
        writer.add_expert_count(config.mixture.routing.num_experts)
        writer.add_expert_used_count(config.mixture.routing.num_active)
        writer.add_expert_feed_forward_length(config.mixture.mlp_dim)
    if config.rope.scaling == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position)
        if config.rope.mscale_all_dim:
            writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope.mscale_all_dim)
    if config.rope.long_factors is not None:
        add_longrope(writer, config.rope)
    for name, tensor in llama_cpp_tensors(model, architecture, is_split=is_split).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_longrope(writer: gguf.GGUFWriter, rope: RopeConfig) -> None:
    """Write what the converter does: no type, and tensors that are no parameters."""
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    writer.add_rope_scaling_attn_factors(attention_scaling(rope))
    for key, capacity in (("SHORT", rope.original_max_position), ("LONG", rope.original_max_position + 1)):
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"ROPE_FACTORS_{key}"]]
        factors = rope.for_capacity(capacity).frequency_factors
        writer.add_tensor(f"{name}.weight", np.array(factors, np.float32))


def add_latent_keys(
    writer: gguf.GGUFWriter, config: ModelConfig, dims: LatentDims, *, is_split: bool
) -> None:
    mixture = config.mixture
    assert mixture is not None
    routing = mixture.routing
    writer.add_kv_lora_rank(dims.latent)
    if dims.query is not None:
        writer.add_q_lora_rank(dims.query)
    head = dims.key + dims.rope
    writer.add_head_count_kv(1 if is_split else config.num_heads)
    writer.add_key_length(dims.latent + dims.rope if is_split else head)
    writer.add_value_length(dims.latent if is_split else dims.value)
    if is_split:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(dims.value)
    writer.add_rope_dimension_count(dims.rope)
    writer.add_leading_dense_block_count(mixture.num_dense_layers)
    writer.add_expert_shared_count((mixture.shared_dim or 0) // mixture.mlp_dim)
    writer.add_expert_weights_scale(routing.scale)
    if routing.is_normalized:
        writer.add_expert_weights_norm(True)
    if routing.num_groups > 1:
        writer.add_expert_group_count(routing.num_groups)
        writer.add_expert_group_used_count(routing.num_active_groups)
    if routing.score == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def llama_cpp_tensors(model: StoredModel, architecture: str, *, is_split: bool) -> dict[str, np.ndarray]:
    """Return the tensors as the converter changes them, by llama.cpp's names."""
    assert model.source is not None
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
    found: dict[str, list[np.ndarray]] = {}
    for name in model.source.tensors:
        tensor = np.asarray(model.source.read(name))
        part = name.split(".")[-2]
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        if architecture == "llama" and part in heads:
            tensor = interleave_rows(tensor, heads[part])
        if match := EXPERT.fullmatch(name):
            found.setdefault(f"{match[1]}.{match[2]}.weight", []).append(tensor)
        elif "kv_b_proj" in name and is_split:
            dims = model.config.latent
            assert dims is not None
            heads_up = tensor.reshape(model.config.num_heads, dims.key + dims.value, dims.latent)
            found[name.replace("kv_b_proj", "k_b_proj")] = [heads_up[:, : dims.key].swapaxes(1, 2)]
            found[name.replace("kv_b_proj", "v_b_proj")] = [heads_up[:, dims.key :]]
        elif "gate_up_proj" in name and architecture == "gpt-oss":
            for first, half in enumerate(("gate_proj", "up_proj")):
                found[name.replace("gate_up_proj", half)] = [tensor[..., first::2]]
        else:
            found[name] = [tensor]
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, model.config.num_layers)
    written = {}
    for name, tensors in found.items():
        tensor = np.stack(tensors) if EXPERT.fullmatch(name) or len(tensors) > 1 else tensors[0]
        # gpt-oss's experts have no ".weight", and have their inputs first.
        stem, suffix = re.fullmatch(r"(.*?)(\.weight|\.bias|_bias)?", name).groups()
        if suffix is None and tensor.ndim == 3:
            tensor = tensor.swapaxes(1, 2)
        target = names.get_name(stem)
        assert target is not None, name
        written[target + (".bias" if suffix in (".bias", "_bias") else ".weight")] = tensor
    return written


def load(model: StoredModel) -> dict[str, jax.Array]:
    return model.load(parameter_targets(abstract_decoder(model.config)))


def without(config: ModelConfig, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in names}


def open_folder(name: str) -> StoredModel:
    """Return a golden whose yarn is as its family's GGUF files mean it, without saying so."""
    model = open_model(GOLDEN / name)
    rope = dataclasses.replace(
        model.config.rope,
        truncate=FAMILIES[model.config.family].has_truncated_yarn,
        mscale=model.config.rope.mscale_all_dim,
    )
    return dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))


def check_same(file: StoredModel, folder: StoredModel) -> None:
    # What a GGUF file does not say: its scale, the limit of its gate, who derived the factor of its yarn, and
    # which of DeepSeek's families it is of. Its numbers have single precision.
    unsaid = ("attention_scale", "gating", "rope", "norm_eps", "family", "mixture")
    assert without(file.config, *unsaid) == without(folder.config, *unsaid)
    assert file.config.norm_eps == np.float32(folder.config.norm_eps)
    if file.config.mixture is None:
        assert folder.config.mixture is None
    else:
        routing = file.config.mixture.routing
        rounded = dataclasses.replace(routing, scale=round(routing.scale, 6))
        assert dataclasses.replace(file.config.mixture, routing=rounded) == folder.config.mixture
    for capacity in (1, folder.config.max_length):
        found, expected = (model.config.rope.for_capacity(capacity) for model in (file, folder))
        np.testing.assert_allclose(inverse_frequencies(found), inverse_frequencies(expected), rtol=1e-6)
    for factor in (attention_scaling, softmax_correction):
        assert factor(file.config.rope) == pytest.approx(factor(folder.config.rope))
    found, expected = load(file), load(folder)
    assert found.keys() == expected.keys()
    for parameter, array in expected.items():
        np.testing.assert_array_equal(found[parameter], array, strict=True, err_msg=parameter)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_what_the_folder_holds(name: str, tmp_path: Path):
    folder = open_folder(name)
    check_same(open_model(write_gguf(tmp_path / "model.gguf", folder, ARCHITECTURES[name])), folder)


def test_a_gguf_file_may_hold_the_up_projection_of_latents_whole(tmp_path: Path):
    folder = open_folder("deepseek_v3_yarn")
    file = write_gguf(tmp_path / "model.gguf", folder, "deepseek2", is_split=False)
    check_same(open_model(file), folder)


def test_layers_of_a_gguf_file_that_predict_later_tokens_are_left_out(tmp_path: Path):
    folder = open_folder("deepseek_v3_yarn")
    check_same(open_model(write_gguf(tmp_path / "model.gguf", folder, "deepseek2", num_past=2)), folder)


@pytest.mark.parametrize(("name", "is_split"), [("deepseek_v2_lite", False), ("deepseek_v3", True)])
def test_a_gguf_file_with_latents_gives_the_reference_s_logits(name: str, is_split: bool, tmp_path: Path):
    file = write_gguf(tmp_path / "model.gguf", open_model(GOLDEN / name), "deepseek2", is_split=is_split)
    model = load_model(file)
    with np.load(GOLDEN / name / "reference.npz") as reference:
        tokens, expected = reference["tokens"], reference["logits"]
    logits, _ = jax.jit(model.step)(model.weights, tokens, None, None)
    assert_close(logits, expected, 1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_local_global"])
def test_each_norm_of_gemma_is_shifted_once(name: str):
    model = open_model(GOLDEN / name)
    assert model.source is not None
    stored = {tensor: model.source.read(tensor) for tensor in model.source.tensors if "norm" in tensor}
    scales = {path: array for path, array in load(model).items() if path.endswith("norm.scale")}
    assert len(scales) == len(stored) == 1 + model.config.num_layers * (6 if model.config.has_qk_norm else 4)
    shifted = sorted(float(tensor.sum()) + tensor.size for tensor in stored.values())
    np.testing.assert_allclose(sorted(float(scale.sum()) for scale in scales.values()), shifted, rtol=1e-5)


def test_the_largest_gemma_scales_attention_by_its_width(tmp_path: Path):
    folder = open_model(GOLDEN / "gemma2")
    largest = dataclasses.replace(folder.config, num_layers=46, windows=(16, None) * 23)
    model = dataclasses.replace(folder, config=largest)
    config = open_model(write_gguf(tmp_path / "model.gguf", model, "gemma2")).config
    assert config.attention_scale == (config.embed_dim / config.num_heads) ** -0.5
