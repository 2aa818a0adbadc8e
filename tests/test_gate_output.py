"""What the end of a log shows of compile gates that passed."""

import pytest

from .gate_output import gate_lines


def make_report(name: str, *, mark: str = "gpu_aot", when: str = "call") -> pytest.TestReport:
    sections = [
        ("Captured stdout call", "kernel (92, 0, 0)\nmerge (40, 0, 0)\n"),
        ("Captured stderr call", "no\n"),
    ]
    place = (f"tests/test_x.py::{name}", ("tests/test_x.py", 1, name))
    return pytest.TestReport(*place, {mark: 1}, "passed", None, when, sections)


def test_what_gates_of_gpu_kernels_print_is_shown_by_their_names():
    reports = [
        make_report("test_a[llama-int8]"),
        make_report("test_a[llama-int8]", when="teardown"),
        make_report("test_b", mark="gate"),
    ]
    assert list(gate_lines(reports)) == [
        "test_a[llama-int8]: kernel (92, 0, 0)",
        "test_a[llama-int8]: merge (40, 0, 0)",
    ]
