import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = (
    "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of `pyproject.toml` in a folder against the packages in that folder."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def make_packages(folder: Path, module: str, line: str) -> None:
    """Lay out packages that keep every contract but for one line in one module."""
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    cache = ("__init__", "allocator", "codec", "spec")
    plan = ("__init__", "capacity", "decoder", "lengths", "page", "plot")
    files = (
        "axes.py",
        "ops.py",
        "sharding.py",
        "config/__init__.py",
        *(f"cache/{name}.py" for name in cache),
        *(f"plan/{name}.py" for name in plan),
    )
    for file in ("kernels_pallas/__init__.py", "jkv/__init__.py", *(f"jkv/{name}" for name in files)):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / module).write_text(f"{line}\n")


def test_the_code_keeps_the_dependency_rule():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("jkv/cache/__init__.py", "import jkv.ops", "Each layer imports only layers below it"),
        ("jkv/sharding.py", "import kernels_pallas", "Only jkv.ops imports kernels_pallas"),
        ("kernels_pallas/__init__.py", "import jkv.axes", "kernels_pallas never imports jkv"),
        ("jkv/config/__init__.py", "import jax.numpy", "Configuration and cache arithmetic import no JAX"),
        (
            "jkv/cache/spec.py",
            "def late():\n    import jax",
            "Configuration and cache arithmetic import no JAX",
        ),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, module, line, contract):
    make_packages(tmp_path, module, line)
    result = lint(tmp_path)
    assert result.returncode == 1
    assert f"{contract} BROKEN" in result.stdout, result.stdout


def test_a_module_outside_the_layers_is_caught(tmp_path):
    make_packages(tmp_path, "jkv/stranger.py", "")
    result = lint(tmp_path)
    assert result.returncode == 1
    assert "stranger" in result.stdout


def test_packages_without_a_violation_pass(tmp_path):
    make_packages(tmp_path, "jkv/ops.py", "import kernels_pallas")
    assert lint(tmp_path).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        "jkv",
        "jkv.axes",
        "jkv.config",
        "jkv.cache.allocator",
        "jkv.cache.spec",
        "jkv.plan.capacity",
        "jkv.plan.page",
    ],
)
def test_what_plans_without_a_device_imports_no_jax(module):
    code = f"import sys, {module}; sys.exit(sorted({{'jax', 'jaxlib', 'flax'}} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
