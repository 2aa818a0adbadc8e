"""Write the tilings that suit a chip better than the formula's to the file `tuned.yaml` beside a kernel.

On a TPU candidates are timed. Without one they are ranked by the cycles that the compiler gives a tile, for
each cycle of its copies, as `scripts/tpu_static.py` counts them: the file says which of the two it was. An
entry is written where the best candidate takes less than 95 % of what the formula's tiling takes, in place of
one for the same calls; where no candidate does, that one is taken out.

    PYTHONPATH=. python scripts/tune_kernel.py --models llama3_8b --codecs int8
    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/tune_kernel.py --static v6e --models deepseek_v3
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from kernels_pallas.paged_attention import Tiling
from kernels_pallas.tpu import sizes, tuned
from scripts.attention_steps import ALL_MODELS, DECODES, Step, checked, checked_codecs, filled, taken_step
from scripts.bench_kernel import step_microseconds
from scripts.compilers import check_compilers
from scripts.tpu_static import MACHINES, dumps, own_share

# What a candidate has to take less of: what is nearer to 1 may be noise.
_LEAST = 0.95
_BLOCKS = (128, 256, 512, 1024, 2048, 4096)
_HEAD = "# Written by scripts/tune_kernel.py, never by hand. What was counted was not measured.\n"


def candidates(step: Step, formula: Tiling, buffers: tuple[int, ...]) -> list[Tiling]:
    """Return the formula's tiling, and others that fit, each once."""
    shape = step.kernel.shape_of(step.arguments)
    longest = sizes.longest_seen(shape, window=step.shape.window)
    tilings = {(step.sizes_of(formula).block, formula.num_buffers): formula}
    for tokens, count in itertools.product(_BLOCKS, buffers):
        tiling = dataclasses.replace(formula, block_tokens=min(tokens, longest), num_buffers=count)
        tilings.setdefault((step.sizes_of(tiling).block, count), tiling)
    return [tiling for tiling in tilings.values() if sizes.vmem_refusal(shape, tiling) is None]


def tune(step: Step, chip: tuned.Chip, cost: Callable[[Tiling], float], unit: str, buffers: Any) -> None:
    """Look for a tiling that costs less than the formula's, and write what is found."""
    shape = step.kernel.shape_of(step.arguments)
    formula = sizes.tiling_for(shape, window=step.shape.window)
    costs = {}
    for tiling in candidates(step, formula, buffers):
        costs[tiling] = cost(tiling)
        tokens = step.sizes_of(tiling).block
        print(f"  {tokens} tokens, {tiling.num_buffers} buffers: {costs[tiling]:.2f} {unit}", flush=True)
    best = min(costs, key=costs.__getitem__)
    found = None
    if costs[best] < _LEAST * costs[formula]:
        evidence = f"{costs[best]:.2f} {unit}, the formula's {costs[formula]:.2f}"
        found = tuned.Tuned(best.block_tokens, best.query_tokens, best.num_buffers, evidence)
    write(step.kernel.TUNED, tuned.calls_of(shape, chip, window=step.shape.window), found)


def measured(step: Step) -> Callable[[Tiling], float]:
    """Return what times a step."""
    arguments = filled(step)
    return lambda tiling: step_microseconds(step, arguments, step.call("pallas_tpu", tiling))


def write(file: Path, calls: tuned.Calls, tiling: tuned.Tuned | None) -> None:
    """Put the tiling of calls into a file, or take it out."""
    tilings = {**tuned.read(file), calls: tiling}
    entries = [tuned.Entry(calls, tiling) for calls, tiling in tilings.items() if tiling is not None]
    text = yaml.safe_dump(tuned.ENTRIES.dump_python(entries), sort_keys=False)
    file.write_text(_HEAD + text)
    tuned.read.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", metavar="MACHINE", help=f"count for one of {', '.join(MACHINES)}")
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--models", help="by default all, of which decode steps alone are counted")
    options = parser.parse_args()
    known = DECODES if options.static else list(ALL_MODELS)
    models = checked("models", options.models or ",".join(known), known)
    codecs = checked_codecs(options.codecs)
    if options.static:
        checked("machines", options.static, MACHINES)
        chip = options.static
    elif (chip := tuned.chip_here()) is None:
        raise SystemExit(f"a TPU is needed, or --static with one of {', '.join(MACHINES)}")
    with dumps() as folder:
        if options.static:
            check_compilers(parser, [chip])
        compiler = f"libtpu {version('libtpu')}"
        for model, codec in itertools.product(models, codecs):
            print(f"{model}, {codec}", flush=True)
            step = taken_step(model, codec)
            if options.static:
                count = functools.partial(own_share, step, machine=chip, folder=folder)
                tune(step, chip, count, f"cycles for each of copies, counted, {compiler}", (3,))
            else:
                tune(step, chip, measured(step), f"us, measured with {compiler}", (2, 3, 4))


if __name__ == "__main__":
    main()
