"""The benchmark of GPU kernels, without a GPU: its order, its time, its arithmetic, and runners that fail."""

import dataclasses
import json
import math
import os
import pickle
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import blocks
from kernels_pallas.page_write import pallas_gpu as page_write_gpu
from kernels_pallas.paged_attention import Tiling
from kernels_pallas.paged_attention.shapes import Shape
from scripts import bench_gpu, gpu_checks, gpu_runners, gpu_writes
from scripts.gpu_cases import (
    BATCHES,
    CODECS,
    CONTEXTS,
    RUNNERS,
    Case,
    Runner,
    all_cases,
    goals,
    is_checked,
    table,
    to_build,
    with_rates,
)
from scripts.gpu_checks import CHECKED, CHECKED_LATENTS, Check

from ..kernels_pallas.faults import put_fault

LONG, SHORT = Case("heads_32", 64, 8192, 64, "bf16"), Case("heads_32", 1, 1024, 64, "bf16")
LATENTS = Case("latent_128", 64, 8192, 64, "bf16")
ROOFS = {"copy_gb_per_s": 4000.0, "gemm_tflops": 800.0}
PEER = Runner("peer", None, ("heads",), ("bf16",))


def timed(runs: str, case: Case, us: float) -> dict[str, Any]:
    return with_rates({"runs": runs, **case._asdict(), "us": us, "difference": 0.001}, ROOFS)


def verdicts(*lines: dict[str, Any]) -> dict[str, str]:
    return {goal.text: goal.verdict for goal in goals(lines)}


def test_cases_are_all_that_fit_and_those_that_say_most_come_first():
    cases = list(all_cases().values())
    assert cases[0] == LONG
    asked = {(batch, context) for batch in BATCHES for context in CONTEXTS}
    assert asked - {(case.batch, case.context) for case in cases if case.codec == "bf16"} == set()
    assert Case("heads_32", 256, 131072, 64, "bf16") not in cases
    assert Case("latent_128", 256, 131072, 64, "bf16") in cases


def test_every_goal_is_measured_by_the_first_cases():
    """A runner's part of the time may be a minute, and a case takes seconds."""
    first = list(all_cases().values())[:10]
    lines = [
        timed(runner.name, case, us=1.0)
        for runner in RUNNERS[:3]
        for case in [case for case in first if runner.takes(case)][: 4 if runner.name != "jkv" else None]
    ]
    assert "not measured" not in verdicts(*lines).values()
    runners = {runner.name for case in first for runner in RUNNERS if runner.takes(case)}
    assert runners == {runner.name for runner in RUNNERS}


def test_kernels_are_built_for_a_small_case_of_each_kind():
    least = Case("heads_32", 1, 1024, 64, "bf16"), Case("latent_128", 1, 1024, 64, "bf16")
    (flashinfer,) = (runner for runner in RUNNERS if runner.name == "flashinfer")
    assert {(case.model[:6], case.call_bytes) for case in to_build(flashinfer, all_cases().values())} == {
        (case.model[:6], case.call_bytes) for case in least
    }
    assert to_build(flashinfer, [LONG._replace(codec="int8")]) == []


def test_a_timed_program_takes_milliseconds():
    """At least 5 at an H200's 4.8 TB/s, or for the calls that take microseconds whatever they read."""
    for case in all_cases().values():
        count = gpu_runners.num_calls(case)
        assert count == 2048 or count * case.call_bytes / 4.8e12 > 5e-3
        assert count * case.call_bytes <= 2**35 + 2 * case.call_bytes


def test_a_call_reads_its_codec_s_bytes():
    tokens = 64 * 8192
    codecs = {"bf16": 4096, "int8": 2112, "fp8_e4m3": 2112, "int4_token": 1280, "int4": 1280}
    for codec, token_bytes in codecs.items():
        assert LONG._replace(codec=codec).call_bytes == tokens * token_bytes
    # Of keys, 16 slots of 128 channels share what 32 do in pages of 64.
    assert LONG._replace(codec="int4", page_size=16).call_bytes == tokens * (1280 + 8 * 16)
    for codec, token_bytes in {"bf16": 1152, "int8": 644, "fp8_e4m3": 644, "int4_token": 448}.items():
        assert LATENTS._replace(codec=codec).call_bytes == tokens * token_bytes
    assert LATENTS.operations == tokens * 128 * 2 * (2 * 512 + 64)


def test_shares_are_of_the_copy_and_of_the_lower_roof():
    line = timed("jkv", LATENTS, us=200.0)
    assert line["share_of_copy"] == pytest.approx(64 * 8192 * 1152 / 200e-6 / 4e12)
    # 128 heads are bound by products: 146 Gflop at 800 TFLOP/s are 182 us, 604 MB at 4 TB/s 151 us.
    assert line["share_of_roof"] == pytest.approx(182.536 / 200, rel=1e-4)
    assert with_rates({"runs": "peer", "error": "no"}, ROOFS) == {"runs": "peer", "error": "no"}


def test_goals_are_met_or_missed_by_the_worst_case():
    least = LONG.call_bytes / 4e12 * 1e6
    other = LONG._replace(context=32768)
    said = verdicts(
        timed("jkv", LONG, least / 0.9),
        timed("jkv", other, 4 * least / 0.8),
        timed("jkv", SHORT, 50.0),  # Too short to be asked for bandwidth.
        timed("jkv", LONG._replace(codec="int8"), 0.5 * least / 0.9),
        timed("jkv", LONG._replace(codec="int4_token"), 0.5 * least / 0.9),
        timed("jkv", LATENTS, 100.0),
        timed("jkv", LATENTS._replace(codec="int8"), 99.0),  # No goal is of latents but in bfloat16.
        timed("flash-attn3-jax", LONG, least),
        timed("flash-attn3-jax", SHORT, 100.0),
    )
    assert said == {
        "share of the copy, bf16, 128K tokens and more": "missed: 0.80",
        "int8 to bf16": "met: 0.50",
        "fp8 to bf16": "not measured",
        "int4_token to bf16": "missed: 0.50",
        "int4 to bf16": "not measured",
        "FlashAttention-3's time, pages of 64": "missed: 1.11",
        "FlashAttention-3's time, pages of 16": "not measured",
        "FlashAttention-3's time, batch 1": "met: 0.50",
        "latents' share of the lower roof": "met: 1.83",
    }


def test_the_table_has_the_timed_lines_with_equal_cases_together():
    lines = [
        timed("b", LONG, 300.0),
        timed("b", SHORT, 9.0),
        timed("a", LONG, 200.0),
        {"runs": "c", "error": "x"},
    ]
    rows = [row.split(" | ")[5:7] for row in table(lines).splitlines()[2:]]
    assert rows == [["b", "9"], ["a", "200"], ["b", "300"]]


# Writes a line for each case, but dies at those of a batch of 8 and hangs at those of 1.
FAKE = """
import json, os, sys, time
from scripts.gpu_cases import all_cases
_, file, _, runner, names = sys.argv
with open(file, "w") as stream:
    for name in names.split(","):
        case = all_cases()[name]
        if case.batch == 8:
            os.abort()
        if case.batch == 1:
            time.sleep(600)
        print(json.dumps({"runs": runner, **case._asdict(), "us": 1.0}), file=stream, flush=True)
"""


def test_kernels_are_built_beside_the_checks_and_the_time_is_said(monkeypatch):
    monkeypatch.setattr(bench_gpu, "MODULE", ("-c", FAKE))
    builds = PEER._replace(builds=True)
    absent = builds._replace(name="absent", module="no_such_peer")
    with bench_gpu.built([builds, PEER._replace(name="other"), absent], [LONG]) as wait:
        (line,) = wait(60)
    assert (line["builds"], "errors" in line) == ("peer", False)
    assert line["ended_after_s"] < 60
    with bench_gpu.built([builds], [SHORT]) as wait:
        (line,) = wait(1)
    assert line == {"builds": "peer", "ended_after_s": 1, "errors": ["ended after 1 s"]}


def test_what_was_started_ends_with_its_block(tmp_path):
    words = (
        "-c",
        f"import os, time; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    )
    with bench_gpu.started(words):
        while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text():
            time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id").read_text()), 0)


def run_fake(batches: list[int], limit_s: float) -> list[str]:
    cases = {f"heads_32_{batch}_1024_64_bf16": Case("heads_32", batch, 1024, 64, "bf16") for batch in batches}
    lines = bench_gpu.time_runner(PEER, cases, limit_s, module=("-c", FAKE))
    return [line.get("error", "timed") for line in lines]


def test_a_runner_that_dies_loses_its_case_alone():
    timed_256, died, timed_64 = run_fake([256, 8, 64], limit_s=60)
    assert (timed_256, timed_64) == ("timed", "timed")
    assert died.startswith("ended with -6")


def test_a_runner_that_hangs_loses_what_is_left():
    assert run_fake([64, 1, 256], limit_s=3) == ["timed", "ended after 3 s", "not started"]


def test_a_runner_that_never_starts_is_left_alone():
    lines = list(
        bench_gpu.time_runner(PEER, dict(list(all_cases().items())[:20]), 60, module=("-c", "raise OSError"))
    )
    assert [line["error"] for line in lines[3:]] == ["not started"] * (len(lines) - 3)
    assert all("OSError" in line["error"] for line in lines[:3])


def test_a_peer_that_is_not_installed_is_said_once():
    absent = PEER._replace(module="no_such_peer")
    lines = list(bench_gpu.time_runner(absent, all_cases(), 60))
    assert lines == [{"runs": "peer", "missing": "no_such_peer is not installed"}]


def test_runners_share_the_time_that_is_left(monkeypatch):
    clock, given = [0.0], []

    def spend(runner: Runner, cases: dict[str, Case], limit_s: float) -> list[dict[str, Any]]:
        given.append((runner.name, limit_s))
        clock[0] += limit_s if runner.name == "slow" else 0
        return []

    monkeypatch.setattr(bench_gpu, "time_runner", spend)
    runners = [PEER._replace(name="quick", weight=2), PEER._replace(name="slow"), PEER._replace(name="last")]
    list(bench_gpu.time_all(runners, all_cases(), 100.0, clock=lambda: clock[0]))
    assert given == [("quick", 50.0), ("slow", 50.0), ("last", 50.0)]


def test_every_runner_of_the_list_can_be_made():
    assert {runner.name for runner in RUNNERS} == set(gpu_runners.MAKERS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit-s", "0"], "--limit-s must be positive and finite, got 0.0"),
        (["--limit-s", "nan"], "--limit-s must be positive and finite, got nan"),
        (["--limit-s", "inf"], "--limit-s must be positive and finite, got inf"),
        (["--out", "/no/such/folder/x"], "--out must be a file that can be written, got /no/such/folder/x"),
        (["--out", "/"], "--out must be a file that can be written, got /; make its folder first"),
        (["--oly", "x"], "unrecognized arguments: --oly x"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(words)
    assert message in capsys.readouterr().err


def test_checks_are_of_every_codec_and_can_be_sent_to_processes():
    found = gpu_checks.checks(CHECKED, CHECKED_LATENTS, "")
    assert pickle.loads(pickle.dumps(found)) == found
    named = {(check.name, check.codec) for check in found}
    assert len(named) == len(found)
    of_all = {(name, codec) for name in CHECKED for codec in gpu_checks.CODECS}
    of_all |= {(name, codec) for name in CHECKED_LATENTS for codec in gpu_checks.LATENT_CODECS}
    assert of_all <= named
    assert {
        (name, codec) for name in gpu_checks.WITH_MORE_CODECS for codec in gpu_checks.MORE_CODECS
    } <= named
    for over, asked in (("stripe", gpu_checks.STRIPES), ("large_pool", gpu_checks.LARGE_POOLS)):
        assert {(f"{name}_{over}", codec) for name in asked for codec in asked[name]} <= named


def test_every_codec_is_checked_before_one_is_checked_again():
    found = gpu_checks.checks(CHECKED, CHECKED_LATENTS, "")
    kinds = [(check.is_latent, check.codec) for check in found]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    firsts = {kind: check for kind, check in reversed(list(zip(kinds, found, strict=True)))}
    for case in all_cases().values():
        assert firsts[case.is_latent, case.codec].covers(case)


def test_what_is_asked_for_is_checked_by_name():
    (check,) = gpu_checks.checks(CHECKED, CHECKED_LATENTS, "prefill_256_int8")
    assert check == Check(CHECKED["prefill_256"], "int8", "prefill_256")


def test_every_case_that_can_be_timed_is_checked_in_its_heads_and_codec():
    for name, case in all_cases().items():
        found = [check for check in gpu_checks.checks(CHECKED, CHECKED_LATENTS, name) if check.covers(case)]
        assert found, name
        assert {(check.codec, check.is_latent) for check in found} == {(case.codec, case.is_latent)}
        assert case.is_latent or {check.shape.head_dim for check in found} == {128}
        lines = [{"check": check.name, "codec": check.codec, "passed": True} for check in found]
        assert is_checked(case, lines)
        assert not is_checked(case._replace(codec="f16"), lines)
        assert not is_checked(case, [line | {"passed": False} for line in lines])


SMALL = Shape(8, 2, 64, page_size=16, time=1, totals=(1, 0, 100), window=90)
SMALL_LATENTS = Shape(2, 1, 512, page_size=16, time=1, totals=(1, 0, 100))


@pytest.mark.parametrize(
    "check",
    [
        Check(SMALL, "f16", "small"),
        Check(SMALL, "int8_static", "small"),
        Check(SMALL, "bf16", "small", over="stripe"),
        Check(SMALL, "int8", "small", over="large_pool"),
        pytest.param(Check(SMALL, "fp8_e5m2_static", "small"), marks=pytest.mark.gate),
        pytest.param(Check(SMALL_LATENTS, "fp8_e5m2", "latent", is_latent=True), marks=pytest.mark.gate),
        pytest.param(Check(SMALL_LATENTS, "f16", "latent", is_latent=True), marks=pytest.mark.gate),
        pytest.param(Check(SMALL_LATENTS, "bf16", "latent", True, "stripe"), marks=pytest.mark.gate),
        pytest.param(Check(SMALL_LATENTS, "bf16", "latent", True, "large_pool"), marks=pytest.mark.gate),
    ],
    ids=lambda check: f"{check.name}-{check.codec}",
)
def test_a_check_passes_and_fails_where_the_pages_are_others(check: Check, monkeypatch):
    """Interpreted: of another layer, which holds as many pages of the same kind."""
    monkeypatch.setattr(gpu_checks, "LARGE_PAGES", 40)
    monkeypatch.setattr(gpu_checks, "LARGE_ENTRIES", 1)
    tiling = Tiling(is_interpreted=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        line = gpu_checks.run(check, tiling)
        assert line is not None
        assert line["passed"], line
        assert (line["check"], line["codec"]) == (check.name, check.codec)
        own = gpu_checks.compare
        faulty = lambda out, definition, arguments: own(  # noqa: E731
            out, definition, arguments._replace(page_offset=jnp.int32(0))
        )
        monkeypatch.setattr(gpu_checks, "compare", faulty)
        line = gpu_checks.run(check, tiling)
    assert line is not None
    assert not line["passed"]


@pytest.mark.parametrize("time", [1, 20])
def test_page_ids_past_16_bits_are_walked(time: int, monkeypatch):
    """As steps on a GPU are checked, but for as many entries, which memory here has no room for."""
    monkeypatch.setattr(gpu_checks, "LARGE_ENTRIES", 1)
    shape, own = Shape(2, 1, 64, page_size=8, time=time, totals=(time, 100)), blocks.Walk.pieces
    check = Check(shape, "bf16", "small", over="large_pool")
    faulty = lambda *given: (piece._replace(page=piece.page & (2**16 - 1)) for piece in own(*given))  # noqa: E731
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        line = gpu_checks.run(check, Tiling(is_interpreted=True))
        assert line is not None
        assert line["passed"], line
        monkeypatch.setattr(blocks.Walk, "pieces", faulty)
        line = gpu_checks.run(check, Tiling(is_interpreted=True))
    assert line is not None
    assert not line["passed"]


def test_a_large_pool_has_ids_and_entries_past_what_16_and_31_bits_count():
    arguments, num_pages = gpu_checks.make_call(SMALL, "bf16")
    own = jax.eval_shape(lambda given: gpu_checks.in_large_pool(given, num_pages)[0], arguments)
    pages, *of_page = own.keys.data.shape
    first = pages - num_pages
    assert first >= 2**16
    assert first * math.prod(of_page) >= 2**31


def test_what_a_kernel_does_not_take_has_no_line():
    assert gpu_checks.run(Check(dataclasses.replace(SMALL, head_dim=72), "bf16", "odd"), Tiling()) is None


def test_processes_that_share_the_checks_give_their_lines(monkeypatch):
    """In order, but of calls that no kernel takes: of heads of 72."""
    odd = [Check(dataclasses.replace(SMALL, head_dim=72), "bf16", str(i)) for i in range(2)]
    monkeypatch.setattr(gpu_checks, "checks", lambda *_: odd)
    assert list(gpu_checks.named_checks("", is_interpreted=False)) == []
    monkeypatch.setattr(gpu_checks, "run", min)
    monkeypatch.setattr(gpu_checks, "checks", lambda *_: [3, 1, 2])
    monkeypatch.setattr(gpu_checks, "Tiling", lambda: 2)
    assert list(gpu_checks.named_checks("", is_interpreted=False)) == [2, 1, 2]


def run_bench(
    monkeypatch, capsys, checked: bench_gpu.Ended, only: str, *words: str, written: Sequence[dict] = ()
) -> list[dict[str, Any]]:
    """Run the benchmark on what its processes would have said; return the lines that it prints."""
    ended = {
        "writes": bench_gpu.Ended(written, None, is_late=False),
        "checks": checked,
        "roofs": bench_gpu.Ended([ROOFS], None, is_late=False),
    }
    monkeypatch.setattr(bench_gpu, "run", lambda words, _: ended[words[3]])
    monkeypatch.setattr(bench_gpu, "RUNNERS", [PEER])
    monkeypatch.setattr(bench_gpu, "time_all", lambda _, cases, __: [{"timed": name} for name in cases])
    bench_gpu.main(["--only", only, *words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_what_no_check_was_of_is_not_timed(monkeypatch, capsys):
    line = {"check": "window", "codec": "bf16", "error": 0.0, "allowed": 1.0, "passed": True}
    late = bench_gpu.Ended([line], "ended after 240 s", is_late=True)
    lines = run_bench(monkeypatch, capsys, late, "_1_1024_64_")
    assert {"checks": "ended after 240 s"} in lines
    assert [line["timed"] for line in lines if "timed" in line] == [
        "heads_32_1_1024_64_bf16",
        "heads_64_1_1024_64_bf16",
    ]
    (refused,) = (line["not timed"] for line in lines if "not timed" in line)
    of_heads = {f"heads_{count}_1_1024_64_{codec}" for count in (32, 64) for codec in CODECS[1:]}
    assert of_heads | {"latent_128_1_1024_64_bf16"} <= set(refused)


@pytest.mark.parametrize(
    ("checked", "message"),
    [
        (bench_gpu.Ended([], None, is_late=False), "nothing was checked, so nothing is timed: no call that"),
        (bench_gpu.Ended([], "ended after 240 s", is_late=True), "is timed: the checks ended after 240 s"),
        (bench_gpu.Ended([], "ended with 1: x", is_late=False), "the checks did not end: ended with 1: x"),
        (bench_gpu.Ended([{"passed": False}], None, is_late=False), "the kernel is wrong: nothing is timed"),
    ],
)
def test_nothing_is_timed_without_checks(checked: bench_gpu.Ended, message: str, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=message):
        run_bench(monkeypatch, capsys, checked, "heads_32")


def test_the_interpreter_s_checks_are_not_looked_for_among_others(monkeypatch, capsys):
    nothing = bench_gpu.Ended([], None, is_late=False)
    with pytest.raises(SystemExit, match=r"--interpret takes shapes.py alone, where no name has 'latent_128"):
        run_bench(monkeypatch, capsys, nothing, "latent_128_heads", "--interpret")


def test_interpreted_warp_groups_have_threads_enough(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--own")
    say = "import json, os, sys; print(json.dumps(os.environ['XLA_FLAGS']), file=open(sys.argv[1], 'w'))"
    ended = bench_gpu.run(["-c", say, "FILE", "--interpret"], 30)
    assert ended.lines == ["--own --xla_force_host_platform_device_count=8"]


def test_page_writes_alone_ask_for_no_checks_of_attention(monkeypatch, capsys):
    nothing, line = bench_gpu.Ended([], None, is_late=False), {"page_write": "64_decodes", "passed": True}
    assert run_bench(monkeypatch, capsys, nothing, "page_write", written=[line]) == [line]


def test_nothing_is_timed_where_a_page_write_is_wrong(monkeypatch, capsys):
    checked = bench_gpu.Ended([{"check": "window", "codec": "bf16", "passed": True}], None, is_late=False)
    with pytest.raises(SystemExit, match="the kernel of page writes is wrong: nothing is timed"):
        run_bench(monkeypatch, capsys, checked, "", written=[{"passed": True}, {"passed": False}])


def test_page_writes_are_compared(monkeypatch):
    """Interpreted; those of another layer are others."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = list(gpu_writes.lines("page_write_64_decodes_int8", is_interpreted=True))
        assert found == [
            {"page_write": "64_decodes", "codec": "int8", "others": 0, "scale_error": 0, "passed": True}
        ]
        put_fault((page_write_gpu, "page += page_offset", "page += 0"), monkeypatch)
        line = gpu_writes.compare("fp8_e4m3", (2, 1))
    assert not line["passed"]
    assert line["others"] > 0
    assert line["scale_error"] > 0


def test_a_step_s_page_writes_may_end_in_any_order(monkeypatch):
    """No two of its tokens have a slot."""
    own = 'block = lax.axis_index("block")'
    fault = page_write_gpu, own, 'block = sizes.num_blocks - 1 - lax.axis_index("block")'
    put_fault(fault, monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        for rows in ((64, 1), (1, 64)):
            assert gpu_writes.compare("int8", rows)["passed"]


def test_one_token_s_entries_in_another_slot_are_found(monkeypatch):
    fault = "refs.data.at[page, :, within]", "refs.data.at[page, :, jnp.where(first == 8, 0, within)]"
    put_fault((page_write_gpu, *fault), monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        assert not gpu_writes.compare("int8", (1, 64))["passed"]


def test_page_writes_are_timed(monkeypatch):
    monkeypatch.setattr(gpu_writes, "CALLS", 2)
    monkeypatch.setattr(gpu_writes, "NUM_LAYERS", 2)
    assert gpu_writes.microseconds("int8", (2, 1), "xla") > 0


def test_without_a_gpu_nothing_is_timed(tmp_path):
    with pytest.raises(SystemExit, match="a GPU is needed, got cpu"):
        gpu_runners.main([str(tmp_path / "lines"), "roofs"])


@pytest.mark.parametrize(
    ("runner", "case"),
    [
        ("jkv xla", Case("heads_32", 2, 48, 16, "int8")),
        ("jkv xla", Case("latent_16", 2, 48, 16, "bf16")),
        ("jkv xla", Case("latent_16", 2, 48, 16, "fp8_e4m3")),
        ("jkv xla", Case("heads_32", 2, 48, 16, "int4_token")),
        ("jkv xla", Case("heads_32", 2, 48, 16, "int4")),
        ("jax.nn xla, contiguous", Case("heads_32", 2, 48, 16, "bf16")),
    ],
)
def test_a_runner_attends_to_the_case_s_own_pages(runner: str, case: Case, monkeypatch):
    monkeypatch.setattr(gpu_runners, "READ_BYTES", 0)
    # Peers count on JAX's defaults.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        line = gpu_runners.measure(runner, case, pool_bytes=2 * case.call_bytes)
    assert line["us"] > 0
    assert line["difference"] < 0.02


def flash_mha_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    rotary_cos=None,
    rotary_sin=None,
    softmax_scale=None,
    is_causal=False,
    window_size=(-1, -1),
    num_splits=1,
    return_softmax_lse=False,
):
    """Do as the documentation of flash-attn3-jax 0.2.3 says: pools are [page, slot, kv_head, head_dim]."""
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert page_table.dtype == cache_seqlens.dtype == jnp.int32
    assert num_splits >= 1
    batch, num_kv_heads, head_dim = len(q), *k_cache.shape[2:]
    keys, values = (
        pool[page_table].reshape(batch, -1, num_kv_heads, head_dim) for pool in (k_cache, v_cache)
    )
    return jax.nn.dot_product_attention(
        q, keys, values, key_value_seq_lengths=cache_seqlens, query_seq_lengths=jnp.ones_like(cache_seqlens)
    )


@pytest.mark.parametrize("page_size", [16, 64])
def test_flash_attention_3_gets_what_its_documentation_asks_for(page_size: int, monkeypatch):
    peer = SimpleNamespace(flash_mha_with_kvcache=flash_mha_with_kvcache)
    monkeypatch.setattr(gpu_runners, "_module", {"flash_attn3_jax": peer}.__getitem__)
    monkeypatch.setattr(gpu_runners, "READ_BYTES", 0)
    case = Case("heads_64", 2, 192, page_size, "bf16")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        line = gpu_runners.measure("flash-attn3-jax", case, pool_bytes=2 * case.call_bytes)
    assert line.get("difference", line) < 0.02


def test_a_runner_that_attends_to_others_is_found(monkeypatch):
    """To the next layer's pages, whose entries are of the same kind."""
    clock, make = gpu_runners.MAKERS["jkv xla"]

    def shifted(data):
        arrays, attend = make(data)
        return arrays, lambda arrays, query, layer: attend(arrays, query, (layer + 1) % data.num_layers)

    monkeypatch.setitem(gpu_runners.MAKERS, "jkv xla", (clock, shifted))
    monkeypatch.setattr(gpu_runners, "READ_BYTES", 0)
    case = Case("heads_32", 2, 48, 16, "bf16")
    line = gpu_runners.measure("jkv xla", case, pool_bytes=2 * case.call_bytes)
    assert line["error"].startswith("differs from the definition by")


def test_a_peer_s_exception_is_its_line(monkeypatch):
    def broken(data):
        raise RuntimeError("no such device")

    monkeypatch.setitem(gpu_runners.MAKERS, "peer", (gpu_runners.time_jax, broken))
    line = gpu_runners.measure("peer", Case("heads_32", 1, 16, 16, "bf16"), pool_bytes=1)
    assert line["error"] == "RuntimeError: no such device"


def test_pools_are_arguments_of_a_timed_program_and_no_constants():
    data = gpu_runners.make_data(Case("heads_32", 1, 1024, 64, "bf16"), pool_bytes=1)
    arrays, attend = gpu_runners.own_xla(data)
    lowered = gpu_runners.repeated(data, attend).lower(arrays, data.query)
    assert len(lowered.as_text()) < data.case.call_bytes // 16
