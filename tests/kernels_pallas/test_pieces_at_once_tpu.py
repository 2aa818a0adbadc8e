"""The TPU kernels where each piece has one tile, so that several are attended to at once, interpreted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import PagedArguments, pallas_tpu
from kernels_pallas.paged_attention.shapes import Shape
from kernels_pallas.tpu import logits, queue, sizes, walk

from ..compare import assert_close, relative_errors
from .faults import Fault, put_fault
from .test_paged_attention import assert_log_sums_close, make_arguments, run_reference
from .test_paged_attention_tpu import TILING as SHORT_TILING
from .test_paged_attention_tpu import encoded, run_kernel
from .tpu_kernels import FAULTS, has_races

# Tiles have room for a short table's pages and for one more, which a row that begins anew in it sees.
TILING = dataclasses.replace(SHORT_TILING, block_tokens=256)
# Seven pieces, four at once, the last of them beside one that is none: rows that are idle or shorter than a
# window, and ones whose window begins inside a page.
WINDOW = Shape(8, 2, 64, page_size=32, time=1, totals=(0, 1, 37, 300, 90, 0, 64), window=60, has_sinks=True)
# Of a chunk in pieces of four tokens.
CHUNK = Shape(4, 2, 128, page_size=32, time=7, totals=(0, 5, 7, 150), window=60, soft_cap=5.0)
SHORT = Shape(8, 1, 128, page_size=64, time=1, totals=(0, 100, 1, 128, 64))
MANY_HEADS = Shape(8, 4, 128, page_size=64, time=1, totals=(100, 0, 33))
CASES = [
    (WINDOW, "bf16", 4),
    (SHORT, "int8", 4),
    *[
        pytest.param(*case, marks=pytest.mark.gate)
        for case in [
            (CHUNK, "bf16", 4),
            (WINDOW, "int8", 4),
            (WINDOW, "fp8_e4m3", 4),
            (dataclasses.replace(WINDOW, page_size=64), "int4", 4),
            (SHORT, "bf16", 4),
            (SHORT, "f32", 4),
            (SHORT, "int4", 4),
            (SHORT, "int4_token", 4),
            (SHORT, "int8/int4", 4),
            (MANY_HEADS, "bf16", 2),
            (MANY_HEADS, "int8_static", 2),
        ]
    ],
]


def make_call(shape: Shape, codec: str = "f32") -> tuple[PagedArguments, int]:
    """Return a call whose page table is as wide as its longest row."""
    arguments, num_pages = encoded(shape, codec) if codec != "f32" else make_arguments(shape)
    width = -(-max(shape.totals) // shape.page_size)
    return arguments._replace(page_table=arguments.page_table[:, :width]), num_pages


def assert_as_the_definition(shape: Shape, arguments: PagedArguments, num_pages: int) -> None:
    """Assert that the kernel's error is at most twice the definition's own, and that it has no race."""
    out, log_sum = run_kernel(shape, arguments, num_pages, TILING)
    assert not has_races()
    exact, _ = run_reference(shape, arguments._replace(query=arguments.query.astype(jnp.float32)), num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, exact, 2 * max(1e-5, *relative_errors(expected, exact)))
    if arguments.recent is None:
        assert_log_sums_close(log_sum, expected_log_sum)
    else:
        assert (np.isfinite(log_sum) == np.isfinite(expected_log_sum)).all()


def pieces_at_once(shape: Shape, arguments: PagedArguments, num_pages: int) -> int:
    return pallas_tpu.sizes_of(arguments, num_pages, window=shape.window, tiling=TILING).pieces_at_once


@pytest.mark.parametrize(("shape", "codec", "count"), CASES)
def test_pieces_that_are_attended_to_at_once_are_as_they_are_alone(shape: Shape, codec: str, count: int):
    """Idle rows and pieces that are none have tiles of nothing; dead slots are NaN."""
    arguments, num_pages = make_call(shape, codec)
    assert pieces_at_once(shape, arguments, num_pages) == count
    assert_as_the_definition(shape, arguments, num_pages)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_rows_that_begin_anew_in_their_table_see_its_first_page_to_the_end(width: int):
    """Of a table as wide as a window or narrower, and of one that is a tile: there a page more is seen."""
    shape = dataclasses.replace(WINDOW, head_dim=128, page_size=64, window=None if width == 3 else 60)
    arguments, num_pages = make_arguments(shape, width=width)
    assert pieces_at_once(shape, arguments, num_pages) == 4
    assert_as_the_definition(shape, arguments, num_pages)


def test_rows_that_see_a_page_more_than_a_tile_has_are_not_attended_to_with_others():
    shape = Shape(2, 1, 128, page_size=64, time=1, totals=(300, 500, 10))
    arguments, num_pages = make_arguments(shape, width=4)
    assert pieces_at_once(shape, arguments, num_pages) == 1
    assert_as_the_definition(shape, arguments, num_pages)


def test_one_row_alone_and_rows_of_several_tiles_are_not_attended_to_with_others():
    for shape in (
        dataclasses.replace(SHORT, totals=(100,)),
        dataclasses.replace(SHORT, totals=(257, 100)),
        dataclasses.replace(WINDOW, window=300),
    ):
        assert pieces_at_once(shape, *make_call(shape)) == 1


def test_a_page_table_in_parts_has_no_pieces_at_once(monkeypatch):
    arguments, num_pages = make_call(SHORT)
    monkeypatch.setattr(sizes, "SMEM_BYTES", 2 * 4 * arguments.page_table.shape[1])
    assert pieces_at_once(SHORT, arguments, num_pages) == 1


def with_holes(shape: Shape) -> tuple[PagedArguments, int]:
    """Return a call of rows of which two, of one group, do not have two and one of their pages."""
    arguments, num_pages = make_call(shape)
    table = arguments.page_table.at[1, 1::3].set(num_pages).at[3, 0].set(-1)
    return arguments._replace(page_table=table), num_pages


@pytest.mark.parametrize(
    "fault",
    [
        None,
        *[
            pytest.param(fault, marks=pytest.mark.gate)
            for fault in [
                # The first of the rows has the second's holes, or these are there for the next group.
                (walk, "tokens_ref[member] = jnp.where(", "tokens_ref[0] = jnp.where("),
                (queue, "member * self.sizes.block_pages + page - row.begin", "page - row.begin"),
                (walk, "jax.lax.fori_loop(0, holes_ref[buffer], hide_page, 0)", "hide_page(0, 0)"),
                (walk, "pl.when(has_holes)(show_all)", "pass"),
                (queue, "array[buffer, place] = jnp.zeros(", "_ = jnp.zeros("),
            ]
        ],
    ],
)
def test_rows_without_one_of_their_pages_beside_others_are_as_the_definition(
    fault: Fault | None, monkeypatch
):
    shape = dataclasses.replace(SHORT, page_size=16, totals=(128, 100, 90, 128, 64, 128, 80, 128))
    arguments, num_pages = with_holes(shape)
    assert pieces_at_once(shape, arguments, num_pages) == 8
    monkeypatch.setattr(sizes, "_MAX_TOKENS_AT_ONCE", 1024)
    assert pieces_at_once(shape, arguments, num_pages) == 4
    if fault is None:
        assert_as_the_definition(shape, arguments, num_pages)
    else:
        put_fault(fault, monkeypatch)
        with pytest.raises((AssertionError, RuntimeWarning)):
            assert_as_the_definition(shape, arguments, num_pages)


OF_GROUPS: dict[str, Fault] = {
    "pieces of another step": (
        walk,
        "(first + i, pl.program_id(0) * sizes.pieces_per_step + first + i)",
        "(first + i, first + i)",
    ),
    "sums of another piece": (walk, "end_piece(*pair, own)", "end_piece(*pair, sums[0])"),
    "pages of another piece": (walk, "first_chunk = member *", "first_chunk = 0 *"),
    "a sink left out": (walk, "total += sink_total(heads, peak)", "pass"),
    "heads of a pair swapped": (
        logits,
        "[left[:, 0], nothing], [nothing, left[:, 1]]",
        "[nothing, left[:, 0]], [left[:, 1], nothing]",
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("fault", [*FAULTS, *OF_GROUPS])
def test_a_fault_where_pieces_are_attended_to_at_once_is_found(fault: str, monkeypatch):
    """All tiles are full, in three turns: the count of another one would be waited for in vain."""
    shape = Shape(4, 2, 128, page_size=16, time=1, totals=tuple(range(241, 253)), has_sinks=True)
    monkeypatch.setattr(sizes, "_MAX_CHUNK", 128)
    monkeypatch.setattr(sizes, "_MAX_TURN_LOGITS", 1)
    # Steps of the grid of a group each.
    monkeypatch.setattr(sizes, "_STEP_BYTES", 1)
    arguments, num_pages = make_call(shape)
    tiling = dataclasses.replace(TILING, block_tokens=384)
    cut = pallas_tpu.sizes_of(arguments, num_pages, window=None, tiling=tiling)
    assert (cut.pieces_at_once, cut.pieces_per_step, len(cut.turns)) == (4, 4, 3)
    put_fault({**FAULTS, **OF_GROUPS}[fault], monkeypatch)
    out, _ = run_kernel(shape, arguments, num_pages, tiling)
    whole, row = relative_errors(out, run_reference(shape, arguments, num_pages)[0])
    assert has_races() or not (whole < 1e-3 and row < 1e-3)
