"""`jkv bench decode`: how long prefill and a decode step take, and how near a step is to the memory's speed.

Measures on synthetic prompts; knows no text.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jkv.cache.spec import CacheSpec
from jkv.cli.fits import check_divides, check_length, check_memory, weight_sizes
from jkv.cli.options import Flag, HostOptions, RandomOptions, meet, parse, resolve, show_progress
from jkv.config import SizesSection
from jkv.decode.configured import configured_model, configured_plan, load_configured, make_decoding
from jkv.decode.generate import Decoding, begin
from jkv.decode.loop import decode
from jkv.plan.decoder import Stored, parameters

# Far past every cache; a GPU reaches its full bandwidth at this size too.
_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Arguments(RandomOptions, HostOptions):
    """Measure prefill and decode for each batch and context, against the machine's copy bandwidth."""

    what: tyro.conf.Positional[Literal["decode"]]
    """What is measured."""
    batch: str = "1,4"
    """Sequences, as 1,4,16."""
    context: str = "128,1024"
    """Tokens of each prompt, as 128,1024,4096."""
    steps: int = 16
    """Decode steps in one loop."""
    repeats: int = 3
    """Measurements, after one that compiles."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Sample:
    """One quantity over the repeats.

    Attributes:
        median: of all.
        spread: the largest minus the smallest.
    """

    median: float
    spread: float


@dataclass(frozen=True)
class Measurement:
    """One batch at one context.

    Attributes:
        batch: sequences.
        context: prompt tokens of each.
        prefill_ms: the whole prompt, until the first new token.
        step_ms: one decode step, a loop's time over its steps.
        prefill_tokens_per_second: prompt tokens of all sequences.
        tokens_per_second: new tokens of all sequences.
        bytes_per_step: weights that the batch's tokens need and the cache's live tokens, those that a window
            sees.
        bandwidth_share: of the copy bandwidth, if a step moves each byte once.
    """

    batch: int
    context: int
    prefill_ms: Sample
    step_ms: Sample
    prefill_tokens_per_second: float
    tokens_per_second: float
    bytes_per_step: int
    bandwidth_share: float


def run(argv: Sequence[str]) -> None:
    """Measure what the command line says, and print a table or JSON."""
    arguments, overrides = parse(Arguments, argv, "bench")
    meet(arguments)
    batches = _counts("--batch", arguments.batch)
    contexts = _counts("--context", arguments.context)
    if arguments.steps < 1 or arguments.repeats < 1:
        raise ValueError(
            f"--steps and --repeats must be at least 1, got {arguments.steps} and {arguments.repeats}"
        )
    config = resolve(arguments, overrides)
    sizes = configured_model(config)
    longest = max(contexts) + arguments.steps
    check_length(sizes, longest, remedy=" with the steps; lower --context")
    for batch in batches:
        check_divides(weight_sizes(sizes), config.mesh, name=config.model.path, num_sequences=batch)
    plan = configured_plan(config, sizes, {max(contexts): max(batches)}, arguments.steps + 1)
    check_memory(config, plan)
    plan.require_room()
    with show_progress(f"loading {config.model.path}") as show:
        model = load_configured(config)
        decoding = make_decoding(config, model)
        show("copying")
        bandwidth = copy_bandwidth()
        measurements = []
        for batch in batches:
            for context in contexts:
                show(f"batch {batch}, context {context}")
                measurements.append(
                    measure(
                        decoding,
                        batch,
                        context,
                        bytes_per_step=weight_bytes(weight_sizes(sizes), config.model.weights, batch)
                        + batch * live_bytes(decoding.spec, sizes.windows, context + arguments.steps // 2),
                        bandwidth=bandwidth,
                        num_steps=arguments.steps,
                        num_repeats=arguments.repeats,
                    )
                )
    if arguments.json:
        shown = {
            "random_weights": config.model.has_random_weights,
            "copy_bandwidth": bandwidth,
            "measurements": [asdict(one) for one in measurements],
        }
        print(json.dumps(shown))
    else:
        if config.model.has_random_weights:
            print(f"weights: random, of the sizes of {config.model.path}")
        print(_table(bandwidth, measurements))


def measure(
    decoding: Decoding,
    batch: int,
    context: int,
    *,
    bytes_per_step: int,
    bandwidth: float,
    num_steps: int,
    num_repeats: int,
) -> Measurement:
    """Measure one batch at one context.

    Args:
        decoding: the model and its cache, without stop tokens, so that every loop takes all its steps.
        batch: sequences.
        context: prompt tokens of each.
        bytes_per_step: that a step has to read.
        bandwidth: bytes that the machine copies in a second.
        num_steps: decode steps in one loop.
        num_repeats: measurements, after one that compiles.
    """
    prompts = np.random.default_rng(0).integers(decoding.vocab_size, size=(batch, context)).tolist()

    def once() -> tuple[float, float]:
        prefill_s, state = _timed(begin, decoding, prompts, max_new_tokens=num_steps + 1)
        loop_s, _ = _timed(decode, decoding.step, decoding.weights, state, num_steps)
        return 1e3 * prefill_s, 1e3 * loop_s / num_steps

    once()
    prefills, steps = zip(*(once() for _ in range(num_repeats)), strict=True)
    prefill, step = _sample(prefills), _sample(steps)
    return Measurement(
        batch=batch,
        context=context,
        prefill_ms=prefill,
        step_ms=step,
        prefill_tokens_per_second=1e3 * batch * context / prefill.median,
        tokens_per_second=1e3 * batch / step.median,
        bytes_per_step=bytes_per_step,
        bandwidth_share=1e3 * bytes_per_step / step.median / bandwidth,
    )


def weight_bytes(sizes: SizesSection, stored: Stored, num_tokens: int) -> int:
    """Return the bytes of weights that a step needs.

    Of experts those that a token was sent to, if tokens choose alike among all (balls into bins); of an
    embedding that is not the head too, a row a token, which is not counted.
    """
    parts, experts = parameters(sizes)[0 if sizes.is_tied else 1 :], sizes.experts
    idle = 0.0 if experts is None else (1 - experts.num_active / experts.num_experts) ** num_tokens
    shares = [1 - idle if "expert" in dict(part.axes) else 1 for part in parts]
    return round(sum(share * part.num_bytes(stored) for share, part in zip(shares, parts, strict=True)))


def live_bytes(spec: CacheSpec, windows: Sequence[int | None], num_tokens: int) -> int:
    """Return the bytes of a sequence's cache that a step reads; windows are those of the model's layers."""
    return sum(
        min(num_tokens, window or num_tokens) * group.page_bytes(spec.page_size) // spec.page_size
        for window, group in zip(dict.fromkeys(windows), spec.groups, strict=True)
    )


def copy_bandwidth(num_bytes: int = _COPY_BYTES, num_repeats: int = 5) -> float:
    """Return the bytes that the machine reads and writes in a second while it copies `num_bytes`."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    # A negation moves what a copy moves, and cannot be left out. In place: fresh pages would be measured too.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    array = jax.block_until_ready(negate(array))
    seconds = []
    for _ in range(num_repeats):
        second, array = _timed(negate, array)
        seconds.append(second)
    return 2 * array.nbytes / statistics.median(seconds)


def _timed[**P, T](call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    start = time.perf_counter()
    result = jax.block_until_ready(call(*args, **kwargs))
    return time.perf_counter() - start, result


def _sample(values: Sequence[float]) -> Sample:
    return Sample(statistics.median(values), max(values) - min(values))


def _counts(flag: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{flag} must be positive numbers with commas, as 1,4,16, got {text!r}")
    return [int(part) for part in parts]


def _table(bandwidth: float, measurements: Sequence[Measurement]) -> str:
    columns: dict[str, Callable[[Measurement], Any]] = {
        "batch": lambda one: one.batch,
        "context": lambda one: one.context,
        "prefill ms": lambda one: f"{one.prefill_ms.median:.1f} ±{one.prefill_ms.spread / 2:.1f}",
        "prefill tok/s": lambda one: f"{one.prefill_tokens_per_second:,.0f}",
        "step ms": lambda one: f"{one.step_ms.median:.2f} ±{one.step_ms.spread / 2:.2f}",
        "tok/s": lambda one: f"{one.tokens_per_second:,.1f}",
        "MB/step": lambda one: f"{one.bytes_per_step / 1e6:,.1f}",
        "of copy": lambda one: f"{one.bandwidth_share:.0%}",
    }
    rows = [list(columns), *([str(show(one)) for show in columns.values()] for one in measurements)]
    lines = ["".join(f"{cell:>16}" for cell in row) for row in rows]
    return "\n".join([f"copy bandwidth: {bandwidth / 1e9:.1f} GB/s (read and written)", *lines])
