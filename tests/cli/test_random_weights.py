"""Verbs and the short program on weights that are drawn, of a preset in the working folder."""

import numpy as np
import pytest

from jkv.cli import bench
from jkv.decode import configured
from scripts import decode

PRESET = """
path: organization/small
dtype: float32
weights: bfloat16
sizes:
  {num_layers: 1, embed_dim: 64, vocab_size: 320, num_heads: 4, num_kv_heads: 2, head_dim: 16, mlp_dim: 128,
   max_length: 512}
"""
SMALL = ("--model", "small", "--random-weights")
DECODE = ("bench", "decode", "--batch", 1, "--context", 16, "--steps", 2, "--repeats", 1)


@pytest.fixture(autouse=True)
def _preset(tmp_path, monkeypatch):
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "small.yaml").write_text(PRESET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)


def test_a_preset_is_measured_and_said_to_be_random(run_jkv):
    said, _, _, measured = run_jkv(*DECODE, *SMALL).splitlines()
    assert said == "weights: random, of the sizes of organization/small"
    # In bfloat16, without the embedding that is looked up; the cache in float32.
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 3 * 64 + 320 * 64
    assert measured.split()[-2] == f"{(2 * weights + (16 + 1) * 2 * 2 * 16 * 4) / 1e6:,.1f}"


def test_packed_weights_continue_token_ids(run_json):
    asked = ("--prompt-tokens", "1,2,3", "--max-new-tokens", 4, "--json")
    (shown,) = run_json("generate", *SMALL, "--weights", "int4", *asked)
    assert shown["random_weights"]
    assert len(shown["tokens"]) == 4


def test_the_short_program_prints_token_ids_of_a_mesh(capsys):
    flags = ("--model", "small", "--model.has-random-weights", "--mesh.axes", "data", "1", "model", "2")
    decode.main("default", "1,2,3", *flags, "--engine.sampling.max-new-tokens", "4")
    tokens = [int(token) for token in capsys.readouterr().out.split(",")]
    assert len(tokens) == 4
    assert all(0 <= token < 320 for token in tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DECODE, "--model", "small"), "--random-weights to draw weights of these sizes"),
        ((*DECODE, "--model", "smal", "--random-weights"), 'did you mean "small"?'),
        (
            (*DECODE, *SMALL, "--model.path", "other"),
            "model.sizes: must be given for random weights, got none",
        ),
        (("generate", *SMALL, "--prompt", "hi"), "random weights have no tokenizer; give --prompt-tokens"),
        (
            ("score", "--config", "default", "--model.has-random-weights", "--tokens", "tokens.npz"),
            "model.has_random_weights must be false where a model's files are read",
        ),
    ],
)
def test_what_random_weights_cannot_do_is_refused(refusal, arguments, message):
    np.savez("tokens.npz", tokens=[[1, 2]])
    assert message in refusal(*arguments)


@pytest.mark.parametrize("name", ["pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_kernel_of_another_device_is_refused_before_weights_are_drawn(
    refusal, name: str, num_devices: int, monkeypatch
):
    monkeypatch.setattr(configured, "make_model", None)
    mesh = ("--mesh.axes", "data", "1", "model", str(num_devices))
    assert f"attention '{name}' runs on" in refusal(*DECODE, *SMALL, "--attention", name, *mesh)
    flags = ("--model", "small", "--model.has-random-weights", "--engine.attention", name)
    with pytest.raises(ValueError, match=f"attention '{name}' runs on"):
        decode.main("default", "1,2,3", *flags, *mesh)
