"""The command that measures scales, and the verbs that read them."""

import numpy as np
import pytest
import safetensors.numpy

POOL = ("--cache.layout", "paged", "--cache.num-pages", 1)
MESH = ("--mesh.axes", "data", 1, "model", 2, "--mesh.axis-types", "explicit")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 3)
    return file


@pytest.fixture
def out(tmp_path):
    return tmp_path / "scales.safetensors"


def test_calibrated_scales_serve_the_model_that_they_were_measured_on(
    run_jkv, run_json, refusal, talking_tiny, text, out
):
    model = ("--model", talking_tiny)
    said = run_jkv("calibrate", *model, "--text", text, "--out", out, "--method", "absmax")
    assert said == f"{out}: scales by absmax per head, from 186 tokens\n"
    flags = ("score", *model, "--text", text, "--codec", "int8_static", "--scales", out)
    (shown,) = run_json(*flags, "--compare", "f32", "--json")
    found = shown["codecs"]["int8_static"]
    assert found["bytes_per_token"] == 2 * 3 * 2 * 8
    assert 0 < found["mean_kld"] < 1e-3

    weights = safetensors.numpy.load_file(talking_tiny / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= np.float32(1.01)
    safetensors.numpy.save_file(weights, talking_tiny / "model.safetensors")
    assert f"{out} must be calibrated on this model" in refusal(*flags)
    cache = ("--cache.codec", "int8_static", "--cache.scales", out)
    said = refusal("check", "smollm2-cpu", "--model.path", talking_tiny, *cache)
    assert f"{out} must be calibrated on this model" in said


def test_a_mesh_a_pool_and_short_steps_change_little(run_jkv, talking_tiny, text, out, tmp_path):
    flags = ("calibrate", "--model", talking_tiny, "--text", text, "--codec", "int8_static", "--value-codec")
    other = tmp_path / "other.safetensors"
    run_jkv(*flags, "f32", "--method", "absmax", "--context", 40, "--out", out)
    run_jkv(*flags, "f32", "--method", "absmax", "--context", 40, "--out", other, *MESH, *POOL, "--chunk", 16)
    one, two = (safetensors.numpy.load_file(file) for file in (out, other))
    assert list(one) == ["keys.0"]
    np.testing.assert_allclose(two["keys.0"], one["keys.0"], rtol=1e-4)


@pytest.mark.parametrize(
    "flags", [("--cache", "paged"), ("--config", "smollm2-cpu"), ("--cache", "paged-int8")]
)
def test_a_cache_without_scales_is_measured_for_int8_static(run_jkv, talking_tiny, text, out, flags):
    run_jkv("calibrate", "--model", talking_tiny, "--text", text, "--out", out, "--method", "absmax", *flags)
    assert list(safetensors.numpy.load_file(out)) == ["keys.0", "values.0"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--value-codec", "int8"), "a codec whose name ends in _static, got f32 and int8; give --codec"),
        (
            ("--codec", "int8"),
            "scales are measured for a codec whose name ends in _static, got int8; give --codec int8_static",
        ),
        (("--codec", "int8_static", "--scales", "x"), "--scales is what other verbs read"),
        (("--codec", "int8_static", "--percentile", 99.0), "--percentile is for --method percentile alone"),
        (("--method", "percentile", "--percentile", 101.0), "percentile must be above 0 and at most 100"),
        (("--codec", "int8_static", "--context", 0), "--context must be at least 1 token, got 0"),
        (("--codec", "int8_static", "--context", 9999), "the model reads at most 512 tokens, got 600"),
        (("--codec", "int8_static", "--method", "max"), "--method: must be absmax or mse or percentile"),
        (
            ("--codec", "int8_static", "--out", "none/x"),
            "--out must be a file that can be written, got none/x",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(refusal, talking_tiny, text, out, flags, message):
    text.write_text("x" * 600)
    said = refusal("calibrate", "--model", talking_tiny, "--text", text, "--out", out, *flags)
    assert message in said
    assert not out.exists()


def test_an_empty_text_measures_nothing(refusal, talking_tiny, text, out):
    text.write_text("")
    said = refusal("calibrate", "--model", talking_tiny, "--text", text, "--out", out)
    assert said == f"jkv: {text} must hold a text to measure on, got an empty one"


@pytest.mark.parametrize(
    "verb", [("score", "--text", "x"), ("generate", "--prompt", "x"), ("bench", "decode")]
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--codec", "int8_static"), "cache.scales: must name a file for int8_static, got none"),
        (("--scales", "x"), "cache.scales: must be left out for f32, got"),
        (
            ("--codec", "int8", "--scales", "x"),
            "cache.scales: must be left out for int8, got",
        ),
    ],
)
def test_scales_and_codecs_that_do_not_belong_together_are_refused(refusal, tiny, verb, flags, message):
    assert message in refusal(*verb, "--model", tiny, *flags)
