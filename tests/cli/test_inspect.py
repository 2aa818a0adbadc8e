import json
import shutil

import jax.numpy as jnp
import pytest

from jkv.cli.inspect import inspect
from jkv.models.weights.checkpoint import save_checkpoint
from jkv.models.weights.model import open_model


def test_sizes_are_the_file_s(tiny):
    shown = inspect(tiny)
    count = 2 * 320 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64) + 64
    assert shown["sizes"] == {
        "parameters": count,
        "weight_bytes": {"float32": 4 * count, "bfloat16": 2 * count},
        "cache_bytes_per_token": {
            "f32": 2 * 3 * 2 * 8 * 4,
            "bf16": 2 * 3 * 2 * 8 * 2,
            **dict.fromkeys(("int8", "fp8_e4m3", "fp8_e5m2"), 2 * 3 * 2 * (8 + 4)),
            "int4": 3 * 2 * (8 // 2 + 8 * 4 // 32) + 3 * 2 * (8 // 2 + 2 * 4),
            "int4_token": 2 * 3 * 2 * (8 // 2 + 2 * 4),
        },
        # A head of 8 has 16 slots in a row of 128 lanes, and a page of 32 two rows, or with shorter entries
        # what fills a word; so has each array of scales.
        "cache_bytes_on_tpu": {
            "f32": 2 * 3 * 2 * 2 * 128 * 4 // 32,
            "bf16": 2 * 3 * 2 * 2 * 128 * 2 // 32,
            **dict.fromkeys(("int8", "fp8_e4m3", "fp8_e5m2"), 2 * 3 * 2 * (4 * 128 + 128 * 4) // 32),
            **dict.fromkeys(("int4", "int4_token"), 2 * 3 * 2 * (4 * 128 + 2 * 2 * 128 * 2) // 32),
        },
        "cache_page_size": 32,
        "cache_groups": [
            {
                "layers": 3,
                "kind": "gqa",
                "window": None,
                "bytes_per_token": 2 * 3 * 2 * 8 * 4,
                "bytes_at_max_length": {"dense": 512 * 2 * 3 * 2 * 8 * 4},
            }
        ],
        "window_cache_share": None,
    }
    assert shown["file"]["format"] == "hf"
    assert set(shown["file"]["tensor_types"]) == {"F32"}
    assert shown["tokenizer"] == {"kind": None}


def test_windows_are_shown(run_jkv, tiny):
    shown = run_jkv("inspect", tiny.parent / "mistral_sliding")
    assert "windows                 16\n" in shown
    assert "windowed layers         3\n" in shown
    token = 2 * 3 * 2 * 8 * 4
    assert f"bytes_at_max_length dense {512 * token:,}, window {(16 + 1) * token:,}\n" in shown


def test_gemma_3_keeps_a_fraction_of_a_full_cache(run_jkv, tiny):
    # Of 7 layers one keeps 512 tokens, the others their window of 16 and the step's own.
    share = (512 + 6 * 17) / (7 * 512)
    shown = run_jkv("inspect", tiny.parent / "gemma3_local_global")
    assert f"window cache share      {share:.4f}\n" in shown
    assert "window rope             dim 16, theta 10000.0\n" in shown


def test_experts_are_shown(run_jkv, tiny):
    shown = run_jkv("inspect", tiny.parent / "mixtral_moe")
    assert "experts                 4\n" in shown
    assert "active experts          2\n" in shown


def test_json_is_what_the_function_returns(run_json, tiny):
    assert run_json("inspect", tiny, "--json") == [inspect(tiny)]


def test_the_tokenizer_and_its_template_are_shown(talking_tiny):
    tokenizer = inspect(talking_tiny)["tokenizer"]
    assert tokenizer["kind"] == "BPE"
    assert tokenizer["vocabulary"] == 320
    assert tokenizer["eos_ids"] == [319, 2]
    assert tokenizer["has_chat_template"]


def test_a_model_is_named_once(run_json, refusal, tiny):
    assert run_json("inspect", "--model", tiny, "--json") == [inspect(tiny)]
    for names in ((), (tiny, "--model", tiny)):
        assert "jkv: one model must be named, as jkv inspect smollm2-135m" in refusal("inspect", *names)


def test_a_name_of_sizes_alone_is_told_from_a_model(refusal):
    said = refusal("inspect", "llama-3.1-8b")
    assert said.endswith("of which configs/models has the sizes alone; give its folder, or ask jkv plan")
    said = refusal("score", "--model", "llama-3.1-8b", "--text", "x")
    assert said.endswith("has the sizes alone; give its folder, which holds weights")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "the checkpoint lacks tensors: ['model.layers.3."),
        ({"num_hidden_layers": 2}, "has tensors that the model does not use: ['model.layers.2."),
        ({"intermediate_size": 80}, "have the shape that the configuration gives, got ['model.layers.0.mlp"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(refusal, tiny, tmp_path, changes, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal("inspect", folder)


def test_a_checkpoint_of_other_parameters_is_refused(refusal, tiny, tmp_path):
    saved = tmp_path / "saved"
    save_checkpoint(saved, open_model(tiny).config, {"another": jnp.ones(2)})
    assert "must hold the model's parameters, got others or none for" in refusal("inspect", saved)


def test_a_folder_that_is_no_model_is_refused(refusal, tmp_path):
    assert "must hold config.json" in refusal("inspect", tmp_path)
