import tomllib
from pathlib import Path

import pytest

import jkv


def test_every_public_name_can_be_had():
    assert [name for name in jkv.__all__ if not hasattr(jkv, name)] == []
    assert set(jkv.__all__) <= set(dir(jkv))


def test_a_stranger_is_an_attribute_error():
    with pytest.raises(AttributeError, match="stranger"):
        _ = jkv.stranger


def test_the_version_is_the_package_s():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert jkv.__version__ == project["version"]
