"""The Python of pages runs as it stands, and what `jkv check` says is what README.md shows."""

import re
import shlex
from pathlib import Path

import jax
import pytest

from jkv.cli import main

ROOT = Path(__file__).parents[2]


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


@pytest.mark.parametrize("page", ["README.md", "docs/cache.md", "docs/layers.md"])
def test_the_python_of_a_page_runs(page):
    assert blocks("python", page), f"{page} shows no Python"
    namespace: dict = {"__name__": "page"}
    # A reader's JAX has its defaults, and optax relies on them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks("python", page):
            exec(compile(block, page, "exec"), namespace)


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
