"""What compile gates that passed have printed of GPU kernels, for the end of a log."""

from collections.abc import Iterable, Iterator

import pytest

# In which a kernel's registers, bytes spilled and bytes of shared memory are printed.
MARK = "gpu_aot"


def gate_lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield a line for each that a compile gate of GPUs printed, its name before it."""
    for report in reports:
        if report.when == "call" and MARK in report.keywords:
            for line in report.capstdout.splitlines():
                yield f"{report.nodeid.rpartition('::')[2]}: {line}"
