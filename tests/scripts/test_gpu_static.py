"""The static bound of GPU kernels, where its disassembler is not what is asked for."""

import re
from pathlib import Path

import pytest

from scripts import gpu_static


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "--cuda must be a folder whose bin/nvdisasm runs, got .*: No such file"),
        ("not a program", "--cuda must be a folder whose bin/nvdisasm runs, got .*: Exec format error"),
        (
            "#!/bin/sh\necho no such library >&2; exit 127",
            "bin/nvdisasm must run, got 127 .*: no such library",
        ),
    ],
    ids=["absent", "of_another_machine", "broken"],
)
def test_a_disassembler_that_does_not_run_is_refused(
    program: str | None, message: str, tmp_path: Path, monkeypatch, capsys
):
    if program is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvdisasm").write_text(program)
        (tmp_path / "bin" / "nvdisasm").chmod(0o755)
    monkeypatch.setattr("sys.argv", ["gpu_static.py", "--cuda", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_static.main()
    (said,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.search(message, said)
