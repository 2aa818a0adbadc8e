"""The tiny golden checkpoint, and a way to run the command in this process."""

import json
import shutil
from pathlib import Path

import pytest

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
        return line

    return run
