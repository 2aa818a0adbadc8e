"""The rules name each parameter of the decoder once, in both formats."""

import json
from collections import Counter

import jax
import pytest
from flax import nnx

from jkv.models.decoder import Decoder
from jkv.models.gguf_config import FREQUENCY_TABLES
from jkv.models.hf_config import config_from_hf
from jkv.models.model_config import ModelConfig
from jkv.models.weights.rules import Format, is_derived, tensor_rules

from .checkpoints import GOLDEN, GOLDEN_NAMES, make_hf_llama, read_golden


def make_config(**changes: object) -> ModelConfig:
    return config_from_hf(make_hf_llama(8)[0] | changes)


def read_config(name: str) -> ModelConfig:
    return config_from_hf(json.loads((GOLDEN / name / "config.json").read_text()))


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("format", ["hf", "gguf"])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_parameter_of_the_decoder_is_filled_once(name: str, format: Format):
    config = read_config(name)
    rules = tensor_rules(config, format)
    assert {rule.target: rule.shape for rule in rules} == decoder_shapes(config)
    assert set(Counter(rule.target for rule in rules).values()) == {1}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_the_rules_name_the_tensors_of_a_checkpoint(name: str):
    shapes = {rule.source: rule.shape for rule in tensor_rules(read_config(name), "hf")}
    assert shapes == {tensor: array.shape for tensor, array in read_golden(name).items()}


def test_biases_have_rules_where_the_config_says_so():
    config = make_config(attention_bias=True, mlp_bias=True)
    targets = {rule.target for rule in tensor_rules(config, "gguf") if rule.source.endswith(".bias")}
    parts = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    names = [f"attention.{part}" for part in parts[0]] + [f"mlp.{part}" for part in parts[1]]
    assert targets == {f"layers.{layer}.{name}.bias" for layer in range(2) for name in names}
    assert targets <= decoder_shapes(config).keys()


def test_a_tied_head_is_a_copy_in_hugging_face_files_and_absent_from_gguf():
    config = make_config(tie_word_embeddings=True)
    copies = [rule for rule in tensor_rules(config, "hf") if rule.is_copy]
    assert [(rule.source, rule.target) for rule in copies] == [("lm_head.weight", "embed.embedding")]
    assert not any(rule.is_copy or rule.source == "output.weight" for rule in tensor_rules(config, "gguf"))
    assert "lm_head.weight" not in decoder_shapes(config)


def test_only_q_and_k_of_a_gguf_llama_are_permuted_each_by_its_own_heads():
    permuted = {r.source: r.permuted_heads for r in tensor_rules(make_config(), "gguf") if r.permuted_heads}
    assert permuted == {
        f"blk.{layer}.attn_{name}.weight": heads for layer in range(2) for name, heads in (("q", 4), ("k", 2))
    }
    assert not any(rule.permuted_heads for rule in tensor_rules(make_config(), "hf"))


def test_tables_that_follow_from_the_configuration_are_derived():
    assert is_derived("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert all(map(is_derived, FREQUENCY_TABLES))
    assert not is_derived("blk.0.rope_freqs.weight.extra")
    assert not is_derived("model.norm.weight")
