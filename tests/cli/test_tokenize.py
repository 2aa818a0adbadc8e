import json
from pathlib import Path

import pytest

from jkv.cli import tokenize
from jkv.models.load import load_tokenizer

CASES = Path(__file__).parents[1] / "golden" / "smollm2" / "tokens.json"


def test_tokens_are_listed_with_their_spelling(run_jkv, talking_tiny):
    lines = run_jkv("tokenize", "--model", talking_tiny, "--text", "a b").splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["'a'", "'Ġ'", "'b'"]


@pytest.mark.parametrize(("flags", "count"), [((), 7), (("--special",), 1)])
def test_control_tokens_are_parsed_where_asked(run_json, talking_tiny, flags, count):
    (shown,) = run_json("tokenize", "--model", talking_tiny, "--text", "<|end|>", "--json", *flags)
    assert len(shown["tokens"]) == count
    assert shown["decoded"] == shown["text"] == "<|end|>"


def test_a_model_without_a_tokenizer_is_refused(refusal, tiny):
    assert "must have a tokenizer.json" in refusal("tokenize", "--model", tiny, "--text", "x")


@pytest.mark.model
def test_smollm2_s_tokens_are_the_reference_s(run_json, monkeypatch):
    tokenizer = load_tokenizer("smollm2-135m")
    # Read once for all cases.
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda location: tokenizer)
    for case in json.loads(CASES.read_text(encoding="utf-8")):
        flags = ("tokenize", "--model", "smollm2-135m", f"--text={case['text']}", "--json")
        assert run_json(*flags)[0]["tokens"] == case["plain"]
        assert run_json(*flags, "--special")[0]["tokens"] == case["special"]
