"""`jkv convert`: a folder that the other verbs take, what was lost, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jkv.models.load import load_model
from jkv.sharding import Sharding

RULES = {"q_head": "model", "kv_head": "model"}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and the dog on the log. " * 8)
    return path


def test_latents_are_written_with_their_tokenizer_and_decode(run_json, talking_tiny, text, tmp_path):
    out = tmp_path / "latent"
    flags = ("--latent", 32, "--rope", 16, "--text", text, "--row", 32, "--json")
    (shown,) = run_json("convert", "--model", talking_tiny, "--out", out, *flags)
    assert shown["bytes_per_token"] == 3 * 2 * 2 * 2 * 8
    assert shown["converted_bytes_per_token"] == 3 * 2 * (32 + 16)
    assert [set(errors) for errors in shown["errors"]] == [{"rotation", "keys", "values"}] * 3
    # All entries stay rotated and the latent has full rank.
    assert shown["text"]["converted_perplexity"] == pytest.approx(shown["text"]["perplexity"], rel=1e-5)
    assert abs(shown["text"]["mean_kld"]) < 1e-6
    (inspected,) = run_json("inspect", out, "--json")
    assert inspected["architecture"]["latent"]["has_norm"] is False
    # Of eight rotated pairs, the frequencies that each had.
    assert len(inspected["architecture"]["rope"]["frequency_factors"]) == 8
    assert inspected["tokenizer"]["kind"] == "BPE"
    (made,) = run_json("generate", "--model", out, "--prompt", "the ca", "--max-new-tokens", 4, "--json")
    assert len(made["tokens"]) == 4


def test_pooled_heads_halve_the_cache_in_a_folder_named_after_the_model(
    run_jkv, refusal, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = run_jkv("convert", "--model", tiny, "--kv-heads", 1).splitlines()
    assert len(shown) == 6
    assert shown[-2:] == ["cache bytes a token in bf16: 192, converted 96", "written to llama-converted"]
    assert "new folder, got llama-converted; remove" in refusal("convert", "--model", tiny, "--kv-heads", 1)


def test_a_converted_model_loads_onto_a_mesh_in_another_dtype(run_jkv, tiny, tmp_path):
    run_jkv("convert", "--model", tiny, "--out", tmp_path / "latent", "--latent", 12, "--rope", 4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = Sharding.create(mesh, RULES)
    weights = load_model(tmp_path / "latent", param_dtype=jnp.bfloat16, sharding=sharding).weights
    assert {array.dtype for array in weights} == {jnp.dtype("bfloat16")}
    assert {array.sharding.mesh for array in weights} == {mesh}
    assert any(not array.sharding.is_fully_replicated for array in weights)
    for array, plain in zip(weights, load_model(tmp_path / "latent").weights, strict=True):
        assert (jax.device_get(array) == jax.device_get(plain.astype(jnp.bfloat16))).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "exactly one of --kv-heads and --latent must be given"),
        (("--kv-heads", 1, "--latent", 8), "exactly one of --kv-heads and --latent must be given"),
        (("--kv-heads", 1, "--rope", 8), "--rope and --span are for --latent alone"),
        (("--kv-heads", 1, "--row", 64), "--held-out, --row and --max-rows are for --text alone"),
        (("--kv-heads", 3), "KV heads must divide the model's 2, got 3"),
        (("--latent", 8, "--row", 1000, "--text", "x"), "--row must be at most the model's 512 tokens"),
    ],
)
def test_what_is_not_converted_is_refused(refusal, tiny, tmp_path, flags, message):
    assert message in refusal("convert", "--model", tiny, "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(refusal, tiny, tmp_path):
    said = refusal("convert", "--model", tiny, "--out", tmp_path, "--kv-heads", 1)
    assert "a checkpoint must go to a new folder" in said


def test_a_folder_that_cannot_be_made_is_refused(refusal, tiny, text):
    said = refusal("convert", "--model", tiny, "--out", text / "out", "--kv-heads", 1)
    assert f"{text} is none to write to" in said
