"""Checks the GPU kernels on a Hopper GPU, then times them beside peers, in ten minutes at most.

    PYTHONPATH=. python scripts/bench_gpu.py [--out gpu.jsonl] [--only heads_32_64_8192] [--interpret]

First every shape of `kernels_pallas.paged_attention.shapes` and of `scripts.gpu_checks` that a kernel takes
is compared with its float32 definition, in every codec; a wrong kernel ends the run, and a codec of heads or
latents of which no check has ended is not timed. `--only` asks for what has it in its name, and for the
checks of the heads and codecs that it times. Page writes are compared with those that XLA makes, and timed
beside them; `--only page_write` asks for them alone. Then a copy's bandwidth and a large product's rate are
measured. Then decode steps of Llama 3's and DeepSeek-V3's heads are timed,
those of goals first. Each runner is a process of its own (`scripts.gpu_runners`), has its part of the
time that is left, and may fail as it likes: what it did not run, and why, is in its lines. JSON lines go to
`--out`; the table and the goals come last. A runner that has its kernels built is warmed up beside the
checks, and the line says how long that took. `--interpret` makes the checks of the named shapes alone, on a
CPU.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.gpu_cases import (
    RUNNERS,
    Case,
    Runner,
    all_cases,
    all_writes,
    goals,
    is_checked,
    table,
    to_build,
    with_rates,
    write_lines,
)

MODULE = ("-m", "scripts.gpu_runners")
# Of the checks, so that some time is left for what is timed.
CHECKS_S = 240
# Of page writes.
WRITES_S = 60
# Of kernels that peers have built beside the checks, and for a while after them.
BUILDS_S = 240
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


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Callable[[float], Ended]]:
    """Start Python on words, of which `FILE` is its file of lines; yields what waits for it, so many seconds.

    It and what it started have ended after the block.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder, "lines"), Path(folder, "errors")
        words = [str(file) if word == "FILE" else word for word in command]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if "--interpret" in command:
            # Interpreted warp groups wait for one another, in threads of which JAX has as many as devices.
            devices = "--xla_force_host_platform_device_count=8"
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
        with errors.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )

        def end() -> None:
            # Compilers that it started too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        def wait(limit_s: float) -> Ended:
            is_late = False
            try:
                process.wait(max(0.0, limit_s))
            except subprocess.TimeoutExpired:
                is_late = True
            end()
            failure = None
            if is_late:
                failure = f"ended after {limit_s:.0f} s"
            elif process.returncode:
                said = errors.read_text(errors="replace").strip()
                failure = f"ended with {process.returncode}: {said[-300:]}"
            lines = file.read_text(errors="replace").splitlines(keepends=True) if file.exists() else []
            return Ended([json.loads(line) for line in lines if line.endswith("\n")], failure, is_late)

        try:
            yield wait
        finally:
            end()


def run(command: Sequence[str], limit_s: float) -> Ended:
    """Run Python on words; see `started`."""
    with started(command) as wait:
        return wait(limit_s)


@contextlib.contextmanager
def built(runners: Iterable[Runner], cases: Collection[Case]) -> Iterator[Callable[[float], Iterator[dict]]]:
    """Have the kernels of runners built, each in a process; yields what waits for them, and gives lines."""
    start, waits = time.monotonic(), {}
    with contextlib.ExitStack() as stack:
        for runner in runners:
            if runner.builds and is_here(runner) and (least := to_build(runner, cases)):
                names = ",".join(case.name for case in least)
                waits[runner.name] = stack.enter_context(
                    started([*MODULE, "FILE", "time", runner.name, names])
                )

        def wait(limit_s: float) -> Iterator[dict[str, Any]]:
            for name, wait_for in waits.items():
                ended = wait_for(limit_s - (time.monotonic() - start))
                errors = [line["error"] for line in ended.lines if "error" in line]
                failures = [*errors, *([ended.failure] if ended.failure else [])]
                line = {"builds": name, "ended_after_s": round(time.monotonic() - start)}
                yield line | ({"errors": failures} if failures else {})

        yield wait


def is_here(runner: Runner) -> bool:
    """Return whether what a runner needs is installed."""
    return runner.module is None or importlib.util.find_spec(runner.module) is not None


def time_runner(
    runner: Runner, cases: dict[str, Case], limit_s: float, module: Sequence[str] = MODULE
) -> Iterator[dict[str, Any]]:
    """Yield a line for each case that the runner takes, with its time or why there is none."""
    if not is_here(runner):
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


def failure_of(checked: Ended, only: str, *, is_interpreted: bool) -> str | None:
    """Return why nothing may be timed after such checks; None where something may."""
    if not all(line["passed"] for line in checked.lines):
        return "the kernel is wrong: nothing is timed"
    if checked.failure is not None and not checked.is_late:
        return f"the checks did not end: {checked.failure}"
    if checked.lines:
        return None
    if checked.is_late:
        return f"nothing was checked, so nothing is timed: the checks {checked.failure}"
    if is_interpreted:
        return f"nothing was checked: --interpret takes shapes.py alone, where no name has {only!r} in it"
    return f"nothing was checked, so nothing is timed: no call that a kernel takes has {only!r} in its name"


def is_writable(file: Path) -> bool:
    """Return whether a file may be written, over one that there is or in a folder."""
    return not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the JSON lines, printed too")
    parser.add_argument("--only", default="", help="check and time only what has this in its name")
    parser.add_argument("--interpret", action="store_true", help="check in the interpreter, and time nothing")
    parser.add_argument("--limit-s", type=float, default=590, help="of the whole run")
    options = parser.parse_args(argv)
    if not 0 < options.limit_s < math.inf:
        parser.error(f"--limit-s must be positive and finite, got {options.limit_s}")
    if options.out is not None and not is_writable(options.out):
        parser.error(f"--out must be a file that can be written, got {options.out}; make its folder first")
    start, lines = time.monotonic(), []

    def left() -> float:
        return options.limit_s - (time.monotonic() - start)

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    words = [options.only, *(["--interpret"] if options.interpret else [])]

    def limit(most: float) -> float:
        return left() if options.interpret else min(most, left())

    asked = {name: case for name, case in all_cases().items() if options.only in name}
    written = Ended([], None, is_late=False)
    if any(options.only in name for name in all_writes()):
        written = run([*MODULE, "FILE", "writes", *words], limit(WRITES_S))
    for line in written.lines:
        say(line)
    if written.failure is not None:
        say({"page writes": written.failure})
    if not all(line["passed"] for line in written.lines):
        sys.exit("the kernel of page writes is wrong: nothing is timed")
    with built(() if options.interpret else RUNNERS, asked.values()) as wait_for_builds:
        checked = run([*MODULE, "FILE", "checks", *words], limit(CHECKS_S))
        for line in checked.lines:
            say(line)
        if checked.failure is not None:
            say({"checks": checked.failure})
        if failure := failure_of(checked, options.only, is_interpreted=options.interpret):
            if written.lines and not checked.lines and checked.failure is None:
                # No other has such a name.
                return
            sys.exit(failure)
        if options.interpret:
            return
        for line in wait_for_builds(min(BUILDS_S, options.limit_s)):
            say(line)
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
    print(table(lines), *write_lines(lines), sep="\n")
    said = "" if checked.failure is None else f"; others did not run: {checked.failure}"
    print(f"checks: {len(checked.lines)} passed{said}")
    for goal in goals(lines):
        relation = "at least" if goal.is_least else "at most"
        print(f"{goal.text}, {relation} {goal.bound}: {goal.verdict}")


if __name__ == "__main__":
    main()
