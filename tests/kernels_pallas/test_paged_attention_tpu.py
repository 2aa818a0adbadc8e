"""The TPU kernel of paged attention, interpreted: against its definition, and with faults in its source."""

import functools
import importlib.util
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # its races are private
from jax.experimental.pallas import tpu as pltpu

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS
from jkv.cache.encoding import encode, largest_entry
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.in_place import assert_updates_in_place
from jkv.targets import shapes_on
from kernels_pallas import paged_attention
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes, Tiling, pallas_tpu
from kernels_pallas.paged_attention.shapes import MODELS, Shape

from ..compare import assert_close, relative_errors
from ..loops import LARGE, SMALL, loop
from ..loops import make_arguments as make_loop_arguments
from ..machines import find_target
from ..poison import poison
from ..rows import in_rows
from .models import model_arguments
from .test_paged_attention import (
    assert_log_sums_close,
    make_arguments,
    make_options,
    run,
    run_reference,
)

# Several tiles for the longest row, and several pieces of a chunk.
TILING = Tiling(block_tokens=128, query_tokens=4)


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Forget what a failed run has left behind."""
    pltpu.reset_tpu_interpret_mode_state()


def run_kernel(
    shape: Shape, arguments: PagedArguments, num_pages: int, tiling: Tiling = TILING, module=pallas_tpu
) -> tuple[jax.Array, jax.Array]:
    """Run in the interpreter, where what was never written is NaN; races are looked for."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        results = run(module.paged_attention, arguments, num_pages, tiling=tiling, **make_options(shape))
        return jax.block_until_ready(results)


def has_races() -> bool:
    """Return whether the latest run had races."""
    assert interpreter.races is not None
    return interpreter.races.races_found


def encoded(shape: Shape, codec_name: str) -> tuple[PagedArguments, int]:
    """Return the arguments of a bfloat16 model whose pools lie as on a TPU, NaN in whatever may hold it."""
    codec = CODECS[codec_name]
    arguments, num_pages = make_arguments(shape)
    scale = None
    if codec.scaling == "static":
        scale = jnp.linspace(0.01, 0.04, shape.num_kv_heads) * (127 / largest_entry(codec))

    def laid_out(array: jax.Array | None) -> jax.Array | None:
        if array is None:
            return None
        # Of the poison, entries of a live slot's padding are left out: they are written with its entries.
        rows = np.asarray(array.astype(jnp.float32)).swapaxes(1, 2)
        fill = np.nan if rows.ndim == 3 else 0
        return jnp.asarray(in_rows(rows, 128, fill)).astype(array.dtype)

    def pages(raw: Pages) -> Pages:
        stored = encode(codec, raw.data.swapaxes(1, 2), scale)
        entry = codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2") else "number"
        shapes = codec.page_shapes(page_size=shape.page_size, head_dim=shape.head_dim)
        sizes = PageSizes(
            shape.page_size, shape.head_dim, shapes["scale"].shape if "scale" in shapes else None
        )
        data, token_scale = laid_out(stored.data), laid_out(stored.scale)
        assert data is not None
        return Pages(data, scale if token_scale is None else token_scale, entry=entry, stated=sizes)

    query = arguments.query.astype(jnp.bfloat16)
    return arguments._replace(
        query=query, keys=pages(arguments.keys), values=pages(arguments.values)
    ), num_pages


DECODE = Shape(8, 2, 128, page_size=128, time=1, totals=(0, 1, 37, 300))
CHUNK = Shape(4, 2, 128, page_size=32, time=7, totals=(0, 1, 37, 150), window=130, soft_cap=5.0)
HALVES = Shape(4, 2, 64, page_size=64, time=3, totals=(3, 0, 301), window=150, has_sinks=True)
PADDED = Shape(4, 1, 80, page_size=32, time=1, totals=(290, 0, 3), has_sinks=True)
LARGE_PAGES = Shape(4, 2, 128, page_size=256, time=1, totals=(3, 300))
CASES = [
    (DECODE, "int8"),
    (CHUNK, "bf16"),
    (HALVES, "bf16"),
    *[
        pytest.param(shape, codec, marks=pytest.mark.gate)
        for shape, codec in [
            (DECODE, "bf16"),
            (DECODE, "f32"),
            (DECODE, "fp8_e4m3"),
            (DECODE, "fp8_e5m2"),
            (DECODE, "fp8_e4m3_static"),
            (CHUNK, "int8"),
            (CHUNK, "int8_static"),
            (HALVES, "int8"),
            (HALVES, "fp8_e4m3"),
            (PADDED, "bf16"),
            (PADDED, "int8"),
            (LARGE_PAGES, "int8"),
        ]
    ],
]


@pytest.mark.parametrize(("shape", "codec"), CASES)
def test_the_kernel_costs_at_most_twice_the_definitions_own_error(shape: Shape, codec: str):
    """Idle and empty rows, dead slots of NaN, partial pages, windows: with no race among the copies."""
    arguments, num_pages = encoded(shape, codec)
    paged_attention.check(arguments, num_pages=num_pages, window=shape.window)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    exact, _ = run_reference(shape, arguments._replace(query=arguments.query.astype(jnp.float32)), num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    assert_log_sums_close(log_sum, expected_log_sum)


def test_float32_pools_are_multiplied_as_they_are_and_what_has_no_page_is_not_seen():
    """The longest row's second page, in a tile among others, is none: the row is as if it were not there."""
    shape = Shape(4, 2, 128, page_size=16, time=1, totals=(150,))
    arguments, num_pages = make_arguments(shape)
    table = arguments.page_table.at[0, 1].set(num_pages)
    out, log_sum = run_kernel(shape, arguments._replace(page_table=table), num_pages)
    assert not has_races()
    expected, expected_log_sum = run_reference(shape, arguments._replace(page_table=table), num_pages)
    assert_close(out, expected)
    assert_log_sums_close(log_sum, expected_log_sum)
    with pytest.raises(AssertionError):
        assert_close(out, run_reference(shape, arguments, num_pages)[0])


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (Shape(4, 2, 128, page_size=16, time=5, totals=(0, 3, 150), window=40), 4),
        # More new tokens than the table has slots: the first of them see nothing.
        (Shape(4, 2, 128, page_size=16, time=20, totals=(3, 20, 37), has_sinks=True), 1),
    ],
)
def test_pages_written_over_are_not_seen(shape: Shape, width: int):
    arguments, num_pages = make_arguments(shape, width=width)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, expected)
    assert_log_sums_close(log_sum, expected_log_sum)


FAULTS = {
    "a copy that is not waited for": ("copy.wait()", "pass"),
    "a copy into a tile that is in use": ("range(sizes.num_buffers - 1)", "range(sizes.num_buffers)"),
    "a copy into another tile": (
        "tiles.data.at[buffer, :, place]",
        "tiles.data.at[next_buffer(buffer), :, place]",
    ),
    "a mask that is off by one": ("is_seen = past <= row", "is_seen = past < row"),
    "a last page that is left out": ("+ lens_ref[piece] + page_size - 1", "+ lens_ref[piece]"),
    "a scale that is wrong by 2 %": ("logits * options.scale", "logits * (1.02 * options.scale)"),
    "a sum that is not rescaled": ("sum_ref[heads] * keep", "sum_ref[heads]"),
}


def with_fault(fault: str, monkeypatch):
    """Return the kernel's module with a fault in its source."""
    found, replacement = FAULTS[fault]
    source = inspect.getsource(pallas_tpu)
    assert source.count(found) == 1, f"{found!r} is to be in the source once"
    spec = importlib.util.spec_from_loader("faulty_pallas_tpu", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    exec(source.replace(found, replacement), module.__dict__)
    return module


@pytest.mark.parametrize(
    "fault",
    [fault if "wait" in fault else pytest.param(fault, marks=pytest.mark.gate) for fault in FAULTS],
)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(290, 21))
    arguments, num_pages = make_arguments(shape)
    out, _ = run_kernel(shape, arguments, num_pages, module=with_fault(fault, monkeypatch))
    expected, _ = run_reference(shape, arguments, num_pages)
    whole, row = relative_errors(out, expected)
    assert has_races() or not (whole < 1e-3 and row < 1e-3)


@pytest.mark.gate
def test_the_kernel_without_a_fault_passes_where_faults_are_found():
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(290, 21))
    arguments, num_pages = make_arguments(shape)
    out, _ = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    assert_close(out, run_reference(shape, arguments, num_pages)[0])


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (
            Shape(2, 1, 128, page_size=8, time=1),
            jnp.bfloat16,
            "multiple of 16 rows of 128 lanes, got 8 for 8 slots",
        ),
        (
            Shape(2, 1, 80, page_size=16, time=1),
            jnp.bfloat16,
            "rows of 128 lanes, got 80; use the pool layout",
        ),
        (Shape(2, 1, 128, page_size=16, time=1), jnp.float16, "must be bfloat16 or float32, got float16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_its_sizes(shape: Shape, dtype, message: str):
    arguments, num_pages = make_arguments(shape, dtype)
    with pytest.raises(ValueError, match=f"paged attention on TPUs cannot run: .*{message}"):
        pallas_tpu.paged_attention(arguments, num_pages=num_pages, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "codec", "message"),
    [
        (
            Shape(2, 1, 128, page_size=12, time=1),
            "bf16",
            "must fill its 16 rows of 128 lanes, got 12 slots of 128 entries",
        ),
        (
            Shape(2, 1, 128, page_size=384, time=1),
            "int8",
            "scales of a page of keys must fill their 4 rows of 128 lanes, got 384 slots",
        ),
        (
            Shape(16, 16, 128, page_size=2048, time=1),
            "bf16",
            "at most 33,554,432 bytes, got 51,183,616 for 16 KV heads, pages of 2048 slots",
        ),
    ],
)
def test_pages_that_do_not_suit_the_kernel_are_refused_with_their_sizes(
    shape: Shape, codec: str, message: str
):
    refused = pallas_tpu.refusal(model_arguments(shape, codec)[0])
    assert refused is not None
    assert message in refused


def test_a_page_table_that_does_not_fit_is_refused_with_its_sizes():
    arguments, _ = make_arguments(Shape(2, 1, 128, page_size=16, time=1), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1024, 1024), jnp.int32)
    refused = pallas_tpu.refusal(arguments._replace(page_table=table))
    assert refused is not None
    assert "at most 524,288 bytes, got 4,194,304 for 1024 sequences of 1024 pages" in refused


def test_a_tile_is_no_longer_than_what_may_be_seen():
    arguments, _ = make_arguments(Shape(32, 8, 128, page_size=16, time=1, totals=(2048,)), jnp.bfloat16)
    assert pallas_tpu.tiling_for(arguments, window=None).block_tokens == 256
    assert pallas_tpu.tiling_for(arguments, window=100).block_tokens == 116


@pytest.mark.gate
def test_steps_through_the_door_are_those_of_the_definition():
    """A prefill, then a ragged step of a decode beside a chunk."""
    spec = CacheSpec.create([CacheGroup(2, 2, 128, "int8")], page_size=32, layout="tpu")

    @functools.partial(jax.jit, static_argnames=("implementation", "dtype"))
    def run_steps(implementation: ops.Implementation, dtype=jnp.bfloat16) -> list[jax.Array]:
        cache, outs = poison(Cache.dense(spec, num_sequences=2, capacity=64)), []
        for step, lens in enumerate(([30, 0], [1, 20])):
            key = jax.random.key(step)
            if step == 0:
                cache, batch = cache.begin(jnp.array(lens, jnp.int32), time=max(lens))
                rows = (2, max(lens))
            else:
                cache, batch = cache.begin_ragged(jnp.array(lens, jnp.int32), num_tokens=32)
                rows = (1, 32)
            heads = [
                jax.random.normal(jax.random.fold_in(key, i), (*rows, count, 128), jnp.bfloat16)
                for i, count in enumerate((4, 2, 2))
            ]
            heads[0] = heads[0].astype(dtype)
            out, cache, _ = ops.attend(*heads, cache, (0, 1), batch, scale=0.1, implementation=implementation)
            outs.append(out)
        return outs

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        found = jax.block_until_ready(run_steps("pallas_tpu"))
    assert not has_races()
    expected, exact = run_steps("reference"), run_steps("reference", jnp.float32)
    for out, rounded, right in zip(found, expected, exact, strict=True):
        assert_close(out, right, 2 * max(relative_errors(rounded, right)))


AOT_CODECS = [("bf16", "v5e"), ("bf16", "v6e"), ("int8", "v5e"), ("int8", "v6e")]
AOT_CASES = [
    *[(name, codec, machine) for name in MODELS for codec, machine in AOT_CODECS],
    *[
        ("llama3_8b", codec, machine)
        for codec in ("f32", "fp8_e4m3", "fp8_e5m2", "int8_static", "fp8_e4m3_static")
        for machine in ("v5e", "v6e")
    ],
]


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("name", "codec", "machine"), AOT_CASES)
def test_the_kernel_compiles_for_tpus_within_their_memories(name: str, codec: str, machine: str):
    """Mosaic refuses what does not fit VMEM or SMEM; there is nothing beside the kernel that is as a pool."""
    mesh = find_target(machine)
    arguments, num_pages = model_arguments(MODELS[name], codec)
    options = make_options(MODELS[name])
    call = functools.partial(pallas_tpu.paged_attention, num_pages=num_pages, **options)
    program = jax.jit(call).lower(shapes_on(mesh, arguments)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.01 * memory.argument_size_in_bytes


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("machine", "codec", "layout"),
    [
        ("v5e", "bf16", "dense"),
        ("v6e", "bf16", "paged"),
        ("v6e", "f32", "window"),
        ("v5e", "int8", "window"),
        ("v6e", "int8", "dense"),
        ("v6e", "fp8_e4m3", "paged"),
    ],
)
def test_a_loop_over_the_kernel_updates_the_cache_in_place(machine: str, codec: str, layout: str):
    mesh = find_target(machine)
    sizes = {"page_size": 128, "platform": "tpu"}
    small, large = (
        shapes_on(mesh, make_loop_arguments(codec, layout, nbytes, **sizes)) for nbytes in (SMALL, LARGE)
    )
    assert_updates_in_place(functools.partial(loop, implementation="pallas_tpu"), small, large)
