"""The tiny golden checkpoint, and a way to run the command in this process."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jkv.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def _no_kept_programs(monkeypatch):
    monkeypatch.setenv("JKV_CACHE", "off")


@pytest.fixture(scope="session")
def tiny():
    """The folder of a llama with random weights, 320 tokens and no tokenizer."""
    return GOLDEN / "llama"


@pytest.fixture
def copy_of_tiny(tiny, tmp_path):
    """A copy of the folder, to damage."""
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.fixture
def talking_tiny(copy_of_tiny):
    """The folder with a tokenizer of bytes, 63 pairs of letters and `<|end|>`, and with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [letters[index] + letters[index + 1] for index in range(63)]
    vocabulary = {token: index for index, token in enumerate([*letters, *pairs, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(copy_of_tiny / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (copy_of_tiny / "tokenizer_config.json").write_text(json.dumps(config))
    return copy_of_tiny


@pytest.fixture
def run_jkv(capsys):
    """Runs the command and returns what it printed; it must succeed."""

    def run(*argv) -> str:
        code = main([str(argument) for argument in argv])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def run_json(run_jkv):
    """Runs the command and returns the JSON objects that it printed, one a line."""

    def run(*argv) -> list:
        return [json.loads(line) for line in run_jkv(*argv).splitlines()]

    return run


@pytest.fixture
def refusal(capsys):
    """Runs the command, which must fail as a usage error, and returns its one line on standard error."""

    def run(*argv) -> str:
        code = main([str(argument) for argument in argv])
        printed = capsys.readouterr()
        assert code == 2
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("jkv: ")
        return line

    return run
