import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    "name", [pytest.param("v6e", marks=pytest.mark.tpu_aot), pytest.param("h200", marks=pytest.mark.gpu_aot)]
)
def test_a_program_is_compiled_twice_without_a_word(name: str, tmp_path: Path):
    code = f"""if True:
        import jax
        from jkv.targets import shapes_on, target
        mesh = target({name!r})
        jax.jit(lambda x: x @ x).lower(shapes_on(mesh, jax.ShapeDtypeStruct((128, 128), "float32"))).compile()
    """
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **kept},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
    assert not list(tmp_path.iterdir())
