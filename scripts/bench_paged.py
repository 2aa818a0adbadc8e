"""Times decode steps through dense and paged caches of several codecs, side by side in one process.

    python scripts/bench_paged.py [--model smollm2-135m] [--batch 16] [--context 1024] [--json]

All caches hold the same prompts and take turns at the same lengths; the pages of the paged ones lie in random
places. A ratio is the median over the turns: of a codec paged to dense, and in each layout of a codec to the
first.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache import sequences
from jkv.cache.cache import Cache
from jkv.decode.generate import Decoding, begin
from jkv.decode.loop import DecodeState, decode
from jkv.models.decoder import cache_spec
from jkv.models.load import load_model

LAYOUTS = ("dense", "paged")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--codecs", default="bf16,int8", help="names with commas")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns, after one that compiles")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    codecs = arguments.codecs.split(",")
    times = measure(arguments, codecs)
    shown = {
        "step_ms": {name: statistics.median(turns) for name, turns in times.items()},
        "paged_to_dense": {codec: ratio(times, f"paged {codec}", f"dense {codec}") for codec in codecs},
        f"to_{codecs[0]}": {
            f"{layout} {codec}": ratio(times, f"{layout} {codec}", f"{layout} {codecs[0]}")
            for layout in LAYOUTS
            for codec in codecs[1:]
        },
    }
    if arguments.json:
        print(json.dumps(shown))
        return
    for title, values in shown.items():
        print(
            f"{title.replace('_', ' ')}: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items())
        )


def measure(arguments: argparse.Namespace, codecs: list[str]) -> dict[str, list[float]]:
    """Return the milliseconds of a step in every turn, by layout and codec."""
    model = load_model(arguments.model)
    vocab_size = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(vocab_size, size=(arguments.batch, arguments.context))
    num_new = arguments.steps * (arguments.repeats + 1) + 1
    states: dict[str, DecodeState] = {}
    for codec in codecs:
        spec = cache_spec(model.config, page_size=arguments.page_size, codec=codec)
        for layout in LAYOUTS:
            pages = "auto" if layout == "paged" else None
            decoding = Decoding(model.step, model.weights, spec, vocab_size, num_pages=pages)
            state = begin(decoding, prompts, max_new_tokens=num_new)
            cache = scatter(state.cache) if layout == "paged" else state.cache
            states[f"{layout} {codec}"] = state.replace(cache=cache)
    times: dict[str, list[float]] = {name: [] for name in states}
    for turn in range(arguments.repeats + 1):
        for name, state in states.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(decode(model.step, model.weights, state, arguments.steps))
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - start) / arguments.steps)
    return times


def scatter(cache: Cache) -> Cache:
    """Return the cache with the pages of every pool in random places. Consumes `cache`."""
    places = [
        jnp.asarray(np.random.default_rng(0).permutation(pool.num_pages), jnp.int32) for pool in cache.pools
    ]
    sources = [jnp.arange(pool.num_pages, dtype=jnp.int32) for pool in cache.pools]
    tables = [
        jnp.where(pool.page_table < 0, -1, place[pool.page_table])
        for pool, place in zip(cache.pools, places, strict=True)
    ]
    copied = jax.jit(sequences.copy_pages, donate_argnums=0)(cache, sources, places)
    return copied.assign(tables)


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over the turns of one form's time to another's."""
    return statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))


if __name__ == "__main__":
    main()
