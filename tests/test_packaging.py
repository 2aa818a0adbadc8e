import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_constraints_are_exact_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [
        re.match(r"[\w-]+", line)[0] for line in project["dependencies"] + extras["test"] + extras["dev"]
    ]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(names) - pinned == {"jkv"}


@pytest.mark.gate
def test_the_wheel_carries_the_configurations(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("jkv-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    configs = {
        f"jkv/configs/{file.relative_to(ROOT / 'configs')}" for file in (ROOT / "configs").rglob("*.yaml")
    }
    assert configs <= held
    assert {"jkv/py.typed", "jkv/plan/calculator.html", "kernels_pallas/__init__.py"} <= held
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = "from jkv.config import load_config; print(load_config('smollm2-cpu').model.path)"
    environment = {"PYTHONPATH": str(unpacked)}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "smollm2-135m\n"
