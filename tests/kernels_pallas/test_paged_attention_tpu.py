"""The TPU kernel of paged attention, interpreted: against its definition, and with faults in its source."""

import dataclasses
import functools
import importlib
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import find_codecs
from jkv.cache.encoding import to_bfloat16
from jkv.cache.runs import num_runs
from jkv.cache.spec import CacheGroup, CacheSpec
from kernels_pallas import paged_attention
from kernels_pallas.paged_attention import PagedArguments, Tiling, pallas_tpu
from kernels_pallas.paged_attention.shapes import SHAPES, Shape
from kernels_pallas.tpu import logits, queue, runs, sizes, slot_runs, tiles, walk

from ..compare import assert_close, relative_errors
from ..poison import poison
from .faults import put_fault
from .stripes import in_stripes
from .test_paged_attention import (
    assert_log_sums_close,
    lens_of,
    make_arguments,
    make_dense,
    make_options,
    run_reference,
)
from .tpu_kernels import (
    FAULTS,
    encoded_pages,
    has_races,
    interpreted,
)

definition: Any = importlib.import_module("kernels_pallas.paged_attention.reference")
heads_of = definition.heads_of

# Several tiles for the longest row, and several pieces of a chunk.
TILING = Tiling(block_tokens=128, query_tokens=4)


def run_kernel(
    shape: Shape, arguments: PagedArguments, num_pages: int, tiling: Tiling = TILING
) -> tuple[jax.Array, jax.Array]:
    """Run in the interpreter."""
    # Traced anew: the kernel's source may have changed.
    options = make_options(shape) | {"num_pages": num_pages, "tiling": tiling}
    return interpreted(lambda: jax.jit(functools.partial(pallas_tpu.paged_attention, **options))(arguments))


def encoded(shape: Shape, codec_name: str) -> tuple[PagedArguments, int]:
    """Return the arguments of a bfloat16 model whose pools lie as on a TPU."""
    arguments, num_pages = make_arguments(shape)
    codecs = find_codecs(*codec_name.split("/"))
    keys, values = (encoded_pages(*pair) for pair in zip(codecs, arguments[1:3], strict=True))
    query = arguments.query.astype(jnp.bfloat16)
    recent = None if keys.run_slots is None else recent_keys(shape, keys.run_slots)
    return arguments._replace(query=query, keys=keys, values=values, recent=recent), num_pages


def recent_keys(shape: Shape, span: int) -> jax.Array:
    """Return each row's keys from the first of the run on that its step begins in, NaN past its last."""
    _, keys, _ = make_dense(shape)
    count = num_runs(shape.time, span) * span
    recent = np.full((len(shape.totals), count, *keys.shape[2:]), np.nan)
    for row, (total, num_new) in enumerate(zip(shape.totals, lens_of(shape), strict=True)):
        begin = (total - num_new) // span * span
        recent[row, : total - begin] = keys[row, begin:total]
    return jnp.asarray(recent, jnp.bfloat16).swapaxes(1, 2)


SHORT = Shape(2, 1, 128, page_size=64, time=3, totals=(0, 2, 97))
DECODE = Shape(8, 2, 128, page_size=128, time=1, totals=(0, 1, 37, 300))
CHUNK = Shape(4, 2, 128, page_size=32, time=7, totals=(0, 1, 37, 150), window=130, soft_cap=5.0)
HALVES = Shape(4, 2, 64, page_size=64, time=3, totals=(3, 0, 301), window=150, has_sinks=True)
PADDED = Shape(4, 1, 80, page_size=32, time=1, totals=(290, 0, 3), has_sinks=True)
WIDE = Shape(4, 2, 192, page_size=32, time=3, totals=(3, 0, 150), soft_cap=5.0)
LARGE_PAGES = Shape(4, 2, 128, page_size=256, time=1, totals=(3, 300))
# Several pieces, of which some begin in the run that the one before them ends in.
LONG = Shape(4, 2, 128, page_size=64, time=40, totals=(0, 40, 57, 230))
CASES = [
    (SHORT, "int4"),
    (CHUNK, "bf16"),
    (HALVES, "bf16"),
    *[
        pytest.param(shape, codec, marks=pytest.mark.gate)
        for shape, codec in [
            (DECODE, "int8/int4"),
            (DECODE, "int4"),
            (DECODE, "int4_token"),
            (CHUNK, "int4"),
            (CHUNK, "int4_token"),
            (HALVES, "int4"),
            (LONG, "int4/int8"),
            (PADDED, "int4"),
            (WIDE, "int4"),
            (WIDE, "int4_token"),
            (LARGE_PAGES, "int4/bf16"),
            (DECODE, "int8"),
            (DECODE, "bf16"),
            (DECODE, "f32"),
            (DECODE, "fp8_e4m3"),
            (DECODE, "fp8_e5m2"),
            (DECODE, "fp8_e4m3_static"),
            (CHUNK, "int8"),
            (CHUNK, "int8_static"),
            (HALVES, "int8"),
            (HALVES, "bf16/int4"),
            (HALVES, "fp8_e4m3"),
            (PADDED, "bf16"),
            (PADDED, "int8"),
            (LARGE_PAGES, "int8"),
            (LARGE_PAGES, "int8/int4"),
            (WIDE, "bf16"),
            (WIDE, "int8"),
            (WIDE, "int8/int4"),
        ]
    ],
]


@pytest.mark.parametrize(("shape", "codec"), CASES)
def test_the_kernel_costs_at_most_twice_the_definitions_own_error(shape: Shape, codec: str):
    """Idle and empty rows, dead slots of NaN, partial pages, windows: with no race among the copies."""
    arguments, num_pages = encoded(shape, codec)
    paged_attention.check(arguments, num_pages=num_pages, window=shape.window)
    assert_costs_little(shape, arguments, num_pages)


def assert_costs_little(shape: Shape, arguments: PagedArguments, num_pages: int) -> None:
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    exact, _ = run_reference(shape, arguments._replace(query=arguments.query.astype(jnp.float32)), num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    if arguments.recent is None:
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
        assert_log_sums_close(log_sum, expected_log_sum)
    else:
        rounded, rounded_log_sum = run_rounded(shape, arguments, num_pages)
        is_seen = np.isfinite(expected_log_sum)
        sums = [np.where(is_seen, each, 0) for each in (rounded_log_sum, expected_log_sum)]
        assert_close(out, exact, 2 * max(relative_errors(rounded, exact)))
        assert_log_sums_close(log_sum, expected_log_sum, 2 * max(relative_errors(*sums)))


def run_rounded(shape: Shape, arguments: PagedArguments, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """Run the definition on decoded heads in bfloat16, as the kernel multiplies keys in runs."""
    call = functools.partial(definition.paged_attention, num_pages=num_pages, **make_options(shape))
    with mock.patch.object(definition, "heads_of", lambda *pages: to_bfloat16(heads_of(*pages))):
        return jax.jit(call)(arguments)


def test_copies_for_the_next_step_of_the_grid_are_on_their_way_in_this_one(monkeypatch):
    """Steps of three pieces, of eight, whose tiles lie in three buffers."""
    monkeypatch.setattr(sizes, "_STEP_BYTES", 3 * CHUNK.num_heads * TILING.query_tokens * 128 * 4)
    arguments, num_pages = make_arguments(CHUNK)
    tiling = dataclasses.replace(TILING, num_buffers=3)
    out, log_sum = run_kernel(CHUNK, arguments, num_pages, tiling)
    assert not has_races()
    expected, expected_log_sum = run_reference(CHUNK, arguments, num_pages)
    assert_close(out, expected)
    assert_log_sums_close(log_sum, expected_log_sum)


def test_a_query_that_is_not_a_number_is_seen_where_keys_are_integers():
    arguments, num_pages = encoded(SHORT, "int8")
    whole = pallas_tpu.sizes_of(arguments, num_pages, window=None, tiling=TILING)
    assert whole.has_int8_product(whole.shape.keys[0])
    arguments = arguments._replace(query=arguments.query.at[2, 0, 0, 5].set(jnp.nan))
    out, _ = run_kernel(SHORT, arguments, num_pages)
    assert jnp.isnan(out[2, 0, 0]).all()
    assert jnp.isfinite(out[2, 1:]).all()


@pytest.mark.parametrize(
    ("shape", "codec", "num_chunks"),
    [
        (DECODE, "int8", 4),
        *[
            pytest.param(*case, marks=pytest.mark.gate)
            for case in [
                (HALVES, "bf16", 2),
                (DECODE, "int4", 2),
                (DECODE, "int4_token", 2),
                (WIDE, "int8/int4", 4),
            ]
        ],
    ],
)
def test_a_tile_in_several_chunks_and_turns_is_what_it_is_in_one(
    shape: Shape, codec: str, num_chunks: int, monkeypatch
):
    arguments, num_pages = encoded(shape, codec)
    tiling = dataclasses.replace(TILING, block_tokens=512)
    sums, in_turn = [], range(num_chunks)
    cases = (512, 2**14, [range(1)]), (128, 2**14, [in_turn]), (128, 1, [range(i, i + 1) for i in in_turn])
    for tokens, of_turn, turns in cases:
        monkeypatch.setattr(sizes, "_MAX_CHUNK", tokens)
        # That of 4-bit runs.
        monkeypatch.setattr(sizes, "_MAX_BLOCK", tokens)
        monkeypatch.setattr(sizes, "_MAX_TURN_LOGITS", of_turn)
        cut = pallas_tpu.sizes_of(arguments, num_pages, window=shape.window, tiling=tiling)
        assert cut.turns == turns
        sums.append(run_kernel(shape, arguments, num_pages, tiling))
        assert not has_races()
    for out, log_sum in sums[1:]:
        assert_close(out.astype(jnp.float32), sums[0][0].astype(jnp.float32), 2**-8)
        assert_log_sums_close(log_sum, sums[0][1])


@pytest.mark.gate
@pytest.mark.parametrize(
    ("codec", "fault"),
    [
        ("int8", None),
        ("int8/int4", None),
        (
            "int8",
            (
                walk,
                "jax.tree.map(lambda factor: factor[own], factors)",
                "jax.tree.map(lambda factor: factor[:batch], factors)",
            ),
        ),
        (
            "int8/int4",
            (walk, "jnp.where(is_live, factor, 0.0)[own]", "jnp.where(is_live, factor, 0.0)[:batch]"),
        ),
    ],
)
def test_heads_that_are_attended_to_after_others_have_their_own_scales(codec: str, fault, monkeypatch):
    monkeypatch.setattr(sizes, "MAX_ROWS", 8)
    arguments, num_pages = encoded(DECODE, codec)
    if fault is not None:
        put_fault(fault, monkeypatch)
    with nullcontext() if fault is None else pytest.raises(AssertionError):
        assert_costs_little(DECODE, arguments, num_pages)


@pytest.mark.gate
@pytest.mark.parametrize(
    "fault",
    [
        None,
        (walk, "pl.ds(i, 1)", "pl.ds(0, 1)"),
        (walk, "jnp.maximum(sink_ref[heads], _LOWEST)", "_LOWEST"),
    ],
)
def test_many_rows_have_their_own_log_sums_beside_a_sink_far_above_them(fault, monkeypatch):
    """160 rows of queries: log-sum-exps in two rows of lanes."""
    shape = Shape(8, 2, 128, page_size=32, time=40, totals=(0, 40, 150))
    arguments, num_pages = make_arguments(shape)
    if fault is not None:
        put_fault(fault, monkeypatch)
    tiling = dataclasses.replace(TILING, query_tokens=40)
    options = make_options(shape) | {
        "num_pages": num_pages,
        "sinks": jnp.linspace(-1.0, 2.0, 8).at[7].set(200.0),
    }
    run = functools.partial(pallas_tpu.paged_attention, **options, tiling=tiling)
    out, log_sum = interpreted(lambda: jax.jit(run)(arguments))
    expected, expected_log_sum = jax.jit(functools.partial(paged_attention.reference, **options))(arguments)
    with nullcontext() if fault is None else pytest.raises((AssertionError, RuntimeWarning)):
        assert_close(out[:, :, :7], expected[:, :, :7])
        assert (jnp.abs(out[:, :, 7]) < 1e-30).all()
        assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.gate
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_those_of_the_definition(name: str):
    """In bfloat16, with pages as large as their rows of lanes ask for."""
    shape = SHAPES[name]
    for page_size in (shape.page_size, 64, 256):
        shape = dataclasses.replace(shape, page_size=page_size)
        if (refused := pallas_tpu.refusal(encoded(shape, "bf16")[0])) is None:
            break
        assert "use larger pages" in refused
    assert_costs_little(shape, *encoded(shape, "bf16"))


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


@pytest.mark.gate
@pytest.mark.parametrize(
    "fault",
    [
        None,
        (runs, "+ MIDDLE * scale", "+ (MIDDLE + 0.1) * scale"),
        (runs, "spread.lanes[pattern]", "spread.lanes[0]"),
        (tiles, "arrays, columns = [stored.scale, stored.zero], part.runs.columns", "pass"),
    ],
)
def test_4_bit_values_of_a_row_without_one_of_its_pages_are_those_of_the_definition(fault, monkeypatch):
    shape = Shape(4, 2, 128, page_size=32, time=1, totals=(150,))
    arguments, num_pages = encoded(shape, "int8/int4")
    arguments = arguments._replace(page_table=arguments.page_table.at[0, 1].set(num_pages))
    if fault is not None:
        put_fault(fault, monkeypatch)
    with nullcontext() if fault is None else pytest.raises(AssertionError):
        assert_costs_little(shape, arguments, num_pages)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("codec", "fault"),
    [
        ("int4_token", None),
        ("int4_token", (logits, "* scale + sums[run] * shift", "* scale")),
        ("int4_token", (logits, "place * part.place_lanes + run * runs.span", "run * runs.span")),
        ("int4", (walk, "run_end - pieces.starts[piece] + 1", "run_end - pieces.starts[piece]")),
        ("int4", (tiles, "slot + span <= end", "slot < end")),
        ("int4", (slot_runs, "own < end", "own <= end")),
        ("int4", (slot_runs, "(own == position)", "(own == position + 1)")),
        ("int4", (slot_runs, "place * columns.num_rows + row", "row")),
    ],
)
def test_a_fault_in_how_4_bit_keys_are_read_is_found(codec: str, fault, monkeypatch):
    """Of the longest row, of whose runs the last has begun, the second last query is the last of its run."""
    arguments, num_pages = encoded(SHORT, codec)
    if fault is not None:
        put_fault(fault, monkeypatch)
    out, _ = run_kernel(SHORT, arguments, num_pages)
    exact, _ = run_reference(SHORT, arguments._replace(query=arguments.query.astype(jnp.float32)), num_pages)
    expected, _ = run_reference(SHORT, arguments, num_pages)
    with nullcontext() if fault is None else pytest.raises(AssertionError):
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (Shape(4, 2, 128, page_size=16, time=5, totals=(0, 3, 150), window=40), 4),
        # Of a row that begins anew in its table the first page is seen to its end, which a tile more has.
        (Shape(4, 2, 128, page_size=16, time=1, totals=(150, 200, 140)), 8),
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


@pytest.mark.parametrize(
    "fault",
    [
        None,
        pytest.param(
            ("return page * page_size", "return (page - first_page_ref[0]) * page_size"),
            marks=pytest.mark.gate,
        ),
        pytest.param(("(stride_ref[0] - 1) * page_size", "0"), marks=pytest.mark.gate),
    ],
)
def test_stripes_of_pages_merged_are_the_whole(fault, monkeypatch):
    """A ring under a window, of two stripes; of one row a stripe has nothing."""
    shape = Shape(2, 1, 128, page_size=32, time=3, totals=(3, 0, 301), window=150, has_sinks=True)
    arguments, num_pages = make_arguments(shape, width=6)
    options = make_options(shape)
    sinks = options.pop("sinks")
    if fault is not None:
        put_fault((walk, *fault), monkeypatch)
    options |= {"num_pages": num_pages, "tiling": TILING}
    kernel = jax.jit(functools.partial(pallas_tpu.paged_attention, **options))
    has_race = False

    def compute(arguments: PagedArguments, stripe: int) -> tuple[jax.Array, jax.Array]:
        nonlocal has_race
        # A sink is counted once.
        results = interpreted(lambda: kernel(arguments, sinks=sinks - (jnp.inf if stripe else 0.0)))
        has_race |= has_races()
        return results

    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    with nullcontext() if fault is None else pytest.raises((AssertionError, RuntimeWarning)):
        out, log_sum = in_stripes(compute, arguments, 2)
        assert not has_race
        assert_close(out, expected)
        assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.parametrize(
    "fault",
    [fault if "wait" in fault else pytest.param(fault, marks=pytest.mark.gate) for fault in FAULTS],
)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    """All tiles are full: the count of another one in the same buffer would be waited for in vain."""
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(384, 128))
    arguments, num_pages = make_arguments(shape)
    put_fault(FAULTS[fault], monkeypatch)
    out, _ = run_kernel(shape, arguments, num_pages)
    expected, _ = run_reference(shape, arguments, num_pages)
    whole, row = relative_errors(out, expected)
    assert has_races() or not (whole < 1e-3 and row < 1e-3)


@pytest.mark.gate
def test_the_kernel_without_a_fault_passes_where_faults_are_found():
    shape = Shape(2, 1, 128, page_size=16, time=5, totals=(384, 128))
    arguments, num_pages = make_arguments(shape)
    out, _ = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    assert_close(out, run_reference(shape, arguments, num_pages)[0])


@pytest.mark.parametrize(
    "fault",
    [
        None,
        *[
            pytest.param(fault, marks=pytest.mark.gate)
            for fault in [
                ("self._copy_rows(part, slot).wait()", "pass"),
                ("self._copy_rows(self._part_of(following)", "self._copy_rows(part + 1"),
            ]
        ],
    ],
)
def test_a_page_table_comes_in_parts_of_which_those_of_idle_rows_are_left_out(fault, monkeypatch):
    """Parts of one row; a wrong part, or one that is not waited for, shows.

    Each row names what is no page: then pages are looked at once more, and none is waited for in vain.
    """
    shape = Shape(2, 1, 128, page_size=16, time=1, totals=(150, 0, 0, 37, 20, 0, 140))
    arguments, num_pages = make_arguments(shape)
    table = arguments.page_table.at[:, 1].set(num_pages)
    arguments = arguments._replace(page_table=table)
    monkeypatch.setattr(sizes, "SMEM_BYTES", 2 * 4 * table.shape[1])
    if fault is not None:
        put_fault((queue, *fault), monkeypatch)
    out, _ = run_kernel(shape, arguments, num_pages)
    whole, row = relative_errors(out, run_reference(shape, arguments, num_pages)[0])
    assert (has_races() or not (whole < 1e-5 and row < 1e-5)) == (fault is not None)


@pytest.mark.gate
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_steps_through_the_door_are_those_of_the_definition(codec: str):
    """A prefill, then a ragged step of a decode beside a chunk."""
    spec = CacheSpec.create([CacheGroup(2, 2, 128, codec)], page_size=32, layout="tpu")

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

    found = interpreted(lambda: run_steps("pallas_tpu"))
    assert not has_races()
    expected, exact = run_steps("reference"), run_steps("reference", jnp.float32)
    for out, rounded, right in zip(found, expected, exact, strict=True):
        assert_close(out, right, 2 * max(relative_errors(rounded, right)))
