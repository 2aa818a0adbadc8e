"""The short program to copy: a configuration in, text out."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "decode.py"


@pytest.fixture
def run_script(monkeypatch):
    def run(*argv: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in (SCRIPT, *argv)])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def test_the_script_prints_what_the_command_does(run_script, run_jkv, capsys, talking_tiny):
    run_script("default", "a", "--model.path", talking_tiny, "--engine.sampling.max-new-tokens", 4)
    shown = capsys.readouterr().out
    assert len(shown) > 1
    assert shown == run_jkv("generate", "--model", talking_tiny, "--prompt", "a", "--max-new-tokens", 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("default",), "python scripts/decode.py smollm2-cpu"),
        (("defualt", "a"), 'must name a file in configs, got "defualt" (did you mean "default"?)'),
        (("default", "", "--model.path", "{model}"), "prompt 0 is empty"),
        (("default", "a", "--model.path", "{model}", "--cache.capacity", "1"), "need a capacity of"),
        (("default", "a", "--model.path", "{model}", "--cache.size", "1"), "--cache.size: is not a flag"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(run_script, capsys, talking_tiny, argv, message):
    with pytest.raises(SystemExit) as caught:
        run_script(*(argument.replace("{model}", str(talking_tiny)) for argument in argv))
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, message in printed.err) == ("", True)


@pytest.mark.parametrize("prompt", ["", "abc", "1,,2", "1_0", "-1"])
def test_a_prompt_without_a_tokenizer_is_token_ids(prompt: str):
    token_ids = runpy.run_path(str(SCRIPT))["token_ids"]
    assert token_ids("1, 2,3") == [1, 2, 3]
    with pytest.raises(ValueError, match="must be token ids, as 1,2,3, got"):
        token_ids(prompt)
