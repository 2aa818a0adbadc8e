"""Each family in a GGUF file, written with the gguf package's names, against the same in a folder."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jkv.layers.rope import attention_scaling, inverse_frequencies
from jkv.models.families import ModelConfig
from jkv.models.load import abstract_decoder, parameter_targets
from jkv.models.weights.model import StoredModel, open_model

from .checkpoints import GOLDEN, interleave_rows

ARCHITECTURES = {
    "mixtral_moe": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_local_global": "gemma3",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "phi3": "phi3",
}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)\.weight")


def write_gguf(path: Path, model: StoredModel, architecture: str) -> Path:
    """Write a model that was read from config.json; names and keys are the package's."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
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
    for name, tensor in llama_cpp_tensors(model, architecture).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_tensors(model: StoredModel, architecture: str) -> dict[str, np.ndarray]:
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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_what_the_folder_holds(name: str, tmp_path: Path):
    folder = open_model(GOLDEN / name)
    file = open_model(write_gguf(tmp_path / "model.gguf", folder, ARCHITECTURES[name]))
    # What a GGUF file does not say: its scale, the limit of its gate, who derived the factor of its yarn.
    unsaid = ("attention_scale", "gating", "rope", "norm_eps")
    assert without(file.config, *unsaid) == without(folder.config, *unsaid)
    assert file.config.norm_eps == np.float32(folder.config.norm_eps)
    for rope in (file.config.rope, folder.config.rope):
        np.testing.assert_array_equal(inverse_frequencies(rope), inverse_frequencies(folder.config.rope))
        assert attention_scaling(rope) == pytest.approx(attention_scaling(folder.config.rope))
    found, expected = load(file), load(folder)
    assert found.keys() == expected.keys()
    for parameter, array in expected.items():
        np.testing.assert_array_equal(found[parameter], array, strict=True, err_msg=parameter)


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
