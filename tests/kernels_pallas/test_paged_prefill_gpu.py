"""The GPU kernel of long steps: interpreted, with races looked for, and compiled for a GPU not here."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.hopper import blocks, stages
from kernels_pallas.paged_attention import PagedArguments, Pages, Tiling, pallas_gpu, pallas_gpu_prefill
from kernels_pallas.paged_attention.shapes import Shape

from ..compare import assert_close, relative_errors
from ..gpu_kernels import compile_large, compile_paged, interpret
from ..machines import find_target
from .faults import Fault, put_fault, with_fault
from .stripes import in_stripes
from .test_paged_attention import (
    assert_log_sums_close,
    change_scale,
    drop_last_page,
    make_arguments,
    make_options,
    run_reference,
    shift_mask,
)
from .test_paged_attention_gpu import (
    assert_costs_what_rounding_does,
    call_of,
    compare_call,
    compare_large_queries,
    compiled,
    encode,
    encode_call,
    output_error,
    unname,
)
from .test_paged_calls_gpu import make_pool

TILING = Tiling(is_interpreted=True)
# Two tiles of 128 rows, of which the last row of a batch fills one and a part; six blocks, four on their way.
PREFILL = Shape(4, 1, 64, page_size=32, time=40, totals=(3, 0, 100, 330))
# One warp group; five blocks.
NARROW = Shape(2, 1, 64, page_size=16, time=20, totals=(20, 7, 300))
CASES = {
    "two_warp_groups": (PREFILL, jnp.bfloat16),
    "one_warp_group": (NARROW, jnp.bfloat16),
    "one_warp_group_of_a_window": (dataclasses.replace(NARROW, window=50, has_sinks=True), jnp.bfloat16),
    "soft_cap": (
        Shape(12, 2, 80, page_size=8, time=33, totals=(33, 150), window=70, soft_cap=5.0, has_sinks=True),
        jnp.float16,
    ),
    "wide_heads": (Shape(5, 1, 256, page_size=128, time=30, totals=(0, 210), has_sinks=True), jnp.bfloat16),
}
GATE_CASES = {
    "head_96": (dataclasses.replace(PREFILL, head_dim=96, page_size=16, window=100), jnp.bfloat16),
    "head_128": (dataclasses.replace(PREFILL, head_dim=128, page_size=64, soft_cap=20.0), jnp.bfloat16),
    "head_192": (dataclasses.replace(PREFILL, head_dim=192, page_size=8), jnp.float16),
    "multi_head": (Shape(2, 2, 64, page_size=64, time=200, totals=(200, 90, 260), window=130), jnp.bfloat16),
    "many_tiles": (Shape(16, 2, 64, page_size=16, time=70, totals=(500, 20), has_sinks=True), jnp.bfloat16),
}
cases = pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.gate) for name, case in GATE_CASES.items()),
    ],
)


def run_kernel(shape: Shape, arguments: PagedArguments, num_pages: int):
    """Run a call that is to be one of the one kernel of long steps."""
    return interpret(compiled(shape, num_pages), arguments, num_kernels=1)


def run_faulty(shape: Shape, arguments: PagedArguments, num_pages: int, found: str, replacement: str):
    """Run the kernel with a fault in its source."""
    faulty = with_fault((pallas_gpu_prefill, found, replacement))
    options = {**make_options(shape), "num_pages": num_pages, "tiling": TILING}
    return interpret(jax.jit(functools.partial(faulty.attend, **options)), arguments, num_kernels=1)


def assert_equals_the_definition(shape: Shape, dtype, width: int | None = None, **where) -> None:
    arguments, num_pages = make_arguments(shape, dtype, width=width)
    exact, exact_log_sum = run_reference(shape, make_arguments(shape, width=width)[0], num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    out, log_sum = (
        run_faulty(shape, arguments, num_pages, **where) if where else run_kernel(shape, arguments, num_pages)
    )
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    is_seen = np.isfinite(exact_log_sum)
    seen = (np.where(is_seen, x, 0) for x in (expected_log_sum, exact_log_sum))
    assert_log_sums_close(log_sum, exact_log_sum, 2 * max(relative_errors(*seen)))


@cases
def test_the_kernel_equals_the_definition(shape: Shape, dtype):
    assert_equals_the_definition(shape, dtype)


FAULTS = {
    "weights not rescaled": ("total * keep", "total"),
    "values not rescaled": ("sums * wide(keep, sizes.head_dim)", "sums"),
    "tokens to come": ("ends, clear_from, clear_end)", "ends, clear_from, most)"),
    "tokens before the window": ("most - sizes.window)", "least - sizes.window)"),
    "no last block": ("-(-end_slot // BLOCK_TOKENS)", "end_slot // BLOCK_TOKENS"),
    "a block twice": ("read_table(block - lag + num_stages + 1)", "read_table(block - lag + num_stages)"),
    "sinks that weigh nothing": ("jnp.where(sinks == -jnp.inf, 0.0, 1.0)", "jnp.zeros_like(sinks)"),
    "dead values": ("zero_dead(of_values, positions(OF_ROWS) < NO_POSITION)", "pass"),
}


@pytest.mark.gate
def test_values_in_use_that_are_written_over_are_found():
    """By one warp group, which is past no block but those before."""
    with pytest.raises(AssertionError, match="races in kernels"):
        assert_equals_the_definition(
            NARROW,
            jnp.bfloat16,
            found="is_early, is_asked = lag > 0,",
            replacement="is_early, is_asked = True,",
        )


@pytest.mark.gate
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str):
    shape = dataclasses.replace(PREFILL, window=120 if "window" in fault else None, has_sinks=True)
    found, replacement = FAULTS[fault]
    with pytest.raises(AssertionError, match="relative error"):
        assert_equals_the_definition(shape, jnp.bfloat16, found=found, replacement=replacement)


WAITS = {
    "a block in use is written over": "                plgpu.barrier_wait(passed.at[place])",
    "values in use are zeroed": "            plgpu.barrier_wait(told)",
    "a query is not there": "    plgpu.barrier_wait(query_barriers.at[group])",
    "weights are not written": "        plgpu.commit_smem()\n\n        # Into",
    "converted blocks are in use": "            tell()\n        # The entries",
    "converted blocks not committed": "            plgpu.commit_smem()\n            tell()\n        logits",
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if "block in use" in fault else pytest.mark.gate) for fault in WAITS],
)
def test_a_wait_that_is_left_out_is_a_race(fault: str):
    shape, found = dataclasses.replace(PREFILL, totals=(330,)), WAITS[fault]
    arguments, num_pages = make_arguments(shape, jnp.bfloat16)
    if "converted" in fault:
        pages = (encode(Pages(each.data.astype(jnp.float32)), "int8", "head") for each in arguments[1:3])
        arguments = arguments._replace(**dict(zip(("keys", "values"), pages, strict=True)))
    indent = found[: len(found) - len(found.lstrip())]
    replacement = f"{indent}pass\n" + "".join(found.partition("\n")[1:])

    def run_some_times() -> None:
        """In an order of threads nothing may race; or one be so far ahead that the interpreter stops."""
        for _ in range(4):
            run_faulty(shape, arguments, num_pages, found, replacement)

    found_as = r"races in kernels: \[True\]|barrier is already at phase"
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=found_as):
        run_some_times()


@pytest.mark.parametrize("fault", [shift_mask, drop_last_page, change_scale])
def test_a_faulty_call_fails_the_comparison(fault):
    arguments, num_pages = make_arguments(PREFILL, jnp.bfloat16, dead=0.0)
    out, _ = run_kernel(PREFILL, fault(arguments), num_pages)
    exact, _ = run_reference(PREFILL, make_arguments(PREFILL)[0], num_pages)
    expected, _ = run_reference(PREFILL, arguments, num_pages)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


@pytest.mark.parametrize("window", [40, pytest.param(None, marks=pytest.mark.gate)])
def test_pages_written_over_are_not_seen(window: int | None):
    """More new tokens than the table has slots for: the first of them see nothing."""
    shape = Shape(4, 1, 64, page_size=16, time=80, totals=(100, 20, 300), window=window)
    assert_equals_the_definition(shape, jnp.bfloat16, width=4)


def compare_encoded(
    codec: str, scaling: str, head_dim: int, page_size: int, num_heads: int, num_kv_heads: int = 1
) -> None:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "page_size": page_size}
    shape = dataclasses.replace(PREFILL, head_dim=head_dim, window=120, **sizes)
    compare_call(shape, *encode_call(shape, codec, scaling), num_kernels=1)


@pytest.mark.parametrize(
    "case",
    [
        # codec, scaling, head_dim, page_size, query heads, KV heads
        ("int8", "token", 64, 128, 4),
        ("int4", "channels", 128, 32, 4),
        *(
            pytest.param(case, marks=pytest.mark.gate)
            for case in [
                ("int8", "head", 64, 32, 4, 2),
                ("int8", "token", 128, 32, 1),
                ("fp8_e4m3", "token", 80, 128, 4),
                ("fp8_e4m3", "token", 64, 8, 4),
                ("fp8_e5m2", "head", 96, 128, 4, 2),
                ("int4", "channels", 64, 128, 1),
            ]
        ),
    ],
)
def test_encoded_pools_cost_what_rounding_queries_and_weights_does(case):
    compare_encoded(*case)


@pytest.mark.gate
def test_a_query_that_float16_does_not_hold_is_answered_with_nan():
    compare_large_queries(NARROW, num_kernels=1)


@pytest.mark.parametrize("fault", [None, pytest.param(True, marks=pytest.mark.gate)])
def test_queries_in_float16_are_answered_in_it(fault: bool | None):
    """Which holds no sum of numbers that the bits of entries were taken for."""
    arguments, num_pages = make_arguments(NARROW)
    exact, _ = run_reference(NARROW, arguments, num_pages)
    rounded, _ = run_reference(NARROW, make_arguments(NARROW, jnp.bfloat16)[0], num_pages)
    keys, values = (encode(pages, "int8", "token") for pages in (arguments.keys, arguments.values))
    arguments = arguments._replace(query=arguments.query.astype(jnp.float16), keys=keys, values=values)
    if fault:
        out, _ = run_faulty(NARROW, arguments, num_pages, "share / sizes.values.unit", "share")
        assert not np.asarray(out).any()
        return
    out, _ = run_kernel(NARROW, arguments, num_pages)
    expected, _ = run_reference(NARROW, arguments, num_pages)
    assert out.dtype == jnp.float16
    assert_close(out, expected, 2 * max(relative_errors(rounded, exact)))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(8, 1, 64, page_size=64, time=20, totals=(0, 9, 131), window=90, soft_cap=5.0, has_sinks=True),
        pytest.param(Shape(4, 2, 128, page_size=128, time=50, totals=(33, 1, 230)), marks=pytest.mark.gate),
    ],
)
def test_a_query_sees_the_keys_of_its_own_run_as_they_were_given(shape: Shape):
    assert_costs_what_rounding_does(shape, pallas_gpu, num_kernels=1)


@pytest.mark.parametrize("fault", [None, pytest.param(True, marks=pytest.mark.gate)])
def test_stripes_of_pages_merged_are_the_whole(fault: bool | None):
    """A ring, of two stripes; of one row a stripe has nothing."""
    shape = Shape(4, 1, 64, page_size=32, time=40, totals=(3, 0, 301), has_sinks=True)
    arguments, num_pages = make_arguments(shape, jnp.bfloat16, width=8)
    options = make_options(shape) | {"num_pages": num_pages, "tiling": TILING}
    sinks, found = options.pop("sinks"), "1 if stripe is None else stripe.stride"
    kernel = with_fault((pallas_gpu_prefill, found, "1")) if fault else pallas_gpu_prefill
    call = jax.jit(functools.partial(kernel.attend, **options))

    def compute(arguments: PagedArguments, stripe: int) -> tuple[jax.Array, jax.Array]:
        # A sink is counted once.
        own = functools.partial(call, sinks=sinks - (jnp.inf if stripe else 0.0))
        return interpret(own, arguments, num_kernels=1)

    exact, _ = run_reference(shape, make_arguments(shape, width=8)[0], num_pages)
    expected, _ = run_reference(shape, arguments, num_pages)
    with pytest.raises(AssertionError) if fault else nullcontext():
        out, _ = in_stripes(compute, arguments, 2)
        assert_close(out, exact, 2 * max(relative_errors(expected, exact)))


def test_a_rows_bits_do_not_depend_on_the_other_rows():
    arguments, num_pages = make_arguments(PREFILL, jnp.bfloat16)
    together, _ = run_kernel(PREFILL, arguments, num_pages)
    alone = jnp.arange(len(PREFILL.totals)) == 2
    idle = arguments._replace(lens=jnp.where(alone, arguments.lens, 0))
    out, log_sum = run_kernel(PREFILL, idle, num_pages)
    np.testing.assert_array_equal(out[2], together[2])
    assert (np.asarray(out)[~np.asarray(alone)] == 0).all()
    assert (np.asarray(log_sum)[~np.asarray(alone)] == -np.inf).all()


def test_a_tokens_bits_do_not_depend_on_how_its_step_is_cut():
    """Of a part whose tiles begin at other tokens."""
    shape = dataclasses.replace(PREFILL, totals=(330,), window=150, has_sinks=True)
    arguments, num_pages = make_arguments(shape, jnp.bfloat16)
    whole = run_kernel(shape, arguments, num_pages)
    late = arguments._replace(
        query=arguments.query[:, 23:], starts=arguments.starts + 23, lens=arguments.lens - 23
    )
    part = run_kernel(dataclasses.replace(shape, time=17), late, num_pages)
    jax.tree.map(lambda got, all_of_it: np.testing.assert_array_equal(got, all_of_it[:, 23:]), part, whole)


@pytest.mark.parametrize("fault", [None, pytest.param("> -1", marks=pytest.mark.gate)])
def test_what_is_no_query_may_be_anything(fault: str | None):
    """Of a step that ends before its rows do, after blocks that all its queries see wholly."""
    (exact_arguments, num_pages), (arguments, _) = (
        make_arguments(PREFILL, dtype) for dtype in (jnp.float32, jnp.bfloat16)
    )
    lens = arguments.lens - jnp.array([0, 0, 20, 30], jnp.int32)
    exact_arguments, arguments = (each._replace(lens=lens) for each in (exact_arguments, arguments))
    exact, _ = run_reference(PREFILL, exact_arguments, num_pages)
    expected, _ = run_reference(PREFILL, arguments, num_pages)
    is_query = jnp.arange(PREFILL.time)[None] < arguments.lens[:, None]
    poisoned = jnp.where(is_query[..., None, None], arguments.query, jnp.nan)
    poisoned = arguments._replace(query=poisoned)
    if fault is not None:
        out, _ = run_faulty(
            PREFILL, poisoned, num_pages, "is_query = limits > 0", f"is_query = limits {fault}"
        )
        assert np.isnan(np.asarray(out)).any()
        return
    out, log_sum = run_kernel(PREFILL, poisoned, num_pages)
    assert_close(out, exact, 2 * max(relative_errors(expected, exact)))
    assert (np.asarray(log_sum)[~np.asarray(is_query)] == -np.inf).all()


def compare_with_holes() -> None:
    """In blocks that are seen wholly but for them."""
    arguments, num_pages = make_arguments(PREFILL, jnp.bfloat16)
    arguments = unname(arguments, num_pages, 3, (3, 4, 6))
    out, _ = interpret(call_of(PREFILL, num_pages), arguments, num_kernels=1)
    expected, _ = run_reference(PREFILL, arguments, num_pages)
    assert_close(out, expected, 2 * output_error(PREFILL))


def test_what_names_no_page_of_the_layer_is_not_read():
    compare_with_holes()


def compare_plain() -> None:
    arguments, num_pages = make_arguments(PREFILL, jnp.bfloat16)
    out, _ = interpret(call_of(PREFILL, num_pages), arguments, num_kernels=1)
    assert_close(out, run_reference(PREFILL, arguments, num_pages)[0], 2 * output_error(PREFILL))


compare_heads = functools.partial(compare_encoded, "int8", "head", 64, 32, 4, 2)
MORE_FAULTS: dict[str, tuple[Callable[[], None], Fault]] = {
    "a page of the next layer": (
        compare_with_holes,
        (blocks, "entry < self.num_pages", "entry <= self.num_pages"),
    ),
    "values of no page": (
        compare_with_holes,
        (
            pallas_gpu_prefill,
            "is_whole = walk.is_whole(*held)",
            "is_whole = walk.is_whole(block, jnp.int32(3), *held[2:])",
        ),
    ),
    "logarithms of zero": (
        functools.partial(compare_encoded, "fp8_e4m3", "token", 64, 32, 4),
        (stages, "1.0), _LEAST_SCALE)", "1.0), 0.0)"),
    ),
    "scales of a page's first slots": (
        functools.partial(compare_encoded, "int8", "token", 64, 128, 4),
        (stages, "pl.ds(form.scales_of(piece.slot), num_scales)", "pl.ds(0, num_scales)"),
    ),
    "keys of the first head's scale": (
        compare_heads,
        (pallas_gpu_prefill, "pool.scale[head] * factor", "pool.scale[0] * factor"),
    ),
    "values of the first head's scale": (
        compare_heads,
        (pallas_gpu_prefill, "values_pool.scale[head]", "values_pool.scale[0]"),
    ),
    "a log-sum-exp that is off": (
        compare_heads,
        (pallas_gpu_prefill, "log_sum_of(peak, total)", "log_sum_of(peak, total) + 1"),
    ),
    "a copy into another stage": (
        compare_plain,
        (
            stages,
            "target = stage, pl.ds(piece.place, num_slots)",
            "target = lax.rem(jnp.int32(stage + 1), jnp.int32(4)), pl.ds(piece.place, num_slots)",
        ),
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_a_fault_in_what_the_kernel_shares_is_found(fault: str, monkeypatch):
    compare, own = MORE_FAULTS[fault]
    put_fault(own, monkeypatch)
    with pytest.raises(AssertionError, match=r"relative error|races in kernels"):
        compare()


def test_what_dead_slots_hold_changes_no_bit():
    pools = (make_arguments(PREFILL, jnp.bfloat16, dead=dead) for dead in (np.nan, 1e4))
    outs = [run_kernel(PREFILL, *pool)[0] for pool in pools]
    np.testing.assert_array_equal(*outs)


def kernels_of(time: int, pages: Pages | None = None) -> str:
    """Return what a call of so many tokens is traced to."""
    arguments = make_pool()
    if pages is not None:
        arguments = make_pool(pages.head_dim)._replace(keys=pages, values=pages)
    query = jnp.zeros((1, time, 2, arguments.keys.head_dim), jnp.bfloat16)
    call = functools.partial(pallas_gpu.paged_attention, num_pages=2, scale=1.0)
    return str(jax.make_jaxpr(call)(arguments._replace(query=query)))


def test_long_steps_have_a_kernel_of_their_own():
    wide = Pages(jnp.zeros((2, 1, 16, 192), jnp.int8), jnp.ones(1))
    for is_long, kernels in ((False, kernels_of(16)), (True, kernels_of(17)), (False, kernels_of(17, wide))):
        assert ("jkv_paged_prefill" in kernels) == is_long
        assert ("jkv_paged_attention" in kernels) != is_long


def test_a_long_step_of_any_size_is_taken():
    """Nothing of it is partial."""

    def make() -> PagedArguments:
        query, table = jnp.zeros((64, 8192, 32, 64), jnp.bfloat16), jnp.zeros((64, 2048), jnp.int32)
        return make_pool()._replace(query=query, page_table=table)

    assert pallas_gpu.refusal(jax.eval_shape(make)) is None


AOT_CASES = [
    # machine, codec, head_dim, page_size, time, query heads of a KV head, window, soft cap
    ("h200", "bf16", 128, 64, 512, 4, None, None),
    ("h100", "bf16", 64, 16, 512, 8, 128, None),
    ("h200", "bf16", 80, 8, 20, 2, None, None),
    ("h200", "bf16", 96, 128, 64, 1, 1024, None),
    ("h200", "bf16", 192, 8, 64, 8, 1024, 50.0),
    ("h200", "bf16", 256, 8, 64, 4, 1024, 50.0),
    ("h200", "int8", 128, 64, 512, 4, None, None),
    ("h200", "int8", 128, 8, 64, 8, 1024, 50.0),
    ("h200", "fp8_e4m3", 128, 16, 64, 4, 1024, 50.0),
    ("h100", "fp8_e5m2", 80, 8, 64, 1, 1024, 50.0),
    ("h200", "int8/int4", 128, 32, 20, 2, None, None),
    ("h200", "int4_token", 128, 16, 64, 8, 1024, 50.0),
    ("h200", "int4", 128, 64, 64, 4, 1024, 50.0),
]


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("machine", "codec", "head_dim", "page_size", "time", "group", "window", "soft_cap"), AOT_CASES
)
def test_the_kernel_of_long_steps_spills_nothing_and_fits(
    machine: str,
    codec: str,
    head_dim: int,
    page_size: int,
    time: int,
    group: int,
    window,
    soft_cap,
    tmp_path: Path,
):
    """Page ids above 65,536, and 2^31 entries a pool and more."""
    sizes = head_dim, page_size, time, group
    ((name, report),) = compile_large(find_target(machine), codec, *sizes, window, soft_cap, tmp_path).items()
    print(name, report[:3])
    assert "jkv_paged_prefill" in name
    assert report.spilled_bytes == 0
    assert report.shared_bytes <= 227 * 1024


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("codec", "head_dim"), [("bf16", 256), ("int8", 128)])
def test_the_kernel_of_long_steps_over_a_stripe_spills_nothing(codec: str, head_dim: int, tmp_path: Path):
    shape = Shape(32, 8, head_dim, page_size=16, time=64, window=1024, soft_cap=50.0)
    options = {**make_options(shape), "num_pages": 2**16, "is_striped": True, "folder": tmp_path}
    (report,) = compile_paged(find_target("h200"), shape, codec, **options).values()
    assert report.spilled_bytes == 0
