"""Times decode steps of latent attention in its two forms, at several contexts, side by side in one process.

    python scripts/bench_latent.py [--contexts 1024,4096] [--heads 16] [--codec bf16] [--json]

One layer of DeepSeek-V2-Lite's widths. Both forms read the same cache and take turns. What a token of context
adds is the slope between the shortest and the longest context: of the absorbed form it follows from the
latent and its rotated part for each query head, of the expanded one from every head's keys and values too.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.layers.latent import Form, LatentAttention, LatentDims
from jkv.layers.rope import RopeConfig

EMBED_DIM = 2048
DIMS = LatentDims(latent=512, rope=64, key=128, value=128)
DTYPES: dict[str, DTypeLike] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FORMS = tuple(form for form in get_args(Form) if form != "auto")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="1024,4096", help="tokens of each sequence, with commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--codec", default="f32")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns, after one that compiles")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    contexts = sorted(int(context) for context in arguments.contexts.split(","))
    times = measure(arguments, contexts)
    step_ms = {f"{form} {context}": statistics.median(turns) for (form, context), turns in times.items()}
    shown = {"step_ms": step_ms}
    if len(contexts) > 1:
        first, last = contexts[0], contexts[-1]
        shown["us_per_token_of_context"] = {
            form: 1e3 * (step_ms[f"{form} {last}"] - step_ms[f"{form} {first}"]) / (last - first)
            for form in FORMS
        }
    if arguments.json:
        print(json.dumps(shown))
        return
    for title, values in shown.items():
        row = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        print(f"{title.replace('_', ' ')}: {row}")


def measure(arguments: argparse.Namespace, contexts: list[int]) -> dict[tuple[str, int], list[float]]:
    """Return the milliseconds of a step in every turn, by form and context."""
    dtype = DTYPES[arguments.dtype]
    group = CacheGroup(1, 1, DIMS.latent, arguments.codec, kind="latent", rope_dim=DIMS.rope)
    spec = CacheSpec.create([group], page_size=arguments.page_size)
    num_new = arguments.steps * (arguments.repeats + 1)
    x = jnp.zeros((arguments.batch, 1, EMBED_DIM), dtype)
    layers = {form: nnx.split(make_layer(form, arguments.heads, dtype)) for form in FORMS}
    keys = [(form, context) for form in FORMS for context in contexts]
    caches = {key: make_cache(spec, arguments.batch, key[1], num_new) for key in keys}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in caches}
    for turn in range(arguments.repeats + 1):
        for form, context in caches:
            out, start = x, time.perf_counter()
            for _ in range(arguments.steps):
                out, caches[form, context] = step(*layers[form], out, caches[form, context])
            jax.block_until_ready(out)
            if turn > 0:
                times[form, context].append(1e3 * (time.perf_counter() - start) / arguments.steps)
    return times


def make_layer(form: Form, num_heads: int, dtype: DTypeLike) -> LatentAttention:
    rope = RopeConfig(dim=DIMS.rope)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
    return LatentAttention(EMBED_DIM, num_heads, DIMS, rope=rope, form=form, **options)


def make_cache(spec: CacheSpec, batch: int, context: int, num_new: int) -> Cache:
    """Return a cache of zeros that counts as full up to `context`."""
    cache = Cache.dense(spec, num_sequences=batch, capacity=context + num_new)
    return cache.replace(lengths=jnp.full_like(cache.lengths, context))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step(graph: nnx.GraphDef, state: nnx.State, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache | None]:
    cache, batch = cache.begin(jnp.ones(x.shape[0], jnp.int32), time=1)
    return nnx.merge(graph, state)(x, cache, where=(0, 0), batch=batch)


if __name__ == "__main__":
    main()
