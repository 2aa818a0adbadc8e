"""A deployment's programs, compiled for its machine: memory to the byte, traffic, the least time of a step.

The compiler says what temporaries there are and what is sent; weights, cache and what fits follow from sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from jax.sharding import AxisType
from jax.stages import Lowered

from jkv import ops
from jkv.collectives import Collective
from jkv.config.target import Target
from jkv.models.model_config import ModelConfig
from jkv.plan.capacity import Deployment
from jkv.plan.depth import Costs, at_full_depth, costs_of, shallow_models
from jkv.plan.lengths import one_length
from jkv.plan.machines import MACHINES, Machine
from jkv.plan.programs import PHASES, Phase, Workload, compile_phase, lower_phase
from jkv.plan.roofline import Step, step
from jkv.sharding import Sharding
from jkv.targets import target_mesh

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        deployment: the model's cache on a mesh, all sequences of one length.
        model: sizes and switches, copies of KV heads included.
        target: the machine, and how its chips are linked.
    """

    deployment: Deployment
    model: ModelConfig
    target: Target

    @property
    def machine(self) -> Machine:
        """What one device can do."""
        return MACHINES[self.target.machine]

    @property
    def ways(self) -> int:
        """Parts that the mesh splits sequences into."""
        return self.deployment.mesh.shards("seq")

    def width(self, num_sequences: int, phase: Phase) -> int:
        """Return a sequence's tokens in a step: one, or as many as make `step_tokens` on a device."""
        rows = -(-num_sequences // self.ways)
        return 1 if phase == "decode" else max(1, self.deployment.step_tokens // rows)

    def resident(self, num_sequences: int) -> int:
        """Return a device's bytes of weights and cache, which every program holds."""
        memory = self.deployment.memory(num_sequences)
        return memory.total - memory.activations - memory.workspace - memory.logits

    def most_sequences(self, beyond: Callable[[int], int]) -> int:
        """Return the most sequences that fit, equally many on each part of the mesh; 0: none.

        Args:
            beyond: the bytes beside weights and cache, of a number of sequences.
        """

        def total(rows: int) -> int:
            return self.resident(rows * self.ways) + beyond(rows * self.ways)

        return self.ways * _most(total, self.machine.hbm_bytes)

    def most_tokens(self, num_sequences: int, beyond: int) -> int:
        """Return the longest context, in whole pages, with which sequences fit; 0: none.

        Args:
            num_sequences: rows of the batch.
            beyond: the bytes beside weights and cache, which depend on a step's tokens alone.
        """
        page_size, longest = self.deployment.spec.page_size, self.model.max_length

        def total(pages: int) -> int:
            job = replace(self, deployment=replace(self.deployment, mix=one_length(pages * page_size)))
            return job.resident(num_sequences) + beyond

        return min(longest, _most(total, self.machine.hbm_bytes, limit=-(-longest // page_size)) * page_size)

    def workload(self, num_sequences: int) -> Workload:
        """Return what is compiled for so many sequences.

        Raises:
            ValueError: the mesh does not divide them, or has rules that cannot hold.
            ModuleNotFoundError: the compiler is not installed.
        """
        deployment, (machine, chips) = self.deployment, (self.target.machine, self.target.chips)
        section, spec = deployment.mesh, deployment.spec
        mesh = target_mesh(machine, chips, dict(section.axes), _AXIS_TYPES[section.axis_types])
        group = spec.groups[0]
        return Workload(
            model=self.model,
            sharding=Sharding.create(mesh, asdict(section.rules)),
            num_sequences=num_sequences,
            capacity=deployment.mix.longest,
            width=self.width(num_sequences, "prefill"),
            cache={
                "page_size": spec.page_size,
                "codec": group.codec,
                "value_codec": group.value_codec,
                "layout": spec.layout,
                "max_chunk": spec.max_chunk if any(each.window for each in spec.groups) else None,
                "num_stripes": spec.num_stripes,
            },
            is_paged=deployment.has_pool,
            dtype=deployment.dtype,
            param_dtype=deployment.weights,
        )


@dataclass(frozen=True)
class CompiledPlan:
    """What a job takes on one device.

    Attributes:
        job: what was compiled.
        num_sequences: that it was compiled for.
        costs: of each program, all layers counted.
        implementations: of attention in each program, with the reason where it is not the machine's kernel.
    """

    job: Job
    num_sequences: int
    costs: dict[Phase, Costs]
    implementations: dict[Phase, str]

    @property
    def total(self) -> int:
        """The most bytes of a device that are taken at once."""
        return max(costs.total for costs in self.costs.values())

    @property
    def widest(self) -> Phase:
        """The program that takes most."""
        return max(self.costs, key=lambda phase: self.costs[phase].total)

    def step(self, phase: Phase) -> Step:
        """Return the least time of a step: of a prefill's, or of the decode loop."""
        job, width = self.job, self.job.width(self.num_sequences, phase)
        sent = sum(count * each.sent_bytes for each, count in self.collectives(phase).items())
        return step(job.deployment, job.machine, self.num_sequences, width, sent)

    def collectives(self, phase: Phase) -> dict[Collective, int]:
        """Return what a step sends, and how often: of the decode loop, what each turn of it sends."""
        found = self.costs[phase].collectives
        return {each: count for each, count in found.items() if phase == "prefill" or each.num_loops}

    def beyond(self, num_sequences: int) -> int:
        """Return the bytes beside weights and cache, taken to grow with the tokens of a step."""
        job = self.job

        def tokens(count: int, phase: Phase) -> int:
            return -(-count // job.ways) * job.width(count, phase)

        held = job.resident(self.num_sequences)
        return max(
            (costs.total - held) * tokens(num_sequences, phase) // tokens(self.num_sequences, phase)
            for phase, costs in self.costs.items()
        )


def compile_plan(
    job: Job,
    num_sequences: int,
    *,
    phases: Sequence[Phase] = PHASES,
    progress: Callable[[str], None] = lambda _: None,
) -> CompiledPlan:
    """Compile a job's programs at one and two layers of each kind, and return what all layers take.

    Args:
        job: what to compile.
        num_sequences: rows of the batch.
        phases: programs to compile.
        progress: told what is being compiled.

    Raises:
        ValueError: as `Job.workload`, or the mesh does not divide the model.
        ModuleNotFoundError: the compiler is not installed.
    """
    workload = job.workload(num_sequences)
    one, deeper = shallow_models(job.model)
    costs: dict[Phase, Costs] = {}
    implementations: dict[Phase, str] = {}
    for phase in phases:
        progress(f"compiling {phase}, one layer of each kind")
        lowered, implementations[phase] = lower_with_kernel(workload.with_model(one), phase)
        program = lowered.compile()
        more = {}
        for kind, two in deeper.items():
            progress(f"compiling {phase}, {two.num_layers} layers")
            more[kind] = costs_of(compile_phase(workload.with_model(two), phase))
        costs[phase] = at_full_depth(job.model, costs_of(program), more)
    return CompiledPlan(job, num_sequences, costs, implementations)


def lower_with_kernel(workload: Workload, phase: Phase) -> tuple[Lowered, str]:
    """Return a program with the machine's kernels throughout, or as `auto` makes it and why."""
    kernel = ops.choose("auto", device=workload.sharding.device)
    try:
        return lower_phase(workload, phase, kernel), "kernel"
    except ValueError as error:
        return lower_phase(workload, phase), f"auto, for {error}"


def confirmed_sequences(plan: CompiledPlan) -> int:
    """Return the most sequences that fit, and show by a compile of the widest program that they do; 0: none.

    Temporaries are taken to grow with a step's tokens; where the compile says otherwise, its own count holds
    for as many sequences or fewer.
    """
    job = plan.job
    most = job.most_sequences(plan.beyond)
    if most in (0, plan.num_sequences):
        return most
    shown = compile_plan(job, most, phases=[plan.widest])
    beyond = shown.total - job.resident(most)
    return min(most, job.most_sequences(lambda _: beyond))


def _most(total: Callable[[int], int], budget: int, limit: int = 2**31) -> int:
    """Return the largest count up to `limit` whose bytes are within a budget; 0: not even one."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle)
    return low
