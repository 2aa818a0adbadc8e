"""The GPU kernel of paged attention, interpreted, with races looked for and faults put into its source."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jkv.cache.codec import CODECS
from jkv.cache.encoding import encode as encode_heads
from jkv.cache.encoding import encode_run
from jkv.cache.runs import num_runs
from kernels_pallas import paged_attention
from kernels_pallas.hopper import accumulators, blocks, forms, stages
from kernels_pallas.hopper import splits as splitting
from kernels_pallas.paged_attention import (
    PagedArguments,
    Pages,
    Tiling,
    pallas_gpu,
)
from kernels_pallas.paged_attention.reference import heads_of
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

from ..compare import assert_close, relative_errors
from ..gpu_kernels import interpret
from .faults import Fault, put_fault, with_fault
from .stripes import in_stripes
from .test_paged_attention import (
    assert_log_sums_close,
    change_scale,
    dense_attention,
    drop_last_page,
    make_arguments,
    make_dense,
    make_options,
    run,
    run_reference,
    shift_mask,
)

# Several splits a row, and several of them for a program.
TILING = Tiling(split_tokens=64, num_programs=2, is_interpreted=True)
DECODE = Shape(8, 2, 64, page_size=16, time=1, totals=(0, 1, 100))
CASES = {
    "decode": (DECODE, jnp.bfloat16),
    "chunk_of_a_window": (
        Shape(16, 1, 80, page_size=32, time=5, totals=(3, 180), window=70, soft_cap=5.0, has_sinks=True),
        jnp.float16,
    ),
}
GATE_CASES = {
    "wide_chunk_of_large_pages": (Shape(8, 1, 128, page_size=128, time=16, totals=(16, 200)), jnp.bfloat16),
} | {
    name: (shape, jnp.bfloat16)
    for name, shape in SHAPES.items()
    if shape.head_dim >= 64 and shape.page_size % 8 == 0
}


def encode(pages: Pages, codec: str, scaling: str) -> Pages:
    """Return float pages in a codec; dead slots hold the largest integer, or NaN, and NaN for a scale."""
    if codec == "int4":
        stored = encode_heads(dataclasses.replace(CODECS["int4_token"], is_rotated=False), pages.data)
        return Pages(stored.data, stored.scale, stored.zero, entry="int4")
    data = np.asarray(pages.data)
    axes = {"token": -1, "head": (0, 2, 3)}[scaling]
    dtype = (
        jnp.int8 if codec == "int8" else getattr(jnp, codec.replace("fp8_", "float8_").replace("m3", "m3fn"))
    )
    largest = 127 if codec == "int8" else float(jnp.finfo(dtype).max)
    reduce = np.max if scaling == "token" else np.nanmax
    scale = reduce(np.abs(data), axis=axes) / np.float32(largest)
    # Of a vector of zeros jkv keeps a scale of zero.
    by = np.where(scale == 0, 1, scale)
    numbers = data / (by[..., None] if scaling == "token" else by[:, None, None])
    if codec == "int8":
        return Pages(jnp.asarray(np.nan_to_num(np.rint(numbers), nan=127), jnp.int8), jnp.asarray(scale))
    bits = np.asarray(numbers).astype(dtype).view(np.uint8)
    return Pages(jnp.asarray(bits), jnp.asarray(scale), entry=cast(Any, codec))


def encode_call(shape: Shape, codec: str, scaling: str) -> tuple[PagedArguments, int]:
    """Return arguments with pools in a codec, of unlike heads, and near the end a token of zeros."""
    arguments, num_pages = make_arguments(shape)
    factors = 0.5 ** np.arange(shape.num_kv_heads, dtype=np.float32)[None, :, None, None]
    page, slot = place_near_the_end(arguments, shape.totals[-1], shape.page_size)
    pools = (pages.data.at[page, :, slot].set(0) * factors for pages in (arguments.keys, arguments.values))
    keys, values = (encode(Pages(data), codec, scaling) for data in pools)
    return arguments._replace(keys=keys, values=values), num_pages


def place_near_the_end(arguments: Any, total: int, page_size: int) -> tuple[jax.Array, int]:
    """Return the page and slot of one of the last tokens of the last row."""
    column, slot = divmod(total - 8, page_size)
    return arguments.page_offset + arguments.page_table[-1, column], slot


def output_error(shape: Shape) -> float:
    """Return what queries and pools in bfloat16 cost the definition."""
    made = (make_arguments(shape, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    return max(relative_errors(*(run_reference(shape, *each)[0] for each in made)))


def log_sum_error(shape: Shape, arguments: PagedArguments, num_pages: int) -> float:
    """Return what queries and what entries stand for in bfloat16 cost the definition of a call."""

    def numbers_of(pages: Pages) -> Pages:
        num_pages, num_heads = pages.data.shape[:2]
        heads = heads_of(pages, jnp.arange(num_pages)[None])
        heads = heads.reshape(num_pages, pages.page_size, num_heads, pages.head_dim).swapaxes(1, 2)
        return Pages(heads.astype(jnp.bfloat16))

    keys, values = map(numbers_of, (arguments.keys, arguments.values))
    rounded = arguments._replace(query=arguments.query.astype(jnp.bfloat16), keys=keys, values=values)
    logs = (np.asarray(run_reference(shape, each, num_pages)[1]) for each in (rounded, arguments))
    return max(relative_errors(*(np.where(np.isfinite(each), each, 0) for each in logs)))


def compare_call(shape: Shape, arguments: PagedArguments, num_pages: int, num_kernels: int = 2) -> None:
    """Compare the kernel with the definition of the same call."""
    out, log_sum = interpret(call_of(shape, num_pages), arguments, num_kernels=num_kernels)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, expected, 2 * output_error(shape))
    assert_log_sums_close(log_sum, expected_log_sum, 2 * log_sum_error(shape, arguments, num_pages))


def call_of(shape: Shape, num_pages: int):
    """Return the interpreted kernel for a shape."""
    options = make_options(shape) | {"num_pages": num_pages, "tiling": TILING}
    return jax.jit(functools.partial(pallas_gpu.paged_attention, **options))


# Compiled once for all calls.
compiled = functools.cache(call_of)


def run_kernel(shape: Shape, arguments: PagedArguments, num_pages: int):
    return interpret(compiled(shape, num_pages), arguments)


def assert_equals_the_definition(shape: Shape, dtype, width: int | None = None) -> None:
    """Compare over a table that names every page, or over a ring of `width`, which is a window of its own."""
    arguments, num_pages = make_arguments(shape, dtype, width=width)
    held = None if width is None else width * shape.page_size
    exact, exact_log_sum = dense_attention(dataclasses.replace(shape, window=shape.window or held))
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    is_seen = np.isfinite(exact_log_sum)
    seen = (np.where(is_seen, x, 0) for x in (expected_log_sum, exact_log_sum))
    assert_log_sums_close(log_sum, exact_log_sum, 2 * max(relative_errors(*seen)))


@pytest.mark.parametrize(("shape", "dtype"), CASES.values(), ids=CASES)
def test_the_kernel_equals_the_definition(shape: Shape, dtype):
    assert_equals_the_definition(shape, dtype)


# Eight blocks in one split: twice as many as are on their way at once.
LONG = Shape(2, 1, 80, page_size=64, time=1, totals=(450,))
LONG_TILING = Tiling(split_tokens=512, is_interpreted=True)


def make_long_call(kernel: ModuleType):
    """Return a call of a kernel's module for `LONG` and its arguments."""
    arguments, num_pages = make_arguments(LONG, jnp.bfloat16)
    options = {
        **make_options(LONG),
        "num_pages": num_pages,
        "tiling": Tiling(split_tokens=512, is_interpreted=True),
    }
    return jax.jit(functools.partial(kernel.paged_attention, **options)), arguments, num_pages


def test_blocks_of_a_split_follow_one_another_through_its_stages():
    call, arguments, num_pages = make_long_call(pallas_gpu)
    out, log_sum = interpret(call, arguments)
    expected, expected_log_sum = run_reference(LONG, arguments, num_pages)
    assert_close(out, expected, 2 * max(relative_errors(expected, dense_attention(LONG)[0])))
    assert_log_sums_close(log_sum, expected_log_sum, 1e-3)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("found", "replacement"),
    [
        ("total * tall(keep, BLOCK_TOKENS)", "total"),
        ("before * tall(keep, num_channels)", "before"),
        ("last = self.head_dim - _PRODUCT_ROWS,", "last = 0,"),
        ("read_table(block + num_stages + 1)", "read_table(block + num_stages)"),
    ],
    ids=["weights not rescaled", "values not rescaled", "the last channels' values", "a block twice"],
)
def test_a_fault_among_the_blocks_of_a_split_is_found(found: str, replacement: str):
    call, arguments, num_pages = make_long_call(with_fault((pallas_gpu, found, replacement)))
    out, _ = interpret(call, arguments)
    expected, _ = run_reference(LONG, arguments, num_pages)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, expected, 2 * max(relative_errors(expected, dense_attention(LONG)[0])))


@pytest.mark.parametrize("window", [40, None])
def test_pages_written_over_are_not_seen(window: int | None):
    shape = Shape(8, 1, 64, page_size=16, time=1, totals=(0, 20, 200), window=window)
    assert_equals_the_definition(shape, jnp.bfloat16, width=5)


@pytest.mark.parametrize("fault", [None, pytest.param("held=held", marks=pytest.mark.gate)])
def test_long_steps_of_wide_encoded_heads_are_cut_into_pieces(fault: str | None):
    """Over a ring, with more new tokens than it has slots: the first of them see nothing."""
    shape = Shape(2, 1, 192, page_size=16, time=40, totals=(100, 20), has_sinks=True)
    arguments, num_pages = make_arguments(shape, width=2)
    exact, _ = run_reference(shape, arguments, num_pages)
    rounded, _ = run_reference(shape, make_arguments(shape, jnp.bfloat16, width=2)[0], num_pages)
    keys, values = (encode(pages, "int8", "token") for pages in (arguments.keys, arguments.values))
    arguments = arguments._replace(keys=keys, values=values)
    kernel = pallas_gpu if fault is None else with_fault((pallas_gpu, fault, "held=None"))
    options = make_options(shape) | {"num_pages": num_pages, "tiling": TILING}
    out, _ = interpret(jax.jit(functools.partial(kernel.paged_attention, **options)), arguments)
    expected, _ = run_reference(shape, arguments, num_pages)
    with nullcontext() if fault is None else pytest.raises((AssertionError, RuntimeWarning)):
        assert_close(out, expected, 2 * max(relative_errors(rounded, exact)))


STRIPE_FAULTS: dict[str, Fault] = {
    "pages of the stripe before": (blocks, "(stripe.stride - 1) + stripe.offset)", "(stripe.stride - 1))"),
    "pages that follow one another": (blocks, "page * (stripe.stride - 1) + stripe", "stripe"),
    "a last page that is left out": (splitting, "-(-end // page_size)", "end // page_size"),
    "a ring of one stripe": (splitting, "sizes.capacity * stride", "sizes.capacity"),
}


@pytest.mark.parametrize(
    "fault", [None, *(pytest.param(fault, marks=pytest.mark.gate) for fault in STRIPE_FAULTS)]
)
def test_stripes_of_pages_merged_are_the_whole(fault: str | None, monkeypatch):
    """A ring, of two stripes; of one row a stripe has nothing."""
    shape = Shape(8, 1, 64, page_size=32, time=3, totals=(3, 0, 301), has_sinks=True)
    arguments, num_pages = make_arguments(shape, jnp.bfloat16, width=8)
    if fault is not None:
        faulty = with_fault(STRIPE_FAULTS[fault])
        if STRIPE_FAULTS[fault][0] is blocks:
            monkeypatch.setattr(blocks.Walk, "position", faulty.Walk.position)
        else:
            plan = lambda *positional, **named: splitting.Splits(*faulty.plan(*positional, **named))  # noqa: E731
            monkeypatch.setattr(splitting, "plan", plan)
    options = make_options(shape) | {"num_pages": num_pages, "tiling": TILING}
    sinks = options.pop("sinks")
    call = jax.jit(functools.partial(pallas_gpu.paged_attention, **options))

    def compute(arguments: PagedArguments, stripe: int) -> tuple[jax.Array, jax.Array]:
        # A sink is counted once.
        return interpret(functools.partial(call, sinks=sinks - (jnp.inf if stripe else 0.0)), arguments)

    exact, _ = run_reference(shape, make_arguments(shape, width=8)[0], num_pages)
    expected, _ = run_reference(shape, arguments, num_pages)
    with nullcontext() if fault is None else pytest.raises(AssertionError):
        out, _ = in_stripes(compute, arguments, 2)
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


def test_a_query_that_sees_no_token_has_its_sink_alone():
    shape = Shape(2, 1, 64, page_size=64, time=1, totals=(0, 1))
    arguments, num_pages = make_arguments(shape, jnp.bfloat16)
    arguments = arguments._replace(page_table=jnp.full_like(arguments.page_table, -1))
    options = make_options(shape) | {"sinks": jnp.array([0.5, -jnp.inf])}
    expected = run(paged_attention.reference, arguments, num_pages, **options)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = run(pallas_gpu.paged_attention, arguments, num_pages, **options)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert np.asarray(expected[1]).ravel().tolist() == [-np.inf, -np.inf, 0.5, -np.inf]


@pytest.mark.gate
@pytest.mark.parametrize(("shape", "dtype"), GATE_CASES.values(), ids=GATE_CASES)
def test_the_kernel_equals_the_definition_in_named_shapes(shape: Shape, dtype):
    assert_equals_the_definition(shape, dtype)


ENCODED = [
    # codec, scaling, head_dim, page_size
    ("int8", "token", 192, 16),
    ("fp8_e4m3", "token", 80, 128),
    ("int4", "channels", 128, 128),
]
MORE_ENCODED = [
    ("int4", "channels", 64, 16),
    ("int4", "channels", 192, 16),
    ("int4", "channels", 256, 64),
    ("int8", "token", 128, 128),
    ("int8", "token", 64, 8),
    ("int8", "head", 64, 16),
    ("fp8_e4m3", "token", 256, 16),
    ("fp8_e4m3", "head", 64, 32),
    ("fp8_e5m2", "token", 64, 16),
    ("fp8_e5m2", "head", 96, 128),
]


def compare_encoded(codec: str, scaling: str, head_dim: int, page_size: int) -> None:
    shape = dataclasses.replace(DECODE, head_dim=head_dim, page_size=page_size)
    compare_call(shape, *encode_call(shape, codec, scaling))


@pytest.mark.parametrize(
    ("codec", "scaling", "head_dim", "page_size"),
    [*ENCODED, *(pytest.param(*case, marks=pytest.mark.gate) for case in MORE_ENCODED)],
)
def test_encoded_pools_cost_what_rounding_queries_and_weights_does(
    codec: str, scaling: str, head_dim: int, page_size: int
):
    compare_encoded(codec, scaling, head_dim, page_size)


@pytest.mark.gate
@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        "multi_head_decode",
        "llama_chunk",
        "mistral_window_decode",
        "gemma_soft_cap_chunk",
        "gpt_oss_sinks_chunk",
    ],
)
def test_encoded_pools_in_named_shapes_cost_what_rounding_does(name: str, codec: str):
    shape = dataclasses.replace(SHAPES[name], page_size=128, totals=(0, 1, 37, 300))
    scaling = "channels" if codec == "int4" else "token"
    compare_call(shape, *encode_call(shape, codec, scaling))


# Past the largest of float16; -1 in the bits of fp8_e4m3.
TOO_LARGE, MINUS_ONE = 7e4, 0xB8


def compare_large_queries(shape: Shape = DECODE, num_kernels: int = 2) -> None:
    """Of entries as large as float16 holds, and one past it, whose products are negative of all keys."""
    arguments, num_pages = encode_call(shape, "fp8_e4m3", "head")
    query, keys = (arguments.query * 1e4).astype(jnp.bfloat16), arguments.keys
    assert keys.scale is not None
    keys = dataclasses.replace(keys, data=keys.data.at[..., 5].set(MINUS_ONE), scale=keys.scale / 1e4)
    row = (-1, 0, 0)
    arguments = arguments._replace(query=query.at[*row, 5].set(TOO_LARGE), keys=keys)
    out, _ = interpret(call_of(shape, num_pages), arguments, num_kernels=num_kernels)
    expected, _ = run_reference(shape, arguments._replace(query=query), num_pages)
    assert jnp.isnan(out[row]).all(), "the result of an entry past float16 is to be NaN"
    assert_close(out.at[row].set(0), expected.at[row].set(0), 2 * output_error(shape))


def test_a_query_that_float16_does_not_hold_is_answered_with_nan():
    compare_large_queries()


def test_the_bits_of_a_byte_are_those_of_as_many_of_the_least_number():
    """Which interpreters take for zero: the kernel has it where it is compiled alone."""
    integers = np.arange(256, dtype=np.uint16)
    np.testing.assert_array_equal(integers.view(jnp.bfloat16).astype(np.float64), integers * stages.LEAST)


def encode_in_runs(shape: Shape) -> tuple[PagedArguments, int]:
    """Return the arguments with keys in runs of slots, but for those of the runs that queries lie in."""
    arguments, num_pages = make_arguments(shape)
    *pages, head_dim = arguments.keys.data.shape
    span = CODECS["int4"].span(shape.page_size)
    stored = encode_run(arguments.keys.data.reshape(*pages[:2], -1, span, head_dim))
    keys = Pages(stored.data.reshape(*pages, -1), stored.scale, stored.zero, entry="int4")
    recent = np.full((len(shape.totals), pages[1], num_runs(shape.time, span) * span, head_dim), np.nan)
    for row, (start, total) in enumerate(zip(np.asarray(arguments.starts), shape.totals, strict=True)):
        held = make_dense(shape)[1][row, start - start % span : total].swapaxes(0, 1)
        recent[row, :, : held.shape[1]] = held
    values = encode(arguments.values, "int4", "channels")
    return arguments._replace(keys=keys, values=values, recent=jnp.asarray(recent, jnp.bfloat16)), num_pages


@pytest.mark.parametrize(
    "shape",
    [
        Shape(8, 1, 128, page_size=128, time=5, totals=(0, 3, 131), window=90, soft_cap=5.0, has_sinks=True),
        pytest.param(Shape(8, 2, 64, page_size=16, time=1, totals=(0, 1, 32, 100)), marks=pytest.mark.gate),
    ],
)
def test_a_query_sees_the_keys_of_its_own_run_as_they_were_given(shape: Shape):
    assert_costs_what_rounding_does(shape, pallas_gpu)


def assert_costs_what_rounding_does(shape: Shape, kernel: ModuleType, num_kernels: int = 2) -> None:
    arguments, num_pages = encode_in_runs(shape)
    options = {**make_options(shape), "num_pages": num_pages, "tiling": TILING}
    call = jax.jit(functools.partial(kernel.paged_attention, **options))
    out, log_sum = interpret(call, arguments, num_kernels=num_kernels)
    exact, _ = run_reference(shape, make_arguments(shape)[0], num_pages)
    rounded, _ = run_reference(shape, make_arguments(shape, jnp.bfloat16)[0], num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, expected, 2 * max(relative_errors(rounded, exact)))
    assert_log_sums_close(log_sum, expected_log_sum, 1e-2)


RUN_FAULTS: dict[str, Fault] = {
    "zero points that are off": (stages, "zero * form.unit", "(zero + scale) * form.unit"),
    "halves of bytes exchanged": (stages, "(pairs & 240, 16, half + first)", "(pairs & 15, 1, half + first)"),
    "scales of the first channels": (stages, "runs == index", "runs == 0"),
    "scales of other slots": (accumulators, ".reshape(shape)[:, columns]", ".reshape(shape)[::-1, columns]"),
    "the own run's keys in the pages": (pallas_gpu, "ends = (limits - 1) & -sizes.keys.run_slots", "pass"),
    "parts that weigh the same": (pallas_gpu, "out * jnp.exp(own - shift)[..., None]", "out / 2"),
}


@pytest.mark.gate
@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_fault_among_the_runs_is_found(fault: str, monkeypatch):
    where, faulty = RUN_FAULTS[fault][0], with_fault(RUN_FAULTS[fault])
    if where is stages:
        monkeypatch.setattr(pallas_gpu, "write_numbers", faulty.write_numbers)
    elif where is accumulators:
        monkeypatch.setattr(stages, "load_of_runs", faulty.load_of_runs)
    shape = Shape(8, 1, 64, page_size=64, time=2, totals=(0, 3, 100))
    with pytest.raises(AssertionError, match="relative error"):
        assert_costs_what_rounding_does(shape, faulty if where is pallas_gpu else pallas_gpu)


@pytest.mark.parametrize("fault", [shift_mask, drop_last_page, change_scale])
def test_a_faulty_call_fails_the_comparison(fault):
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16, dead=0.0)
    out, _ = run_kernel(DECODE, fault(arguments), num_pages)
    expected, _ = run_reference(DECODE, arguments, num_pages)
    exact, _ = dense_attention(DECODE)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


def test_a_wait_that_is_left_out_is_a_race(monkeypatch):
    shape = Shape(1, 1, 64, page_size=64, time=1, totals=(60,))
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises(AssertionError, match=r"races in kernels: \[True, False\]"):
        run_kernel(shape, *make_arguments(shape, jnp.bfloat16))


def test_a_rows_bits_do_not_depend_on_the_other_rows():
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16)
    together, _ = run_kernel(DECODE, arguments, num_pages)
    alone = jnp.arange(len(DECODE.totals)) == 2
    idle = arguments._replace(lens=jnp.where(alone, arguments.lens, 0))
    out, log_sum = run_kernel(DECODE, idle, num_pages)
    np.testing.assert_array_equal(out[2], together[2])
    assert (np.asarray(out[:2]) == 0).all()
    assert (np.asarray(log_sum[:2]) == -np.inf).all()


def unname(arguments: Any, num_pages: int, row: int, columns: Sequence[int]) -> Any:
    """Name no page in columns of a row, in three ways; the layer's first page, read instead, is dead."""
    # The last page of the order that rows have theirs in is nobody's.
    free, offset = np.random.default_rng(1).permutation(num_pages)[-1], arguments.page_offset

    def exchange(array: jax.Array) -> jax.Array:
        is_of_pages = array.ndim > 1
        places = offset + jnp.array([0, free])
        return array.at[places].set(array[places[::-1]]) if is_of_pages else array

    pools = {
        name: jax.tree.map(exchange, pages)
        for name, pages in arguments._asdict().items()
        if isinstance(pages, Pages)
    }
    table = jnp.where(arguments.page_table == 0, free, arguments.page_table)
    nothing = np.resize([-1, num_pages, 2**31 - 1], len(columns))
    return arguments._replace(**pools, page_table=table.at[row, jnp.array(columns)].set(nothing))


def compare_with_holes() -> None:
    """In a block that is seen wholly but for them."""
    arguments, num_pages = make_arguments(DECODE, jnp.bfloat16)
    arguments = unname(arguments, num_pages, 2, (1, 2, 3))
    out, _ = interpret(call_of(DECODE, num_pages), arguments)
    expected, _ = run_reference(DECODE, arguments, num_pages)
    assert_close(out, expected, 2 * output_error(DECODE))


def test_what_names_no_page_of_the_layer_is_not_read():
    compare_with_holes()


def compare_long() -> None:
    call, arguments, num_pages = make_long_call(pallas_gpu)
    out, _ = interpret(call, arguments)
    assert_close(out, run_reference(LONG, arguments, num_pages)[0], 2 * output_error(LONG))


FAULTS: dict[str, tuple[Callable[[], None], Fault]] = {
    "a page of the next layer": (
        compare_with_holes,
        (blocks, "entry < self.num_pages", "entry <= self.num_pages"),
    ),
    "values of no page": (
        compare_with_holes,
        (pallas_gpu, "sizes.walk.is_whole(*held)", "sizes.walk.is_whole(block, jnp.int32(15), *held[2:])"),
    ),
    "logarithms of zero": (
        functools.partial(compare_encoded, "fp8_e4m3", "token", 64, 16),
        (stages, "1.0), _LEAST_SCALE)", "1.0), 0.0)"),
    ),
    "scales of a page's first slots": (
        functools.partial(compare_encoded, "int8", "token", 64, 128),
        (stages, "pl.ds(form.scales_of(piece.slot), num_scales)", "pl.ds(0, num_scales)"),
    ),
    "keys of the first head's scale": (
        functools.partial(compare_encoded, "int8", "head", 64, 16),
        (pallas_gpu, "pool.scale[head] * factor", "pool.scale[0] * factor"),
    ),
    "values of the first head's scale": (
        functools.partial(compare_encoded, "int8", "head", 64, 16),
        (pallas_gpu, "values_pool.scale[head]", "values_pool.scale[0]"),
    ),
    "a log-sum-exp that is off": (
        functools.partial(compare_encoded, "int8", "head", 64, 16),
        (pallas_gpu, "log_sum_of(peak, total)", "log_sum_of(peak, total) + 1"),
    ),
    "a query that is infinite": (
        compare_large_queries,
        (forms, "jnp.where(jnp.isinf(query), jnp.nan, query)", "query"),
    ),
    "a copy into another stage": (
        compare_long,
        (
            stages,
            "target = stage, pl.ds(piece.place, num_slots)",
            "target = lax.rem(jnp.int32(stage + 1), jnp.int32(3)), pl.ds(piece.place, num_slots)",
        ),
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    compare, own = FAULTS[fault]
    put_fault(own, monkeypatch)
    # Infinite factors of a product are a warning.
    found = r"relative error|is to be NaN|races in kernels|invalid value"
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=found):
        compare()


def test_what_dead_slots_hold_changes_no_bit():
    outs = [run_kernel(DECODE, *make_arguments(DECODE, jnp.bfloat16, dead=dead))[0] for dead in (np.nan, 1e4)]
    np.testing.assert_array_equal(*outs)
