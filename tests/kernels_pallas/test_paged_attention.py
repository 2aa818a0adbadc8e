"""Paged attention in plain JAX against its definition, and the definition against dense attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import paged_attention
from kernels_pallas.paged_attention import PagedArguments, Pages, PageSizes, Tiling, pallas_gpu, pallas_tpu
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

from ..compare import assert_close, relative_errors
from ..rows import in_rows
from .stripes import in_stripes

NUM_LAYERS, LAYER = 3, 1
TOLERANCE = 1e-5
# Two blocks and more for the longest row of every shape.
TILING = Tiling(block_tokens=48)


def lens_of(shape: Shape) -> np.ndarray:
    return np.minimum(shape.totals, shape.time).astype(np.int32)


def make_dense(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries and each row's keys and values, `[seq, token, head, head_dim]`."""
    random = np.random.default_rng(0)
    rows, tokens = len(shape.totals), max(shape.totals)
    query = random.standard_normal((rows, shape.time, shape.num_heads, shape.head_dim), np.float32)
    return query, *random.standard_normal((2, rows, tokens, shape.num_kv_heads, shape.head_dim), np.float32)


def make_arguments(
    shape: Shape, dtype=jnp.float32, dead: float = np.nan, width: int | None = None
) -> tuple[PagedArguments, int]:
    """Scatter the rows over permuted pages of the middle layer; what nobody owns is `dead`.

    Table entries past a row's pages name no page, another row's page, or a page of another layer. A table of
    `width` columns is a ring: a row's later pages are written over its earlier ones.
    """
    query, keys, values = make_dense(shape)
    rows = len(shape.totals)
    pages_of = [-(-total // shape.page_size) for total in shape.totals]
    width = width or max(pages_of) + 3
    num_pages = sum(min(pages, width) for pages in pages_of) + 2
    order = iter(np.random.default_rng(1).permutation(num_pages))
    table = np.resize([-1, num_pages, 0, 2**31 - 1], (rows, width)).astype(np.int32)
    pools = np.full(
        (2, NUM_LAYERS * num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim), dead, np.float32
    )
    for row, total in enumerate(shape.totals):
        for logical in range(pages_of[row]):
            if logical < width:
                table[row, logical] = next(order)
            page = table[row, logical % width]
            tokens = slice(logical * shape.page_size, min((logical + 1) * shape.page_size, total))
            for pool, dense in zip(pools, (keys, values), strict=True):
                filled = dense[row, tokens].swapaxes(0, 1)
                pool[LAYER * num_pages + page, :, : filled.shape[1]] = filled
    lens = lens_of(shape)
    arrays = (query, *pools, table, shape.totals - lens, lens)
    query, key_pool, value_pool, table, starts, lens = map(jnp.asarray, arrays)
    pools = Pages(key_pool.astype(dtype)), Pages(value_pool.astype(dtype))
    offset = jnp.int32(LAYER * num_pages)
    return PagedArguments(query.astype(dtype), *pools, table, starts, lens, offset), num_pages


def make_options(shape: Shape) -> dict:
    sinks = jax.random.normal(jax.random.key(7), (shape.num_heads,)) if shape.has_sinks else None
    return {
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "soft_cap": shape.soft_cap,
        "sinks": sinks,
    }


@jax.jit(static_argnames=("implementation", "num_pages", "scale", "window", "soft_cap", "tiling"))
def run(implementation, arguments: PagedArguments, num_pages: int, **options):
    return implementation(arguments, num_pages=num_pages, **options)


def run_xla(shape: Shape, arguments: PagedArguments, num_pages: int, tiling: Tiling = TILING):
    return run(paged_attention.xla, arguments, num_pages, tiling=tiling, **make_options(shape))


def run_reference(shape: Shape, arguments: PagedArguments, num_pages: int):
    return run(paged_attention.reference, arguments, num_pages, **make_options(shape))


def dense_attention(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Compute every new token's output and log-sum-exp by itself, in float64."""
    query, keys, values = make_dense(shape)
    options, lens = make_options(shape), lens_of(shape)
    out = np.zeros(query.shape)
    log_sum = np.full(query.shape[:3], -np.inf)
    for row, step in np.argwhere(np.arange(shape.time)[None] < lens[:, None]):
        end = shape.totals[row] - lens[row] + step + 1
        first = 0 if shape.window is None else max(end - shape.window, 0)
        for head in range(shape.num_heads):
            kv_head = head * shape.num_kv_heads // shape.num_heads
            logits = keys[row, first:end, kv_head].astype(np.float64) @ query[row, step, head]
            logits = logits * options["scale"]
            if shape.soft_cap is not None:
                logits = shape.soft_cap * np.tanh(logits / shape.soft_cap)
            sink = -np.inf if options["sinks"] is None else float(options["sinks"][head])
            log_sum[row, step, head] = np.logaddexp.reduce([*logits, sink])
            weights = np.exp(logits - log_sum[row, step, head])
            out[row, step, head] = weights @ values[row, first:end, kv_head]
    return out, log_sum


def assert_log_sums_close(got, expected, tolerance: float = TOLERANCE) -> None:
    """Compare where a query sees something; elsewhere both are -inf."""
    got, expected = np.asarray(got), np.asarray(expected)
    is_seen = np.isfinite(expected)
    assert (got[~is_seen] == -np.inf).all()
    assert_close(np.where(is_seen, got, 0), np.where(is_seen, expected, 0), tolerance)


named_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@named_shapes
def test_the_definition_equals_dense_attention(shape: Shape):
    out, log_sum = run_reference(shape, *make_arguments(shape))
    expected, expected_log_sum = dense_attention(shape)
    assert_close(out, expected, TOLERANCE)
    assert_log_sums_close(log_sum, expected_log_sum)


@named_shapes
def test_xla_equals_the_definition(shape: Shape):
    arguments, num_pages = make_arguments(shape)
    out, log_sum = run_xla(shape, arguments, num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, expected, TOLERANCE)
    assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.parametrize("compute", [run_xla, run_reference])
def test_pages_written_over_are_not_seen(compute):
    shape = Shape(4, 2, 8, page_size=4, time=3, totals=(1, 14, 50), window=9)
    out, log_sum = compute(shape, *make_arguments(shape, width=5))
    expected, expected_log_sum = dense_attention(shape)
    assert_close(out, expected, TOLERANCE)
    assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.parametrize("compute", [run_xla, run_reference])
def test_without_a_window_the_latest_tokens_that_the_table_names_are_seen(compute):
    shape = Shape(4, 2, 8, page_size=4, time=1, totals=(1, 9, 14))
    out, log_sum = compute(shape, *make_arguments(shape, width=2))
    expected, expected_log_sum = dense_attention(dataclasses.replace(shape, window=8))
    assert_close(out, expected, TOLERANCE)
    assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.parametrize("implementation", [paged_attention.xla, paged_attention.reference])
@pytest.mark.parametrize(
    ("name", "width"), [("multi_query_decode", 153), ("gpt_oss_sinks_decode", 6), ("gemma_soft_cap_chunk", 9)]
)
def test_stripes_of_pages_merged_are_the_whole(implementation, name: str, width: int):
    shape = SHAPES[name]
    arguments, num_pages = make_arguments(shape, width=width)
    options = make_options(shape)
    if implementation is paged_attention.xla:
        options["tiling"] = TILING

    def compute(arguments: PagedArguments, stripe: int):
        # A sink is counted once.
        sinks = None if options["sinks"] is None else options["sinks"] - (jnp.inf if stripe else 0.0)
        return run(implementation, arguments, num_pages, **options | {"sinks": sinks})

    out, log_sum = in_stripes(compute, arguments, 3)
    expected, expected_log_sum = dense_attention(shape)
    assert_close(out, expected, TOLERANCE)
    assert_log_sums_close(log_sum, expected_log_sum)


@pytest.mark.parametrize("name", [name for name in SHAPES if "decode" in name])
def test_bfloat16_pools_cost_at_most_twice_the_definitions_own_error(name: str):
    shape = SHAPES[name]
    arguments, num_pages = make_arguments(shape, jnp.bfloat16)
    exact, _ = dense_attention(shape)
    allowed = 2 * max(relative_errors(run_reference(shape, arguments, num_pages)[0], exact))
    assert_close(run_xla(shape, arguments, num_pages)[0], exact, allowed)


@pytest.mark.parametrize("dead", [np.nan, np.inf, 1e4])
def test_what_dead_slots_hold_changes_no_bit(dead: float):
    shape = SHAPES["llama_chunk"]
    clean, num_pages = make_arguments(shape, dead=0.0)
    poisoned, _ = make_arguments(shape, dead=dead)
    for compute in (run_xla, run_reference):
        outs = [compute(shape, arguments, num_pages)[0] for arguments in (poisoned, clean)]
        np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("compute", [run_xla, run_reference])
@pytest.mark.parametrize("name", ["multi_head_chunk", "qwen_decode_group_8", "multi_query_decode"])
def test_rows_of_128_lanes_give_the_same_bits(compute, name: str):
    shape = SHAPES[name]
    arguments, num_pages = make_arguments(shape)

    def laid_out(pages: Pages) -> Pages:
        data = in_rows(np.asarray(pages.data), 128)
        return Pages(jnp.asarray(data), stated=PageSizes(shape.page_size, shape.head_dim))

    in_lanes = arguments._replace(keys=laid_out(arguments.keys), values=laid_out(arguments.values))
    paged_attention.check(in_lanes, num_pages=num_pages, window=None)
    outs = [compute(shape, each, num_pages) for each in (in_lanes, arguments)]
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.parametrize("block_tokens", [1, 10_000])
def test_the_tiling_changes_the_result_by_rounding_only(block_tokens: int):
    shape = SHAPES["gemma_soft_cap_chunk"]
    arguments, num_pages = make_arguments(shape)
    out, _ = run_xla(shape, arguments, num_pages, tiling=Tiling(block_tokens))
    assert_close(out, run_reference(shape, arguments, num_pages)[0], TOLERANCE)


@pytest.mark.parametrize("compute", [run_xla, run_reference])
def test_idle_and_empty_rows_are_zero(compute):
    shape = SHAPES["gpt_oss_sinks_chunk"]
    arguments, num_pages = make_arguments(shape)
    out, log_sum = compute(shape, arguments, num_pages)
    is_padding = np.arange(shape.time)[None] >= lens_of(shape)[:, None]
    assert (np.asarray(out)[is_padding] == 0).all()
    assert (np.asarray(log_sum)[is_padding] == -np.inf).all()


@pytest.mark.parametrize("page", [-1, 10_000])
@pytest.mark.parametrize("compute", [run_xla, run_reference])
def test_a_page_id_outside_the_layer_is_not_read(compute, page: int):
    """The row sees what is left: as if the keys of its first page were not there."""
    shape = Shape(4, 2, 8, page_size=4, time=1, totals=(6,))
    arguments, num_pages = make_arguments(shape)
    table = arguments.page_table.at[0, 0].set(page)
    out, _ = compute(shape, arguments._replace(page_table=table), num_pages)
    expected, _ = dense_attention(dataclasses.replace(shape, window=2))
    assert_close(out, expected, TOLERANCE)


def shift_mask(arguments: PagedArguments) -> PagedArguments:
    """Make each query see one token less."""
    return arguments._replace(starts=arguments.starts - 1)


def drop_last_page(arguments: PagedArguments) -> PagedArguments:
    """Unname the last page of the longest row."""
    page_size = arguments.keys.data.shape[2]
    row = jnp.argmax(arguments.starts)
    last = (arguments.starts + arguments.lens - 1)[row] // page_size
    return arguments._replace(page_table=arguments.page_table.at[row, last].set(-1))


def change_scale(arguments: PagedArguments) -> PagedArguments:
    """Make the logits 2 % larger."""
    return arguments._replace(query=arguments.query * 1.02)


@pytest.mark.parametrize("fault", [shift_mask, drop_last_page, change_scale])
@pytest.mark.parametrize("name", ["multi_head_chunk", "qwen_decode_group_8"])
def test_a_faulty_kernel_fails_the_comparison(fault, name: str):
    shape = SHAPES[name]
    arguments, num_pages = make_arguments(shape, dead=0.0)
    out, _ = run_xla(shape, fault(arguments), num_pages)
    expected, _ = run_reference(shape, arguments, num_pages)
    assert relative_errors(out, expected)[1] > 100 * TOLERANCE
    with pytest.raises(AssertionError):
        assert_close(out, expected, TOLERANCE)


def make_empty(**shapes) -> PagedArguments:
    sizes = {"query": (1, 1, 4, 8), "keys": (6, 2, 4, 8), "values": (6, 2, 4, 8)} | shapes
    rows = jnp.zeros(1, jnp.int32)
    query, keys, values = (jnp.zeros(sizes[name]) for name in ("query", "keys", "values"))
    table = jnp.zeros((1, 2), jnp.int32)
    return PagedArguments(query, Pages(keys), Pages(values), table, rows, rows, page_offset=0)


EMPTY = jnp.zeros((6, 2, 4, 128), jnp.uint8)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (Pages(EMPTY), "a pool of uint8 must have scales, got none"),
        (
            Pages(EMPTY, jnp.zeros(2), entry="int4", stated=PageSizes(32, 64)),
            r"32 slots of 32 entries in rows of 128 lanes need 8 rows .*, got 4 for each of \(6, 2\)",
        ),
        (
            Pages(EMPTY, jnp.zeros((6, 2, 2)), stated=PageSizes(4, 128, (2,))),
            r"those of 2 heads or of a page's 4 slots, .* of a page \(2,\)",
        ),
        (
            Pages(EMPTY, jnp.zeros((5, 2, 1, 128)), stated=PageSizes(4, 128, (4,))),
            r"4 slots of 1 scales in rows of 128 .* each of \(6, 2\) .*, got 1 for each of \(5, 2\)",
        ),
        (
            Pages(EMPTY, *[jnp.zeros((6, 2, 3, 128))] * 2, stated=PageSizes(4, 128, (3, 128))),
            r"4 slots and runs of channels, or of runs of slots and 128 channels, got \(3, 128\)",
        ),
    ],
)
def test_pages_that_do_not_hold_what_they_say_are_refused(pages: Pages, message: str):
    query = jnp.zeros((1, 1, 4, pages.head_dim))
    arguments = make_empty()._replace(query=query, keys=pages, values=pages)
    with pytest.raises(ValueError, match=message):
        paged_attention.check(arguments, num_pages=3, window=None)


@pytest.mark.parametrize(
    ("shapes", "window", "message"),
    [
        ({"values": (6, 2, 4, 16)}, None, r"head_dim, got \(6, 2, 4, 8\) and \(6, 2, 4, 16\)"),
        ({"query": (1, 1, 4, 16)}, None, "head_dim must equal the pool's, got 16 and 8"),
        ({"query": (1, 1, 3, 8)}, None, "multiple of KV heads, got 3 and 2"),
        ({"keys": (5, 2, 4, 8), "values": (5, 2, 4, 8)}, None, "pages a layer, got 5 and 3"),
        ({}, 0, "window must be at least 1 token, got 0"),
        (
            {"query": (0, 1, 4, 8)},
            None,
            "a column of the page table, got 0 sequences, 1 tokens and 2 columns",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(shapes: dict, window: int | None, message: str):
    with pytest.raises(ValueError, match=message):
        paged_attention.check(make_empty(**shapes), num_pages=3, window=window)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"starts": jnp.zeros(2, jnp.int32)}, r"starts must be .* of 1 sequences, got int32 of \(2,\)"),
        ({"lens": jnp.zeros(1)}, r"lens must be whole numbers .*, got float32 of \(1,\)"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, r"page_table .*, got int32 of \(3, 2\)"),
    ],
)
def test_rows_of_other_sequences_are_refused(rows: dict, message: str):
    with pytest.raises(ValueError, match=message):
        paged_attention.check(make_empty()._replace(**rows), num_pages=3, window=None)


@pytest.mark.parametrize(("num_seqs", "time", "width"), [(0, 1, 2), (1, 0, 2), (1, 1, 0)])
def test_a_call_of_nothing_is_refused(num_seqs: int, time: int, width: int):
    query, table = jnp.zeros((num_seqs, time, 4, 8)), jnp.zeros((1, width), jnp.int32)
    arguments = make_empty()._replace(query=query, page_table=table)
    message = f"got {num_seqs} sequences, {time} tokens and {width} columns"
    kernels = pallas_gpu.paged_attention, pallas_tpu.paged_attention
    for implementation in (paged_attention.xla, *kernels):
        with pytest.raises(ValueError, match=message):
            implementation(arguments, num_pages=3, scale=1.0)


@pytest.mark.parametrize(
    ("name", "number", "least"),
    [
        ("block_tokens", 0, 1),
        ("query_tokens", 0, 1),
        ("num_buffers", 1, 2),
        ("split_tokens", -1, 1),
        ("num_programs", 0, 1),
    ],
)
def test_a_tiling_of_nothing_is_refused(name: str, number: int, least: int):
    with pytest.raises(ValueError, match=f"{name} of a tiling must be at least {least}, got {number}"):
        dataclasses.replace(Tiling(), **{name: number})


def test_the_walk_follows_the_longest_live_row_and_not_the_capacity():
    """The loop's bounds are computed from lengths: the table's width is not among them."""
    shape = Shape(2, 1, 8, page_size=16, time=1, totals=(64,))
    arguments, num_pages = make_arguments(shape)
    assert count_blocks(arguments, num_pages, wide=4) == count_blocks(arguments, num_pages, wide=512) == 4


def count_blocks(arguments: PagedArguments, num_pages: int, wide: int) -> int:
    """Run with a table of `wide` pages, and count the blocks of 16 tokens that are gathered."""
    blocks = []
    table = jnp.pad(arguments.page_table[:, :4], ((0, 0), (0, wide - 4)), constant_values=-1)
    original = jnp.take_along_axis

    def counted(*positional, **named):
        jax.debug.callback(lambda: blocks.append(1))
        return original(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "take_along_axis", counted)
        out, _ = paged_attention.xla(
            arguments._replace(page_table=table), num_pages=num_pages, scale=1.0, tiling=Tiling(16)
        )
    out.block_until_ready()
    jax.effects_barrier()
    return len(blocks)
