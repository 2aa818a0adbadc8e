"""`jkv plan --compile`: a deployment's programs as its machine's compiler makes them, and what fits it.

Knows words; `jkv.plan.compiled` compiles and counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from jkv.cli.options import show_progress
from jkv.collectives import Collective
from jkv.plan.compiled import CompiledPlan, Job, compile_plan, confirmed_sequences
from jkv.plan.programs import Phase

# Each smaller than the one before, at what docs/codecs.md says of quality.
_CODECS = ("bf16", "int8", "int4_token")
Meshes = Callable[[], Iterable[tuple[str, Job]]]


def compile_shown(job: Job, num_sequences: int | None, meshes: Meshes) -> dict[str, Any]:
    """Compile a job and return what it takes, as JSON.

    Args:
        job: what to compile.
        num_sequences: rows of the batch; None is as many as fit.
        meshes: the same on the meshes that divide the model, by name, for a refusal.

    Raises:
        ValueError: it does not fit, and says what would; or the compiler is not installed.
    """
    guess = job.most_sequences(lambda count: job.deployment.memory(count).total - job.resident(count))
    asked = num_sequences or guess or job.ways
    # What is refused by its sizes alone is compiled as near as it fits, or what is offered might not fit.
    compiled = min(asked, job.most_sequences(lambda _: 0))
    if not compiled:
        check_fits(job, asked, 0, meshes)
    with show_progress("compiling") as progress:
        try:
            plan = compile_plan(job, compiled, progress=progress)
        except ModuleNotFoundError as error:
            check_fits(job, asked, 0, meshes)
            raise ValueError(str(error)) from error
        check_fits(job, asked, plan.beyond(asked), meshes)
        progress("compiling for the most sequences that fit")
        fits = {
            "sequences": confirmed_sequences(plan),
            "tokens": job.most_tokens(asked, plan.beyond(asked)),
            "longest": job.model.max_length,
        }
    return {
        "target": job.deployment.mesh.target,
        "devices": dict(job.deployment.mesh.axes),
        "num_sequences": asked,
        "context": job.deployment.mix.longest,
        "memory": _memory(plan),
        "steps": {phase: _step(plan, phase) for phase in plan.costs},
        "fits": fits,
        "machine": asdict(job.machine),
    }


def check_fits(job: Job, num_sequences: int, beyond: int, meshes: Meshes) -> None:
    """Refuse sequences that a device has no memory for, with the nearest deployments that it has.

    Args:
        job: what is to run.
        num_sequences: rows of the batch.
        beyond: bytes of a device beside weights and cache.
        meshes: see `compile_shown`.

    Raises:
        ValueError: they do not fit.
    """
    memory, hbm = job.deployment.memory(num_sequences), job.machine.hbm_bytes
    resident = job.resident(num_sequences)
    if resident + beyond <= hbm:
        return
    beside = f" and {beyond:,} beside them" if beyond else ""
    remedies = [*_remedies(job, num_sequences, beyond), *_mesh_remedies(job, num_sequences, beyond, meshes)]
    raise ValueError(
        f"a device of {job.target.machine} must hold it all in {hbm:,} bytes, got {resident + beyond:,} for "
        f"{num_sequences:,} sequences: {memory.weights:,} of weights, {resident - memory.weights:,} of cache"
        f"{beside}; use {' or '.join(remedies) or 'a smaller model, for no declared mesh has room'}"
    )


def _remedies(job: Job, num_sequences: int, beyond: int) -> list[str]:
    """Return the options with which the mesh has room."""
    found = []
    fewer = min(num_sequences, job.most_sequences(lambda _: beyond))
    tokens = job.most_tokens(num_sequences, beyond)
    if fewer:
        found.append(f"--batch {fewer}")
    if tokens:
        found.append(f"--context {tokens}")
    deployment = job.deployment
    for codec in _CODECS:
        try:
            smaller = replace(job, deployment=deployment.with_cache(codec, deployment.spec.page_size))
        except ValueError:
            # A codec that heads or pages of this size do not suit is no remedy.
            continue
        if smaller.resident(num_sequences) + beyond <= job.machine.hbm_bytes:
            return [*found, f"--codec {codec}"]
    return found


def _mesh_remedies(job: Job, num_sequences: int, beyond: int, meshes: Meshes) -> list[str]:
    """Return the smallest declared mesh that has room, of the same machine if one has."""
    fitting = [
        (other.target.machine != job.target.machine, other.deployment.mesh.num_devices, name)
        for name, other in meshes()
        if num_sequences % other.ways == 0
        and other.resident(num_sequences) + beyond <= other.machine.hbm_bytes
    ]
    return [f"--mesh {min(fitting)[2]}"] if fitting else []


def _memory(plan: CompiledPlan) -> dict[str, int]:
    """Return the bytes of a device while the program runs that takes most."""
    job, costs = plan.job, plan.costs[plan.widest]
    memory, resident = job.deployment.memory(plan.num_sequences), job.resident(plan.num_sequences)
    return {
        "weights": memory.weights,
        "cache": resident - memory.weights,
        "other_arguments": costs.arguments - resident,
        "outputs": costs.outputs - costs.aliased,
        "temporaries": costs.temporaries,
        "code": costs.code,
        "total": plan.total,
        "aliased": costs.aliased,
        "hbm": job.machine.hbm_bytes,
        "left": job.machine.hbm_bytes - plan.total,
    }


def _step(plan: CompiledPlan, phase: Phase) -> dict[str, Any]:
    step, costs = plan.step(phase), plan.costs[phase]
    bandwidth = plan.job.machine.link_bandwidth

    def sent(each: Collective, count: int) -> dict[str, Any]:
        return {
            "kind": each.kind,
            "devices": each.num_devices,
            "count": count,
            "bytes": count * each.num_bytes,
            "milliseconds": 1e3 * count * each.sent_bytes / bandwidth,
        }

    return asdict(step) | {
        "attention": plan.implementations[phase],
        "seconds": step.seconds,
        "bound": step.bound,
        "tokens_per_second": step.tokens_per_second,
        "compiled_flops": costs.flops,
        "compiled_bytes": costs.accessed,
        "temporaries": costs.temporaries,
        "collectives": [sent(each, count) for each, count in plan.collectives(phase).items()],
    }


def describe_compiled(shown: dict[str, Any]) -> str:
    """Return a compiled plan, with the names of its model, mesh and cache, as people read it."""
    memory, cache = shown["memory"], shown["cache"]
    axes = " x ".join(f"{name} {size}" for name, size in shown["devices"].items())
    codecs = " / ".join(dict.fromkeys((cache["codec"], cache["value_codec"] or cache["codec"])))
    lines = [
        f"model: {shown['model']}",
        f"devices: {axes} ({shown['mesh']})",
        f"cache: {cache['layout']}, {codecs}, pages of {cache['page_size']}",
        "",
        f"a device of {shown['target']} with its part of {shown['num_sequences']:,} sequences of "
        f"{shown['context']:,} tokens:",
        *(_row(name.replace("_", " "), memory[name]) for name in memory if name != "aliased"),
        f"  {memory['aliased']:,} bytes of arguments are updated in place",
    ]
    for phase, step in shown["steps"].items():
        lines += ["", *_step_lines(phase, step)]
    fits = shown["fits"]
    lines += [
        "",
        f"sequences of {shown['context']:,} tokens that fit: {fits['sequences']:,}",
        f"tokens of {shown['num_sequences']:,} sequences that fit: {fits['tokens']:,}"
        + (", all that the model reads" if fits["tokens"] == fits["longest"] else ""),
        f"rates: {shown['machine']['source']}",
    ]
    return "\n".join(lines)


def _step_lines(phase: str, step: dict[str, Any]) -> list[str]:
    times = {name: 1e3 * step[f"{name}_seconds"] for name in ("compute", "memory", "network")}
    counts = {"compute": "flops", "memory": "read_bytes", "network": "sent_bytes"}
    units = {"compute": "FLOPs", "memory": "bytes read", "network": "bytes sent"}
    rows = [f"  {name:10}{step[counts[name]]:>20,} {units[name]:12}{times[name]:>10.3f} ms" for name in times]
    sent = [
        f"    {one['kind']} of {one['devices']}: {one['count']:,} with {one['bytes']:,} bytes, "
        f"{one['milliseconds']:.3f} ms"
        for one in step["collectives"]
    ]
    return [
        f"a step of {phase}, {step['num_tokens']:,} tokens (attention: {step['attention']}):",
        *rows,
        *sent,
        f"  at least {1e3 * step['seconds']:.3f} ms, bound by {step['bound']}: "
        f"{step['tokens_per_second']:,.0f} tokens a second",
    ]


def _row(name: str, size: int) -> str:
    return f"  {name:16}{size:>20,} bytes{size / 1e9:>10.2f} GB{size / 2**30:>10.2f} GiB"
