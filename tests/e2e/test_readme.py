"""README.md's Python runs as it stands, and its `jkv check` says what is shown."""

import re
import shlex
from pathlib import Path

import jax
import pytest

from jkv.cli import main

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    text = README.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def test_the_python_of_the_readme_runs():
    assert blocks("python"), "README.md shows no Python"
    namespace: dict = {"__name__": "readme"}
    # A reader's JAX has its defaults, and optax relies on them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks("python"):
            exec(compile(block, str(README), "exec"), namespace)


@pytest.mark.model
def test_configurations_that_the_readme_checks_fit(capsys, monkeypatch):
    monkeypatch.setenv("JKV_CACHE", "off")
    commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("jkv check ")]
    assert commands, "README.md checks no configuration"
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
        assert "parameters: " in capsys.readouterr().out


@pytest.mark.model
def test_configurations_that_the_readme_refuses_are_refused_in_its_words(capsys, monkeypatch):
    monkeypatch.setenv("JKV_CACHE", "off")
    refused = [block for block in blocks("") if block.startswith("$ jkv ")]
    assert refused, "README.md refuses no configuration"
    for block in refused:
        command, _, said = block.partition("\n")
        assert main(shlex.split(command)[2:]) == 2
        assert capsys.readouterr().err == said
