"""Deployments compiled for machines that are not here: what they send, what they hold, and what fits."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jkv.cli.compiled import compile_shown, describe_compiled
from jkv.cli.plan import Arguments, make_job
from jkv.collectives import Collective
from jkv.plan.compiled import CompiledPlan, Job, compile_plan, lower_with_kernel
from jkv.plan.depth import Costs, costs_of, shallow_models
from jkv.plan.lengths import one_length
from jkv.plan.programs import PHASES, Phase, compile_phase
from jkv.targets import target_mesh

TPU, GPU = pytest.mark.tpu_aot, pytest.mark.gpu_aot


def find_job(model: str, mesh: str, **options: object) -> Job:
    """Return the job, or skip the test where its compiler is not installed."""
    job = make_job(Arguments(model=model, mesh=mesh, context=8192, **options))
    try:
        target_mesh(job.target.machine, job.target.chips, dict(job.deployment.mesh.axes))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return job


def make_costs(job: Job, num_sequences: int, beyond: int) -> Costs:
    """Return the costs of a program that takes so many bytes beside weights and cache."""
    resident = job.resident(num_sequences)
    sent = Counter({Collective("all-reduce", 2**20, 8, num_loops=1): 161, Collective("all-reduce", 4, 8): 1})
    return Costs(resident, 64, 64, beyond - 1000, 1000, flops=1.0, accessed=1.0, collectives=sent)


def test_what_fits_is_confirmed_by_a_compile(monkeypatch):
    job = make_job(Arguments(model="llama-3.1-70b", mesh="v6e-8", cache="paged-int8", context=8192))
    hbm, compiled = job.machine.hbm_bytes, []

    def compile_fake(job: Job, num_sequences: int, *, phases: Sequence[Phase] = PHASES, **_: Any):
        compiled.append((num_sequences, tuple(phases)))
        # More temporaries than those of 64 sequences foretell.
        beyond = 10**7 if num_sequences == 64 else 10**9
        costs = {phase: make_costs(job, num_sequences, beyond) for phase in phases}
        return CompiledPlan(job, num_sequences, costs, dict.fromkeys(phases, "kernel"))

    monkeypatch.setattr("jkv.cli.compiled.compile_plan", compile_fake)
    monkeypatch.setattr("jkv.plan.compiled.compile_plan", compile_fake)
    shown = compile_shown(job, 64, lambda: ())
    (first, second) = compiled
    assert first == (64, ("prefill", "decode"))
    foretold, fits = second[0], shown["fits"]["sequences"]
    assert job.resident(foretold) + 10**7 <= hbm
    assert job.resident(fits) + 10**9 <= hbm < job.resident(fits + 1) + 10**9
    assert fits < foretold
    assert shown["memory"]["left"] == hbm - job.resident(64) - 10**7
    longer, too_long = (
        replace(job, deployment=replace(job.deployment, mix=one_length(shown["fits"]["tokens"] + more)))
        for more in (0, 128)
    )
    assert longer.resident(64) + 10**7 <= hbm < too_long.resident(64) + 10**7
    names = {"model": "llama-3.1-70b", "mesh": "v6e-8"}
    cache = {"layout": "paged", "codec": "int8", "value_codec": None, "page_size": 128}
    printed = describe_compiled(shown | names | {"cache": cache})
    # Of the decode loop what each turn sends; of a prefill all.
    assert printed.count("all-reduce of 8: 161 with 168,820,736 bytes, 0.739 ms") == 2
    assert printed.count("all-reduce of 8: 1 with 4 bytes") == 1
    assert f"sequences of 8,192 tokens that fit: {fits}" in printed
    assert "all that the model reads" not in printed
    shown["fits"]["longest"] = shown["fits"]["tokens"]
    assert describe_compiled(shown | names | {"cache": cache}).count(", all that the model reads\n") == 1


def test_a_refusal_offers_what_fits_beside_the_programs_too(monkeypatch):
    job = make_job(Arguments(model="llama-3.1-70b", mesh="v6e-8", cache="paged-int8", context=8192))
    hbm, compiled, beyond = job.machine.hbm_bytes, [], 10**9

    def compile_fake(job: Job, num_sequences: int, **_: Any) -> CompiledPlan:
        compiled.append(num_sequences)
        costs = {phase: make_costs(job, num_sequences, beyond) for phase in PHASES}
        return CompiledPlan(job, num_sequences, costs, dict.fromkeys(PHASES, "kernel"))

    monkeypatch.setattr("jkv.cli.compiled.compile_plan", compile_fake)
    with pytest.raises(ValueError, match="must hold it all in") as caught:
        compile_shown(job, 95, lambda: ())
    (nearest,) = compiled
    assert job.resident(nearest) <= hbm < job.resident(nearest + 1)
    (offered,) = re.findall(r"use --batch (\d+) ", str(caught.value))
    assert int(offered) < nearest
    assert job.resident(int(offered)) + beyond <= hbm


def check(plan: CompiledPlan) -> None:
    """Check that all of it fits a device, lies where it is counted, and is updated in place."""
    (costs,) = plan.costs.values()
    assert list(plan.implementations.values()) == ["kernel"]
    memory, resident = plan.job.deployment.memory(plan.num_sequences), plan.job.resident(plan.num_sequences)
    assert plan.total <= plan.job.machine.hbm_bytes
    assert costs.arguments == pytest.approx(resident, rel=0.01)
    assert costs.aliased >= memory.cache + memory.padding
    assert costs.temporaries < 0.02 * plan.job.machine.hbm_bytes


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        pytest.param("v5e-32", 32, marks=TPU),
        pytest.param("v5p-64", 4, marks=TPU),
        pytest.param("v6e-8", 64, marks=TPU),
        pytest.param("tpu7x-4", 64, marks=TPU),
        pytest.param("h200-8", 64, marks=GPU),
    ],
)
def test_a_step_of_llama_70b_sends_two_sums_a_layer_and_fits(mesh: str, rows: int):
    plan = compile_plan(find_job("llama-3.1-70b", mesh, cache="paged-int8"), 64, phases=["decode"])
    check(plan)
    sent = plan.collectives("decode")
    # GPUs add the embedding up in float32.
    wide = {each.num_bytes: count for each, count in sent.items() if each.num_bytes >= rows * 8192 * 2}
    assert wide == ({rows * 8192 * 2: 160, rows * 8192 * 4: 1} if "h200" in mesh else {rows * 8192 * 2: 161})
    assert {each.kind for each in sent} == {"all-reduce"}
    # The sampler's sums are a few words of each row.
    assert (
        sum(count * each.num_bytes for each, count in sent.items() if each.num_bytes not in wide) < 64 * rows
    )


@TPU
def test_a_step_of_deepseek_v3_adds_its_experts_up_over_a_cube():
    plan = compile_plan(find_job("deepseek-v3", "v5p-64-experts"), 64, phases=["decode"])
    check(plan)
    sent = {(each.num_devices, each.num_bytes): count for each, count in plan.collectives("decode").items()}
    # Attention, three dense MLPs and the embedding over heads; experts, shared ones too, over all chips.
    stream = 64 * 7168 * 2
    assert {size: count for size, count in sent.items() if size[1] >= stream} == {
        (4, stream): 61 + 3 + 1,
        (64, stream): 58,
    }


@TPU
def test_stripes_over_an_explicit_mesh_send_partial_results_whatever_the_context(tmp_path: Path, monkeypatch):
    mesh = tmp_path / "configs" / "meshes" / "stripes.yaml"
    mesh.parent.mkdir(parents=True)
    rules = "rules: {seq: null, page: null, mlp: stripe, vocab: stripe, context: stripe}"
    axes = "axis_types: explicit\naxes: {model: 2, stripe: 4}"
    mesh.write_text(f"base: single\ntarget: v6e:2x4\n{axes}\n{rules}\n")
    monkeypatch.chdir(tmp_path)
    job, costs = find_job("qwen3-0.6b", "stripes", cache="paged-int8"), []
    for tokens in (2048, 8192):
        one = replace(job, deployment=replace(job.deployment, mix=one_length(tokens))).workload(2)
        lowered, said = lower_with_kernel(one.with_model(shallow_models(job.model)[0]), "decode")
        assert said == "kernel"
        costs.append(costs_of(lowered.compile()))
    short, long = costs
    assert short.collectives == long.collectives
    assert {each.kind for each in long.collectives} == {"all-reduce"}
    assert long.temporaries - short.temporaries < 0.01 * (long.aliased - short.aliased)


@TPU
def test_a_plan_without_the_kernel_says_why():
    job = find_job("qwen3-0.6b", "v6e-8", page_size=7)
    model, _ = shallow_models(job.model)
    _, said = lower_with_kernel(job.workload(8).with_model(model), "decode")
    assert said.startswith("auto, for ")
    assert "a page of keys must fill its 8 rows of 128 lanes, got 7 slots" in said


@TPU
def test_a_mesh_that_cuts_a_torus_is_refused():
    find_job("llama-3.1-70b", "v5p-64")
    with pytest.raises(ValueError, match=r"must be made of whole axes of the torus 4x4x4, got {'data': 8"):
        target_mesh("v5p", (4, 4, 4), {"data": 8, "model": 8})


@TPU
def test_shallow_programs_say_what_one_of_medium_depth_takes():
    job = find_job("llama-3.1-70b", "v6e-8", cache="paged-int8")
    config = replace(job.model, num_layers=5, windows=(None,) * 5, embed_dim=2048, mlp_dim=7168)
    job = replace(job, model=config)
    found = compile_plan(job, 64, phases=["decode"]).costs["decode"]
    real = costs_of(compile_phase(job.workload(64), "decode"))
    assert found.collectives == real.collectives
    assert found.flops == pytest.approx(real.flops, rel=0.01)
    assert found.arguments == pytest.approx(real.arguments, rel=0.001)
    assert found.aliased == pytest.approx(real.aliased, rel=0.001)
    # Weights of the next layers are fetched ahead, a few megabytes.
    assert abs(real.temporaries - found.temporaries) < 0.001 * job.machine.hbm_bytes
