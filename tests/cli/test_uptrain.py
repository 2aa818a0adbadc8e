"""`jkv uptrain`: a trained folder that decodes, its curve, and what is refused."""

import numpy as np
import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and the dog on the log. " * 8)
    return path


def test_a_trained_model_is_written_with_its_tokenizer_and_its_curve(
    run_json, talking_tiny, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    plot = tmp_path / "curve.png"
    # The teacher is the model itself: at first its half of the loss is zero.
    learning = ("--teacher", talking_tiny, "--teacher-share", 0.5, "--learning-rate", 1e-2, "--warmup", 0)
    flags = ("--steps", 4, "--length", 16, "--batch", 2, *learning, "--keep", tmp_path / "run")
    command = ("uptrain", "--model", talking_tiny, "--text", text, *flags)
    (shown,) = run_json(*command, "--plot", plot, "--json")
    assert shown["out"] == "model-uptrained"
    assert len(shown["losses"]) == 4
    assert shown["losses"][0] == pytest.approx(np.log(shown["perplexity"]) / 2, rel=0.1)
    assert shown["uptrained_perplexity"] < shown["perplexity"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    (inspected,) = run_json("inspect", tmp_path / "model-uptrained", "--json")
    assert inspected["file"]["format"] == "checkpoint"
    assert set(inspected["file"]["tensor_types"]) == {"float32"}
    assert inspected["tokenizer"]["kind"] == "BPE"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "a text must have more than 256 tokens to learn from and as many held out, got 336 and 48"),
        (("--length", 600), "--length must be at most the model's 512 tokens, got 600"),
        (("--steps", 5, "--length", 16, "--warmup", 10), "warmup must be less than the 5 steps, got 10"),
        # Ten steps of warm-up if left out, but of fewer steps all but one: the text is what is wrong here.
        (("--steps", 5), "a text must have more than 256 tokens"),
        (("--learning-rate", "nan"), "of which clip may be infinite, got nan, 1.0 and 0.01"),
        (("--teacher-share", 0.5), "--teacher-share is for --teacher alone"),
        (("--keep-every", 0), "--keep-every must be at least 1 step, got 0"),
        (("--keep-every", 5), "--keep-every is for --keep alone"),
        (("--plot", "curve.xyz"), "a curve's file must end in one of"),
        (("--momentum", 1), "--momentum"),
    ],
)
def test_what_cannot_be_trained_is_refused(refusal, talking_tiny, text, tmp_path, flags, message):
    command = ("uptrain", "--model", talking_tiny, "--text", text, "--out", tmp_path / "out", "--steps", 20)
    assert message in refusal(*command, *flags)


def test_a_teacher_of_another_vocabulary_is_refused(refusal, talking_tiny, tiny, text, tmp_path):
    command = ("uptrain", "--model", talking_tiny, "--text", text, "--out", tmp_path / "out", "--steps", 20)
    said = refusal(*command, "--teacher", tiny.parent / "qwen2")
    assert "a teacher must have the model's vocabulary of 320 tokens, got 96" in said
