"""Attends on the GPU that is here, by jkv's kernels and by peers; started by scripts/bench_gpu.py.

    python -m scripts.gpu_runners FILE checks [ONLY] [--interpret]
    python -m scripts.gpu_runners FILE writes [ONLY] [--interpret]
    python -m scripts.gpu_runners FILE roofs
    python -m scripts.gpu_runners FILE time RUNNER CASE,CASE

Writes JSON lines to FILE as it goes. A call is repeated in one program, on another layer every time, so that
the L2 cache holds nothing of it; the shortest of `REPEATS` runs counts. Every runner gets the same pages,
rearranged if it takes others, and what it returns for the first sequence is compared with the definition.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.codec import OF_VALUES
from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.paged_attention import PagedArguments, Pages, reference, xla
from scripts import gpu_writes
from scripts.gpu_cases import HEAD_DIM, LATENT_DIM, NUM_KV_HEADS, ROPE_DIM, Case, all_cases
from scripts.gpu_checks import encode, named_checks, worst_row

REPEATS = 3
# Bytes that the layers of a timed pool take together, past an L2 cache of 50 MB.
POOL_BYTES = 2**31
# Bytes that a timed program reads: 7 ms at an H200's 4.8 TB/s, beside the 0.1 ms that starting it may take.
READ_BYTES = 2**35
# Calls of a timed program at most: each takes some microseconds, however little it reads.
MAX_CALLS = 2**11
# Relative error of a row past which a result is another one: no rounding to bfloat16 is as large.
WRONG = 0.1

# Of arrays, a query and a layer. JAX would make arrays that a function closes over constants of its program.
Attend = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Data:
    """Arrays of a case.

    Attributes:
        case: its sizes.
        pages: keys and values, or latents and their rotated parts, of all layers.
        table: pages of each sequence, in random order.
        query: of one new token a sequence; of latents without the rotated part, which is its first entries.
        num_layers: that calls take turns with.
        recent: of keys in runs of slots, those of each query's own run, `[layer, seq, ...]`; else None.
    """

    case: Case
    pages: tuple[Pages, Pages]
    table: jax.Array
    query: jax.Array
    num_layers: int
    recent: jax.Array | None = None

    @property
    def num_pages(self) -> int:
        """Pages of a layer."""
        return self.table.size

    @property
    def scale(self) -> float:
        """What multiplies the logits."""
        return (LATENT_DIM + ROPE_DIM if self.case.is_latent else HEAD_DIM) ** -0.5

    @property
    def arrays(self) -> tuple[tuple[Pages, Pages], jax.Array, jax.Array | None]:
        """What jkv's implementations attend to."""
        return self.pages, self.table, self.recent

    def attend(self, implementation: Any, arrays: Any, query: jax.Array, layer: Any) -> Any:
        """Return what an implementation of jkv's gives."""
        pages, table, recent = arrays
        ends, ones = jnp.full(len(table), self.case.context, jnp.int32), jnp.ones(len(table), jnp.int32)
        rest = (*pages, table, ends - ones, ones, layer * self.num_pages)
        kind: Any = LatentArguments if self.case.is_latent else PagedArguments
        queries = (query, query[..., :ROPE_DIM]) if self.case.is_latent else (query,)
        arguments = kind(*queries, *rest)
        if recent is not None:
            own = jax.lax.dynamic_index_in_dim(recent, layer, keepdims=False)
            arguments = arguments._replace(recent=own)
        return implementation(arguments, num_pages=self.num_pages, scale=self.scale)[0]

    def layers_of(self, pages: Pages) -> jax.Array:
        """Return entries as `[layer, page, kv_head, slot, entry]`."""
        return pages.data.reshape(self.num_layers, self.num_pages, *pages.data.shape[1:])


def num_calls(case: Case) -> int:
    """Return the calls of a timed program."""
    return min(MAX_CALLS, max(2, -(-READ_BYTES // case.call_bytes)))


def make_data(case: Case, pool_bytes: int = POOL_BYTES) -> Data:
    """Return normal pages, of as many layers as take `pool_bytes`."""
    width = -(-case.context // case.page_size)
    num_pages = case.batch * width
    num_layers = max(1, pool_bytes // case.call_bytes)
    keys = jax.random.split(jax.random.key(0), 5)
    num_heads, *dims = (1, LATENT_DIM, ROPE_DIM) if case.is_latent else (NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
    second = "bf16" if case.is_latent else OF_VALUES.get(case.codec, case.codec)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def make(key: jax.Array, dim: int, codec: str) -> Pages:
        # Layer by layer: float32 of all would not fit.
        shape = (num_pages, num_heads, case.page_size, dim)
        one = lambda key: encode(jax.random.normal(key, shape), codec)  # noqa: E731
        pages = jax.lax.map(one, jax.random.split(key, num_layers))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pages)

    pages = make(keys[0], dims[0], case.codec), make(keys[1], dims[1], second)
    table = jax.random.permutation(keys[2], num_pages).astype(jnp.int32).reshape(case.batch, width)
    query = jax.random.normal(keys[3], (case.batch, 1, case.num_heads, dims[0]), jnp.bfloat16)
    recent = None
    if (span := pages[0].run_slots) is not None:
        # Not those that the pages hold, which are not read.
        shape = (num_layers, case.batch, num_heads, span, dims[0])
        recent = jax.random.normal(keys[4], shape, jnp.bfloat16)
    return Data(case, pages, table, query, num_layers, recent)


def difference(data: Data, out: Any) -> float:
    """Return the relative error of the worst row of the first sequence, of a call on the first layer."""
    definition = latent_attention.reference if data.case.is_latent else reference
    # Of latents it makes float32 of all that it is given.
    own = jax.jit(lambda pages, row: jax.tree.map(lambda array: array[row], pages))(data.pages, data.table[0])
    arrays = own, jnp.arange(data.table.shape[1], dtype=jnp.int32)[None], None
    if data.recent is not None:
        arrays = (*arrays[:2], data.recent[:, :1])
    compute = jax.jit(functools.partial(data.attend, definition))
    expected = compute(arrays, data.query[:1].astype(jnp.float32), jnp.int32(0))
    return worst_row(jnp.asarray(np.asarray(out[:1], np.float32)), expected)


def seconds(program: Callable[..., Any], *arguments: Any) -> float:
    """Return the shortest time of `REPEATS` runs, after one that compiles."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def roofs() -> dict[str, Any]:
    """Return the bytes a second that a copy of 4 GB reads and writes, and the rate of a large product."""
    x = jnp.zeros(2**30, jnp.float32)
    copied = 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)
    size = 8192
    matrices = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    multiplied = 2 * size**3 / seconds(jax.jit(lambda x: x[0] @ x[1]), matrices)
    device = jax.devices()[0].device_kind
    return {
        "device": device,
        "jax": jax.__version__,
        "copy_gb_per_s": copied / 1e9,
        "gemm_tflops": multiplied / 1e12,
    }


def repeated(data: Data, attend: Attend) -> Any:
    """Return a program that attends again and again, each query made of what was attended before."""

    @jax.jit
    def program(arrays: Any, query: jax.Array) -> jax.Array:
        def step(i: jax.Array, query: jax.Array) -> jax.Array:
            return query + attend(arrays, query, i % data.num_layers).astype(query.dtype)

        return jax.lax.fori_loop(0, num_calls(data.case), step, query)

    return program


def time_jax(data: Data, arrays: Any, attend: Attend) -> tuple[Any, float]:
    """Return a call's result on the first layer, and the seconds of a call."""
    out = np.asarray(jax.jit(attend)(arrays, data.query, jnp.int32(0)).astype(jnp.float32))
    return out, seconds(repeated(data, attend), arrays, data.query) / num_calls(data.case)


def time_torch(data: Data, arrays: Any, attend: Attend) -> tuple[Any, float]:
    """Return the same of PyTorch, whose calls are replayed as one CUDA graph: no launch is waited for."""
    torch = _module("torch")

    query, last = as_torch(data.query), data.num_layers - 1
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # What a peer planned is on its way on the stream that was.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(arrays, query, last)
        out = attend(arrays, query, 0).float().cpu().numpy()
    count = num_calls(data.case)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            attend(arrays, query, i % data.num_layers)
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return out, min(times) / count


def as_torch(array: jax.Array) -> Any:
    """Return an array's own memory as PyTorch sees it."""
    return _module("torch").from_dlpack(jax.block_until_ready(array))


def _module(name: str) -> Any:
    """Return a peer's module, which need not be installed."""
    return importlib.import_module(name)


def own_xla(data: Data) -> tuple[Any, Attend]:
    """Return jkv's plain JAX."""
    implementation = latent_attention.xla if data.case.is_latent else xla
    return data.arrays, functools.partial(data.attend, implementation)


def own(data: Data) -> tuple[Any, Attend]:
    """Return jkv's kernel."""
    from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
    from kernels_pallas.paged_attention import pallas_gpu

    kernel = latent_gpu.latent_attention if data.case.is_latent else pallas_gpu.paged_attention
    return data.arrays, functools.partial(data.attend, kernel)


def jax_triton(data: Data) -> tuple[Any, Attend]:
    """Return JAX's paged attention on Triton, over copies of the pools with heads first, as it takes them."""
    from jax.experimental.pallas.ops.gpu import paged_attention as peer

    # It is deprecated, and says so.
    warnings.simplefilter("ignore", DeprecationWarning)
    heads_first = [jax.jit(lambda pool: pool.swapaxes(0, 1))(pages.data) for pages in data.pages]
    block = math.gcd(data.table.shape[1], 8)
    cut = {"pages_per_compute_block": block, "k_splits": math.gcd(data.table.shape[1] // block, 16)}

    def attend(arrays: Any, query: jax.Array, layer: Any) -> jax.Array:
        pools, table = arrays
        scaled = query[:, 0] * jnp.asarray(data.scale, query.dtype)
        ends = jnp.full(len(table), data.case.context, jnp.int32)
        return peer.paged_attention(scaled, *pools, table + layer * data.num_pages, ends, **cut)[:, None]

    return (heads_first, data.table), attend


def contiguous(data: Data, *, heads_first: bool) -> list[jax.Array]:
    """Return keys and values that lie whole, `[layer, seq, slot, kv_head, entry]` or heads before slots."""

    @jax.jit
    def gather(pool: jax.Array, table: jax.Array) -> jax.Array:
        rows = pool[:, table]
        order = (0, 1, 3, 2, 4, 5) if heads_first else (0, 1, 2, 4, 3, 5)
        rows = rows.transpose(order)
        sizes = (NUM_KV_HEADS, data.case.context) if heads_first else (data.case.context, NUM_KV_HEADS)
        return rows.reshape(data.num_layers, data.case.batch, *sizes, HEAD_DIM)

    return [gather(data.layers_of(pages), data.table) for pages in data.pages]


def jax_nn(data: Data, implementation: Any) -> tuple[Any, Attend]:
    """Return `jax.nn.dot_product_attention`."""
    ends = jnp.full(data.case.batch, data.case.context, jnp.int32)
    lengths = {"query_seq_lengths": jnp.ones_like(ends), "key_value_seq_lengths": ends}

    def attend(stored: Any, query: jax.Array, layer: Any) -> jax.Array:
        pools = (jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in stored)
        return jax.nn.dot_product_attention(query, *pools, implementation=implementation, **lengths)

    return contiguous(data, heads_first=False), attend


def torch_sdpa(data: Data) -> tuple[Any, Attend]:
    """Return PyTorch's `scaled_dot_product_attention`."""
    compute = _module("torch.nn.functional").scaled_dot_product_attention

    def attend(arrays: Any, query: Any, layer: int) -> Any:
        keys, values = arrays
        rows = query.transpose(1, 2)
        return compute(rows, keys[layer], values[layer], enable_gqa=True).transpose(1, 2)

    return [as_torch(array) for array in contiguous(data, heads_first=True)], attend


def torch_flex(data: Data) -> tuple[Any, Attend]:
    """Return PyTorch's `flex_attention`, compiled."""
    compiled = _module("torch").compile(_module("torch.nn.attention.flex_attention").flex_attention)

    def attend(arrays: Any, query: Any, layer: int) -> Any:
        keys, values = arrays
        return compiled(query.transpose(1, 2), keys[layer], values[layer], enable_gqa=True).transpose(1, 2)

    return [as_torch(array) for array in contiguous(data, heads_first=True)], attend


def flash_attention_3(data: Data) -> tuple[Any, Attend]:
    """Return FlashAttention-3's paged decode, over copies of the pools with slots before heads."""
    compute = _module("flash_attn3_jax").flash_mha_with_kvcache
    swap = jax.jit(lambda pool: pool.swapaxes(1, 2))
    # Programs of a split: as many as fill 132 multiprocessors.
    num_splits = min(32, max(1, 132 // (data.case.batch * NUM_KV_HEADS)))

    def attend(arrays: Any, query: jax.Array, layer: Any) -> jax.Array:
        pools, table = arrays
        ends = jnp.full(len(table), data.case.context, jnp.int32)
        options = {"cache_seqlens": ends, "page_table": table + layer * data.num_pages}
        out = compute(query, *pools, num_splits=num_splits, **options)
        return out[0] if isinstance(out, tuple) else out

    return ([swap(pages.data) for pages in data.pages], data.table), attend


def flashinfer(data: Data) -> tuple[Any, Attend]:
    """Return FlashInfer's paged decode, or that of latents, planned on the host once."""
    torch = _module("torch")
    case, width = data.case, data.table.shape[1]
    pools = [as_torch(data.layers_of(pages)) for pages in data.pages]
    # To be zero at first, it says.
    buffer = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    begins = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    entries, dtype = as_torch(data.table).reshape(-1), torch.bfloat16
    if case.is_latent:
        latents = _module("flashinfer.mla").BatchMLAPagedAttentionWrapper(buffer)
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        sizes = (case.num_heads, LATENT_DIM, ROPE_DIM, case.page_size)
        latents.plan(begins, begins * width, entries, lengths, *sizes, False, data.scale, dtype, dtype)

        def attend_latents(pools: Any, query: Any, layer: int) -> Any:
            ropes = query[:, 0, :, :ROPE_DIM].contiguous()
            return latents.run(query[:, 0], ropes, pools[0][layer, :, 0], pools[1][layer, :, 0])[:, None]

        return pools, attend_latents
    heads = _module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(buffer, "HND", use_tensor_cores=True)
    last = torch.full(
        (case.batch,), (case.context - 1) % case.page_size + 1, dtype=torch.int32, device="cuda"
    )
    sizes = (case.num_heads, NUM_KV_HEADS, HEAD_DIM, case.page_size)
    heads.plan(begins * width, entries, last, *sizes, q_data_type=dtype, kv_data_type=dtype)

    def attend(pools: Any, query: Any, layer: int) -> Any:
        return heads.run(query[:, 0], (pools[0][layer], pools[1][layer]))[:, None]

    return pools, attend


MAKERS: dict[str, tuple[Callable[..., Any], Callable[[Data], tuple[Any, Attend]]]] = {
    "jkv": (time_jax, own),
    "jkv xla": (time_jax, own_xla),
    "jax pallas triton": (time_jax, jax_triton),
    "jax.nn cudnn, contiguous": (time_jax, functools.partial(jax_nn, implementation="cudnn")),
    "jax.nn xla, contiguous": (time_jax, functools.partial(jax_nn, implementation="xla")),
    "flash-attn3-jax": (time_jax, flash_attention_3),
    "flashinfer": (time_torch, flashinfer),
    "torch sdpa, contiguous": (time_torch, torch_sdpa),
    "torch flex, contiguous": (time_torch, torch_flex),
}


def measure(runner: str, case: Case, pool_bytes: int = POOL_BYTES) -> dict[str, Any]:
    """Return a line: the microseconds of a call, or why there are none."""
    line: dict[str, Any] = {"runs": runner, **case._asdict()}
    clock, make = MAKERS[runner]
    try:
        data = make_data(case, pool_bytes)
        out, took = clock(data, *make(data))
        found = difference(data, out)
    # Whatever keeps a peer from running is reported in its line.
    except Exception as error:
        return line | {"error": "".join(traceback.format_exception_only(error)).strip()[-300:]}
    if not found < WRONG:
        return line | {"error": f"differs from the definition by {found:.2g}"}
    return line | {"us": took * 1e6, "difference": found}


def lines_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was asked for."""
    if options.what == "checks":
        yield from named_checks(options.words[0] if options.words else "", is_interpreted=options.interpret)
    elif options.what == "writes":
        yield from gpu_writes.lines(
            options.words[0] if options.words else "", is_interpreted=options.interpret
        )
    elif options.what == "roofs":
        yield roofs()
    else:
        runner, names = options.words
        cases = all_cases()
        for name in names.split(","):
            yield measure(runner, cases[name])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("what", choices=["checks", "writes", "roofs", "time"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args(argv)
    if options.interpret:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        context: Any = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    elif jax.default_backend() != "gpu":
        raise SystemExit(f"a GPU is needed, got {jax.devices()[0].device_kind}")
    else:
        context = contextlib.nullcontext()
    with context, options.file.open("w") as file:
        for line in lines_of(options):
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
