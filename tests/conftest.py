"""Set the whole suite up: eight CPU devices, strict promotion, checked signatures, examples of any length."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import jaxtyping
import pytest

from .gate_output import gate_lines

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jaxtyping.install_import_hook(["jkv", "kernels_pallas"], "beartype.beartype")
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Linux gives a process 65,530 maps of memory, and every compiled program takes some: JAX ends without a word.
_MOST_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def few_maps() -> Iterator[None]:
    """Forget compiled programs before they are too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what passing compile gates found of GPU kernels: a log shows it of failing ones alone."""
    if lines := list(gate_lines(terminalreporter.getreports("passed"))):
        terminalreporter.section("kernels: registers, bytes spilled, bytes of shared memory")
        for line in lines:
            terminalreporter.write_line(line)
