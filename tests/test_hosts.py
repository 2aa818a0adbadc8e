"""Two processes of four CPU devices each run one program on one mesh."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jkv import hosts
from jkv.config import load_config
from jkv.models.sizes import sizes_of
from jkv.models.weights.model import open_model
from jkv.plan.decoder import parameters

from .cli.conftest import GOLDEN

NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 40, 6
Meeting = Callable[[int, int], tuple[dict[str, str], list[str]]]
# `jkv`, which says at last how many bytes of weights it has read.
COUNTED = """
import sys
from jkv.cli import main
from jkv.models.weights.safetensors import SafetensorsSource

read, counts = SafetensorsSource.read, []


def counted(*arguments):
    piece = read(*arguments)
    counts.append(piece.nbytes)
    return piece


SafetensorsSource.read = counted
code = main(sys.argv[1:])
print(f"read {sum(counts)} bytes", file=sys.stderr)
sys.exit(code)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def by_address(index: int, port: int) -> tuple[dict[str, str], list[str]]:
    """Return what tells a process of two by hand where it meets the other: variables and options."""
    address = ["--coordinator-address", f"localhost:{port}"]
    return {}, [*address, "--num-processes", "2", "--process-id", str(index)]


def by_slurm(index: int, port: int) -> tuple[dict[str, str], list[str]]:
    """Return the same as Slurm tells it: JAX takes the port from the job's number."""
    task = {"NTASKS": "2", "PROCID": str(index), "LOCALID": "0"}
    job = {"JOB_ID": str(port), "STEP_NODELIST": "localhost", "STEP_NUM_NODES": "2", **task}
    return {f"SLURM_{name}": value for name, value in job.items()}, ["--coordinator-address", "auto"]


def run_on_both(*options: str, meeting: Meeting = by_address) -> list[tuple[int, str, str]]:
    """Run `jkv generate` in two processes; return the exit code, output and errors of each."""
    port = free_port()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JKV_CACHE": "off",
        # The last one counts: four devices of eight.
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, "-c", COUNTED, "generate", *options]
    processes = [
        subprocess.Popen(
            [*command, *told],
            cwd=Path(__file__).parents[1],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables, told in (meeting(index, port) for index in range(2))
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes_generate_what_the_reference_does_each_from_its_part_of_the_weights():
    """The mesh axis that splits weights goes over the processes; the first prints."""
    with np.load(GOLDEN / "llama" / "reference.npz") as arrays:
        prompts = np.tile(arrays["tokens"], (2, 1))
        expected = np.tile(arrays["greedy"][:, NUM_PROMPT_TOKENS:], (2, 1))[:, :NUM_NEW_TOKENS]
    mesh = ("--mesh", "cpu-4x2", "--mesh.axes", "model", "2", "data", "4")
    first, second = run_on_both(
        *("--model", str(GOLDEN / "llama"), "--config", "smollm2-cpu", *mesh),
        *("--cache", "paged", "--max-new-tokens", str(NUM_NEW_TOKENS), "--json"),
        *("--prompt-tokens", *(",".join(map(str, prompt)) for prompt in prompts)),
    )
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert second[1] == ""
    assert [json.loads(line)["tokens"] for line in first[1].splitlines()] == expected.tolist()
    sizes, section = sizes_of(open_model(GOLDEN / "llama").config), load_config("smollm2-cpu", mesh).mesh
    held = sum(part.num_bytes("float32", section) for part in parameters(sizes))
    assert f"read {held} bytes" in first[2]
    assert f"read {held} bytes" in second[2]
    assert held < 0.51 * sum(part.num_bytes("float32") for part in parameters(sizes))


def test_a_mesh_that_leaves_out_a_process_of_slurm_is_refused_by_both():
    outputs = run_on_both("--model", str(GOLDEN / "llama"), "--prompt-tokens", "1", meeting=by_slurm)
    for code, _, errors in outputs:
        assert code == 2
        assert "the mesh must take all 8 devices of the 2 processes, got one of 1" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, 0), "go with --coordinator-address HOST:PORT, got them with none"),
        (("auto", None, 0), "go with --coordinator-address HOST:PORT, got them with auto"),
        (("localhost:1", 2, None), "a --process-id below it, got 2 and None"),
        (("localhost:1", 2, 2), "a --process-id below it, got 2 and 2"),
        (("localhost", 2, 0), "must be HOST:PORT or auto, with a port from 1 to 65535, got 'localhost'"),
        (("localhost:65536", 2, 1), "a port from 1 to 65535, got 'localhost:65536'"),
        (("localhost:0", 2, 0), "a port from 1 to 65535, got 'localhost:0'"),
        (("localhost:1", 2, 1), "the first process must listen at --coordinator-address localhost:1, got: "),
        (("auto", None, None), "auto needs a Cloud TPU or Slurm to say where .*; give HOST:PORT with --num-"),
    ],
)
def test_processes_that_cannot_meet_are_refused(arguments: tuple, message: str, monkeypatch):
    monkeypatch.setattr(hosts, "_PATIENCE_SECONDS", 0)
    with pytest.raises(ValueError, match=message):
        hosts.connect(*arguments)
