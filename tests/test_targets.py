import pytest

from jkv.targets import target


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="target must be one of v5e, v5p, v6e, tpu7x, h200, got 'v6'"):
        target("v6")


@pytest.mark.parametrize("name", ["v6e", "h200"])
def test_a_compiler_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=rf"to compile for {name}, .* pip install 'jkv\[aot\]'"):
        target(name)
