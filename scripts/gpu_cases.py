"""What the benchmark of GPU kernels measures, in which order, and what follows from the times.

Arithmetic alone: no JAX, so that who starts the measurements holds no GPU.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Of Llama 3, and of DeepSeek-V3's latents.
NUM_KV_HEADS, HEAD_DIM = 8, 128
LATENT_DIM, ROPE_DIM = 512, 64
# Every axis begins with what is asked first.
MODELS = {"heads_32": 32, "latent_128": 128, "heads_64": 64, "latent_16": 16}
BATCHES, CONTEXTS = (64, 1, 8, 256), (8192, 131072, 32768, 1024)
PAGE_SIZES, CODECS = (64, 16), ("bf16", "int8", "fp8_e4m3", "int4_token", "int4")
LATENT_CODECS = ("bf16", "int8", "fp8_e4m3", "int4_token")
# Slots that share scales and zero points of keys in `int4`, at most.
_RUN_SLOTS = 32
# Page writes: sequences, and new tokens of each; and the codecs that the kernel encodes.
WRITE_STEPS, WRITE_CODECS = (
    {"64_decodes": (64, 1), "chunk_of_512": (1, 512)},
    ("int8", "fp8_e4m3", "fp8_e5m2"),
)
# Of a call: a peer holds it up to three times, in another order, in an H200's 141 GB.
_MAX_CALL_BYTES = 40e9
# Tokens of a batch from which on a call is to be as fast as memory.
_LONG = 131072


class Case(NamedTuple):
    """A decode step: rows of one length, and query heads on 8 KV heads or on latents."""

    model: str
    batch: int
    context: int
    page_size: int
    codec: str

    @property
    def name(self) -> str:
        """Words by which the case is asked for."""
        return "_".join(map(str, self))

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return MODELS[self.model]

    @property
    def is_latent(self) -> bool:
        """Whether queries attend to latents."""
        return self.model.startswith("latent")

    @property
    def call_bytes(self) -> int:
        """Bytes of keys and values, or of latents and rotated parts in bfloat16, that a call has to read."""
        if self.is_latent:
            of_token = self._bytes_of(LATENT_DIM) + 2 * ROPE_DIM
        elif self.codec == "int4":
            # Keys have scale and zero point in bfloat16 for each channel of a run; values are `int4_token`.
            keys = HEAD_DIM // 2 + 4 * HEAD_DIM // min(_RUN_SLOTS, self.page_size)
            of_token = NUM_KV_HEADS * (keys + self._replace(codec="int4_token")._bytes_of(HEAD_DIM))
        else:
            of_token = 2 * NUM_KV_HEADS * self._bytes_of(HEAD_DIM)
        return self.batch * self.context * of_token

    def _bytes_of(self, width: int) -> int:
        """Return the bytes of so many entries that share a scale, or whose runs do."""
        if self.codec == "bf16":
            return 2 * width
        # Half a byte for each, and scale and zero point in bfloat16 for 32; or one, and a float32 scale.
        return width // 2 + width // 32 * 4 if self.codec == "int4_token" else width + 4

    @property
    def operations(self) -> int:
        """Multiplications and additions of a call."""
        width = 2 * LATENT_DIM + ROPE_DIM if self.is_latent else 2 * HEAD_DIM
        return 2 * self.batch * self.context * self.num_heads * width

    def least_seconds(self, copied: float, multiplied: float) -> float:
        """Return the time that the slower roof allows: bytes, or operations, a second."""
        return max(self.call_bytes / copied, self.operations / multiplied)


def all_cases() -> dict[str, Case]:
    """Return the cases that fit, by name: those of goals, then others by how far along the axes they lie."""
    axes: Any = (MODELS, BATCHES, CONTEXTS, PAGE_SIZES, CODECS)
    ranked = sorted(
        itertools.product(*map(enumerate, axes)), key=lambda picks: sum(rank for rank, _ in picks)
    )
    cases = (*_FIRST, *(Case(*(value for _, value in picks)) for picks in ranked))
    kept = (case for case in cases if not case.is_latent or case.codec in LATENT_CODECS)
    return {case.name: case for case in kept if case.call_bytes <= _MAX_CALL_BYTES}


def all_writes() -> dict[str, tuple[str, str]]:
    """Return the step and codec of every page write that is compared, by name."""
    return {f"page_write_{step}_{codec}": (step, codec) for step in WRITE_STEPS for codec in WRITE_CODECS}


_LONG_CASE = Case("heads_32", 64, 8192, 64, "bf16")
# A goal's of each kind, so that none waits for what others add.
_FIRST = (
    _LONG_CASE,
    *(_LONG_CASE._replace(codec=codec) for codec in CODECS[1:]),
    _LONG_CASE._replace(model="latent_128"),
    _LONG_CASE._replace(page_size=16),
    _LONG_CASE._replace(batch=1),
    _LONG_CASE._replace(batch=1, page_size=16),
)


def is_checked(case: Case, lines: Iterable[dict[str, Any]]) -> bool:
    """Return whether some check of what a case attends to, in its codec, has passed."""
    return any(
        line["passed"]
        and line["codec"] == case.codec
        and line["check"].startswith("latent") == case.is_latent
        for line in lines
    )


class Runner(NamedTuple):
    """Who attends.

    Attributes:
        name: in the table.
        module: that must be installed beside jkv; None needs none.
        attends_to: `heads`, `latent` or both.
        codecs: that it reads.
        weight: its part of the time, beside those of others.
        builds: whether it has kernels built for the device, and keeps them: minutes, before it is timed.
    """

    name: str
    module: str | None = None
    attends_to: tuple[str, ...] = ("heads",)
    codecs: tuple[str, ...] = ("bf16",)
    weight: int = 1
    builds: bool = False

    def takes(self, case: Case) -> bool:
        """Return whether a case is one for it."""
        return case.model.startswith(self.attends_to) and case.codec in self.codecs


RUNNERS = (
    Runner("jkv", None, ("heads", "latent"), CODECS, weight=6),
    Runner("flash-attn3-jax", "flash_attn3_jax", weight=2),
    Runner("flashinfer", "flashinfer", ("heads", "latent"), weight=2, builds=True),
    Runner("jax.nn cudnn, contiguous"),
    Runner("jax.nn xla, contiguous"),
    Runner("jax pallas triton"),
    Runner("torch sdpa, contiguous", "torch"),
    Runner("torch flex, contiguous", "torch", builds=True),
    Runner("jkv xla", None, ("heads", "latent"), CODECS),
)


def to_build(runner: Runner, cases: Iterable[Case]) -> list[Case]:
    """Return the least case of heads and of latents that a runner takes: its kernels are those of all."""
    taken = sorted((case for case in cases if runner.takes(case)), key=lambda case: case.call_bytes)
    return list({case.is_latent: case for case in reversed(taken)}.values())


class Goal(NamedTuple):
    """A goal, and the worst that was measured for it; None where nothing was."""

    text: str
    bound: float
    is_least: bool
    got: float | None

    @property
    def verdict(self) -> str:
        """What the goal's line says."""
        if self.got is None:
            return "not measured"
        is_met = self.got >= self.bound if self.is_least else self.got <= self.bound
        return f"{'met' if is_met else 'missed'}: {self.got:.2f}"


def goals(lines: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals, each with the worst of the timed lines that it is of."""
    timed = {
        (line["runs"], Case(*(line[field] for field in Case._fields))): line for line in lines if "us" in line
    }
    own = {case: line for (runs, case), line in timed.items() if runs == "jkv"}
    long = {case: line for case, line in own.items() if case.batch * case.context >= _LONG}

    def ratios(codec: str) -> Iterable[float]:
        """Return times of heads in a codec over those in bfloat16."""
        for case, line in long.items():
            wide = case._replace(codec="bf16")
            if case.codec == codec and not case.is_latent and wide in own:
                yield line["us"] / own[wide]["us"]

    def to_peer(page_size: int | None = None, batch: int | None = None) -> Iterable[float]:
        """Return times over FlashAttention-3's."""
        for case, line in own.items():
            peer = timed.get(("flash-attn3-jax", case))
            is_asked = page_size in (None, case.page_size) and batch in (None, case.batch)
            if peer is not None and is_asked:
                yield line["us"] / peer["us"]

    def shares(is_latent: bool, column: str) -> Iterable[float]:
        return (
            line[column]
            for case, line in long.items()
            if case.is_latent == is_latent and case.codec == "bf16"
        )

    return [
        Goal(
            "share of the copy, bf16, 128K tokens and more",
            0.85,
            True,
            _worst(min, shares(False, "share_of_copy")),
        ),
        Goal("int8 to bf16", 0.58, False, _worst(max, ratios("int8"))),
        Goal("fp8 to bf16", 0.58, False, _worst(max, ratios("fp8_e4m3"))),
        Goal("int4_token to bf16", 0.42, False, _worst(max, ratios("int4_token"))),
        Goal("int4 to bf16", 0.42, False, _worst(max, ratios("int4"))),
        Goal("FlashAttention-3's time, pages of 64", 1.0, False, _worst(max, to_peer(page_size=64))),
        Goal("FlashAttention-3's time, pages of 16", 1.0, False, _worst(max, to_peer(page_size=16))),
        Goal("FlashAttention-3's time, batch 1", 1.0, False, _worst(max, to_peer(batch=1))),
        Goal("latents' share of the lower roof", 0.85, True, _worst(min, shares(True, "share_of_roof"))),
    ]


def _worst(pick: Any, found: Iterable[float]) -> float | None:
    return pick(found, default=None)


def with_rates(line: dict[str, Any], roofs: dict[str, Any]) -> dict[str, Any]:
    """Return a timed line with bytes a second, and shares of the copy and of the lower roof."""
    if "us" not in line:
        return line
    case, seconds = Case(*(line[field] for field in Case._fields)), line["us"] / 1e6
    copied, multiplied = roofs["copy_gb_per_s"] * 1e9, roofs["gemm_tflops"] * 1e12
    rate = case.call_bytes / seconds
    return line | {
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / copied,
        "share_of_roof": case.least_seconds(copied, multiplied) / seconds,
    }


def write_lines(lines: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Return what was timed of page writes, a line each."""
    for line in lines:
        if "pallas_gpu_us" in line:
            own, other = line["pallas_gpu_us"], line["xla_us"]
            yield f"page write, {line['page_write']}, {line['codec']}: {own:.3g} us, by XLA {other:.3g} us"


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the timed lines as a table, equal cases together."""
    columns = (*Case._fields, "runs", "us", "gb_per_s", "share_of_copy", "share_of_roof", "difference")
    timed = sorted(
        (line for line in lines if "us" in line), key=lambda line: [str(line[key]) for key in columns[:6]]
    )
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for line in timed:
        cells = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in map(line.get, columns))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
