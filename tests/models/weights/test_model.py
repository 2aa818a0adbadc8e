"""Stored models of every format, from their name to their parameters."""

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jkv.layers.rope import inverse_frequencies
from jkv.models.weights.checkpoint import save_checkpoint
from jkv.models.weights.model import StoredModel, open_model
from jkv.models.weights.rules import tensor_rules

from .checkpoints import (
    GOLDEN,
    GOLDEN_NAMES,
    add_qkv_biases,
    make_hf_llama,
    make_normal,
    make_targets,
    read_golden,
    write_folder,
    write_gguf,
)


def load(model: StoredModel, dtype: object = jnp.float32) -> dict[str, jax.Array]:
    return model.load(make_targets(tensor_rules(model.config, "gguf"), dtype))


def check_equal(parameters: dict[str, jax.Array], model: StoredModel, tensors: dict[str, np.ndarray]) -> None:
    """Compare with Hugging Face tensors, which are as many as the parameters."""
    places = {rule.target: rule.source for rule in tensor_rules(model.config, "hf") if not rule.is_copy}
    assert parameters.keys() == places.keys()
    assert set(places.values()) == tensors.keys()
    for target, source in places.items():
        np.testing.assert_array_equal(parameters[target], tensors[source], strict=True, err_msg=target)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_golden_checkpoint_loads_with_every_value(name: str):
    model = open_model(GOLDEN / name)
    check_equal(load(model), model, read_golden(name))


def test_a_golden_checkpoint_loads_onto_a_mesh():
    model = open_model(GOLDEN / "llama")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    targets = {
        name: jax.ShapeDtypeStruct(
            target.shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model"))
        )
        for name, target in make_targets(tensor_rules(model.config, "hf")).items()
    }
    parameters = model.load(targets)
    assert all(parameters[name].sharding == target.sharding for name, target in targets.items())
    check_equal(parameters, model, read_golden("llama"))


@pytest.mark.parametrize("head_dim", [8, 16])
def test_rows_of_q_and_k_in_a_gguf_llama_return_to_their_places(tmp_path: Path, head_dim: int):
    config, tensors = make_hf_llama(head_dim)
    model = open_model(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim) == (4, 2, head_dim)
    check_equal(load(model), model, tensors)


def test_a_gguf_llama_with_biases_returns_them_to_their_places(tmp_path: Path):
    config, tensors = make_hf_llama(16)
    add_qkv_biases(config, tensors)
    model = open_model(write_gguf(tmp_path / "x.gguf", config, tensors))
    check_equal(load(model), model, tensors)


def test_a_gguf_qwen2_is_not_permuted_and_has_its_biases(tmp_path: Path):
    config, tensors = make_hf_llama(16)
    add_qkv_biases(config, tensors)
    model = open_model(write_gguf(tmp_path / "x.gguf", config, tensors, architecture="qwen2"))
    assert model.config.has_qkv_bias
    check_equal(load(model), model, tensors)


def test_a_tied_gguf_has_no_head(tmp_path: Path):
    config, tensors = make_hf_llama(8)
    del tensors["lm_head.weight"]
    model = open_model(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert model.config.is_tied
    check_equal(load(model), model, tensors)


@pytest.mark.parametrize("encoding", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_a_quantized_gguf_loads_the_values_that_the_package_decodes(tmp_path: Path, encoding: object):
    config, tensors = make_hf_llama(16)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, encoding=encoding)
    model = open_model(path)
    decoded = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    parameters = load(model)
    layer = "layers.1"
    for target, source in (
        ("mlp.down_proj.weight", "ffn_down"),
        ("attention.v_proj.weight", "attn_v"),
        ("mlp_norm.scale", "ffn_norm"),
    ):
        np.testing.assert_array_equal(parameters[f"{layer}.{target}"], decoded[f"blk.1.{source}.weight"])
    queries = np.asarray(parameters[f"{layer}.attention.q_proj.weight"])
    original = tensors["model.layers.1.self_attn.q_proj.weight"]
    # Rounded, but in the order of the original; the file has another order.
    assert np.abs(queries - original).mean() < 0.1 < np.abs(decoded["blk.1.attn_q.weight"] - original).mean()


def test_a_ggufs_frequency_table_gives_the_llama3_frequencies(tmp_path: Path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config, tensors = make_hf_llama(
        128, num_layers=1, rope_parameters=scaling, max_position_embeddings=131_072
    )
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(0, 128, 2) / 128)
    ramp = (8192 / wavelengths - 1) / 3
    factors = 1 / np.interp(ramp, [0, 1], [1 / 8, 1])
    assert set(factors[wavelengths < 2048]) == {1.0}
    assert set(factors[wavelengths > 8192]) == {8.0}
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    table = open_model(write_gguf(tmp_path / "x.gguf", config, tensors, theta=500_000.0, extra=extra))
    declared = open_model(write_folder(tmp_path / "hf", config, tensors))
    assert table.config.rope.frequency_factors is not None
    np.testing.assert_allclose(
        inverse_frequencies(table.config.rope), inverse_frequencies(declared.config.rope), rtol=1e-6
    )
    load(table)


def test_a_tied_folder_may_repeat_the_embedding_but_not_change_it(tmp_path: Path):
    config, tensors = make_hf_llama(8, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"must equal the first, got another \['lm_head.weight"):
        load(open_model(write_folder(tmp_path, config, tensors)))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    parameters = load(open_model(write_folder(tmp_path, config, tensors)))
    assert "lm_head.weight" not in parameters


def test_a_half_downloaded_folder_does_not_load(tmp_path: Path):
    config, tensors = make_hf_llama(8)
    file = write_folder(tmp_path, config, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors must hold \d+ bytes of tensors"):
        open_model(tmp_path)


def test_a_bfloat16_folder_loads_bit_by_bit(tmp_path: Path):
    config, tensors = make_hf_llama(8)
    halves = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    model = open_model(write_folder(tmp_path, config, halves))
    check_equal(load(model, jnp.bfloat16), model, halves)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_also_sees_the_decoder_is_loaded(tmp_path: Path, prefix: str):
    text, tensors = json.loads((GOLDEN / "gemma3_local_global" / "config.json").read_text()), {}
    for name, tensor in read_golden("gemma3_local_global").items():
        tensors[prefix + name.removeprefix("model.")] = tensor
    eyes = {"vision_tower.patch": make_normal(4), "multi_modal_projector.weight": make_normal(4)}
    tokens = {"bos_token_id": text.pop("bos_token_id"), "eos_token_id": text.pop("eos_token_id")}
    seeing = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **tokens}
    config = {**seeing, "text_config": text, "vision_config": {"hidden_size": 4}, "mm_tokens_per_image": 4}
    model = open_model(write_folder(tmp_path, config, tensors | eyes))
    alone = open_model(GOLDEN / "gemma3_local_global")
    assert model.config == alone.config
    assert model.fingerprint() == alone.fingerprint()
    with pytest.raises(ValueError, match=r"does not use: \['audio_tower.weight'\]"):
        load(open_model(write_folder(tmp_path, config, tensors | {"audio_tower.weight": make_normal(4)})))


def test_an_fp8_folder_loads_scaled(tmp_path: Path):
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    config, tensors = make_hf_llama(8, quantization_config=quantization)
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        stored[name] = expected[name] = tensor
        if "proj" in name:
            scale = np.full([-(-n // 16) for n in tensor.shape], 0.25, np.float32)
            stored[name] = (4 * tensor).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            expected[name] = stored[name].astype(np.float32) / 4
    model = open_model(write_folder(tmp_path, config, stored))
    check_equal(load(model), model, expected)


def test_a_checkpoint_of_ours_loads_and_is_checked(tmp_path: Path):
    model = open_model(GOLDEN / "llama")
    parameters = load(model)
    save_checkpoint(tmp_path / "sound", model.config, parameters)
    restored = open_model(tmp_path / "sound")
    assert restored.config == model.config
    check_equal(load(restored), model, read_golden("llama"))
    bad = parameters | {"norm.scale": jnp.full_like(parameters["norm.scale"], jnp.nan)}
    save_checkpoint(tmp_path / "bad", model.config, bad)
    with pytest.raises(ValueError, match=r"NaN or infinity in \['norm.scale'\]"):
        load(open_model(tmp_path / "bad"))


def test_a_fingerprint_names_the_weights(tmp_path: Path):
    config, tensors = make_hf_llama(8)
    first = open_model(write_folder(tmp_path / "a", config, tensors)).fingerprint()
    assert open_model(write_folder(tmp_path / "b", config, tensors)).fingerprint() == first
    tensors["model.norm.weight"][0] += 1
    assert open_model(write_folder(tmp_path / "c", config, tensors)).fingerprint() != first
    model = open_model(tmp_path / "a")
    save_checkpoint(tmp_path / "d", model.config, load(model))
    assert len(open_model(tmp_path / "d").fingerprint()) == 32


def test_a_config_that_is_not_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be JSON"):
        open_model(tmp_path)


def test_a_config_with_a_field_of_a_wrong_kind_is_named(tmp_path: Path):
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    with pytest.raises(ValueError, match=rf"{tmp_path}: config\.json's hidden_size must be"):
        open_model(tmp_path)


@pytest.mark.model
def test_smollm2_loads():
    model = open_model("smollm2-135m")
    config = model.config
    assert (config.family, config.num_layers, config.embed_dim, config.vocab_size) == (
        "llama",
        30,
        576,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.is_tied, config.rope.theta, config.eos_token_ids) == (True, 100_000.0, (2,))
    parameters = load(model, jnp.bfloat16)
    assert sum(parameter.size for parameter in parameters.values()) == 134_515_008
    for name in ("layers.0.attention.q_proj.weight", "layers.29.mlp.down_proj.weight"):
        assert 0.01 < np.asarray(parameters[name], np.float32).std() < 1
