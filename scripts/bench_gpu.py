"""Checks the GPU kernels of attention on a Hopper GPU, then times them beside peers, in ten minutes at most.

    PYTHONPATH=. python scripts/bench_gpu.py [--out gpu.jsonl] [--only heads_32_64_8192] [--interpret]

First every shape of `kernels_pallas.paged_attention.shapes` and of `scripts.gpu_checks` that a kernel takes
is compared with its float32 definition, in every codec; a wrong kernel ends the run, and a codec of heads or
latents of which no check has ended is not timed. `--only` asks for what has it in its name, and for the
checks of the heads and codecs that it times. Then a copy's bandwidth
and a large product's rate are measured. Then decode steps of Llama 3's and DeepSeek-V3's heads are timed,
those first that say most. Each runner is a process of its own (`scripts.gpu_runners`), has its part of the
time that is left, and may fail as it likes: what it did not run, and why, is in its lines. JSON lines go to
`--out`; the table and the goals come last. `--interpret` makes the checks of the named shapes alone, on a
CPU.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.gpu_cases import RUNNERS, Case, Runner, all_cases, goals, is_checked, table, with_rates

MODULE = ("-m", "scripts.gpu_runners")
# Of the checks, so that some time is left for what is timed.
CHECKS_S = 240
# A runner that ends this often without a result is left alone.
MAX_CRASHES = 3


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        lines: that it wrote, whole ones.
        failure: one sentence; None where it ended by itself, and well.
        is_late: its time was over.
    """

    lines: list[dict[str, Any]]
    failure: str | None
    is_late: bool


def run(command: Sequence[str], limit_s: float) -> Ended:
    """Run Python on words, of which `FILE` is its file of lines; it and what it starts end in `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder, "lines"), Path(folder, "errors")
        words = [str(file) if word == "FILE" else word for word in command]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with errors.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
            is_late = False
            try:
                process.wait(max(0.0, limit_s))
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                # Compilers that it started too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = errors.read_text(errors="replace").strip()
        lines = file.read_text(errors="replace").splitlines(keepends=True) if file.exists() else []
    failure = None
    if is_late:
        failure = f"ended after {limit_s:.0f} s"
    elif process.returncode:
        failure = f"ended with {process.returncode}: {said[-300:]}"
    return Ended([json.loads(line) for line in lines if line.endswith("\n")], failure, is_late)


def time_runner(
    runner: Runner, cases: dict[str, Case], limit_s: float, module: Sequence[str] = MODULE
) -> Iterator[dict[str, Any]]:
    """Yield a line for each case that the runner takes, with its time or why there is none."""
    if runner.module is not None and importlib.util.find_spec(runner.module) is None:
        yield {"runs": runner.name, "missing": f"{runner.module} is not installed"}
        return
    left = [name for name, case in cases.items() if runner.takes(case)]
    end, num_crashes = time.monotonic() + limit_s, 0
    while left:
        ended = run([*module, "FILE", "time", runner.name, ",".join(left)], end - time.monotonic())
        yield from ended.lines
        left = left[len(ended.lines) :]
        if not left:
            return
        num_crashes = 1 if ended.lines else num_crashes + 1
        yield _failed(runner, cases[left.pop(0)], ended.failure or "ended without a line")
        if ended.is_late or num_crashes == MAX_CRASHES:
            break
    for name in left:
        yield _failed(runner, cases[name], "not started")


def _failed(runner: Runner, case: Case, error: str) -> dict[str, Any]:
    return {"runs": runner.name, **case._asdict(), "error": error}


def time_all(
    runners: Sequence[Runner],
    cases: dict[str, Case],
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Yield all runners' lines; each has its part of the time that those before it have left."""
    end = clock() + limit_s
    for i, runner in enumerate(runners):
        share = runner.weight / sum(other.weight for other in runners[i:])
        yield from time_runner(runner, cases, share * max(0.0, end - clock()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the JSON lines, printed too")
    parser.add_argument("--only", default="", help="check and time only what has this in its name")
    parser.add_argument("--interpret", action="store_true", help="check in the interpreter, and time nothing")
    parser.add_argument("--limit-s", type=float, default=590, help="of the whole run")
    options = parser.parse_args(argv)
    if options.limit_s <= 0:
        parser.error(f"--limit-s must be positive, got {options.limit_s}")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists, got {options.out}")
    start, lines = time.monotonic(), []

    def left() -> float:
        return options.limit_s - (time.monotonic() - start)

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    words = [options.only, *(["--interpret"] if options.interpret else [])]
    limit = left() if options.interpret else min(CHECKS_S, left())
    checked = run([*MODULE, "FILE", "checks", *words], limit)
    for line in checked.lines:
        say(line)
    if checked.failure is not None:
        say({"checks": checked.failure})
    if not all(line["passed"] for line in checked.lines):
        sys.exit("the kernel is wrong: nothing is timed")
    if checked.failure is not None and not checked.is_late:
        sys.exit(f"the checks did not end: {checked.failure}")
    if not checked.lines:
        sys.exit(
            f"nothing was checked, so nothing is timed: no call of a kernel has {options.only!r} in its name"
        )
    if options.interpret:
        return
    asked = {name: case for name, case in all_cases().items() if options.only in name}
    cases = {name: case for name, case in asked.items() if is_checked(case, checked.lines)}
    if unchecked := sorted(asked.keys() - cases.keys()):
        say({"not timed": unchecked, "error": "no check of it has ended"})
    if not cases:
        return
    measured = run([*MODULE, "FILE", "roofs"], left())
    if not measured.lines:
        sys.exit(f"the roofs could not be measured: {measured.failure}")
    (roofs,) = measured.lines
    say(roofs)
    for line in time_all(RUNNERS, cases, left()):
        say(with_rates(line, roofs))
    print(table(lines))
    for goal in goals(lines):
        relation = "at least" if goal.is_least else "at most"
        print(f"{goal.text}, {relation} {goal.bound}: {goal.verdict}")


if __name__ == "__main__":
    main()
