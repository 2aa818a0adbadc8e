"""The GPU kernel of latent attention: interpreted, with races looked for, and compiled for a GPU not here."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import latent_attention
from kernels_pallas.hopper import blocks, stages
from kernels_pallas.hopper import splits as splitting
from kernels_pallas.latent_attention import LatentArguments, UpProjections, pallas_gpu
from kernels_pallas.latent_attention.shapes import SHAPES, Shape
from kernels_pallas.paged_attention import Pages, Tiling

from ..compare import assert_close, relative_errors
from ..gpu_kernels import compile_latent, interpret
from ..machines import find_target
from .faults import Fault, put_fault
from .stripes import in_stripes
from .test_latent_attention import SCALE, lens_of, make_arguments, run
from .test_paged_attention import assert_log_sums_close, change_scale, shift_mask
from .test_paged_attention_gpu import MINUS_ONE, TOO_LARGE, encode, place_near_the_end, unname

# Two splits for the longest row; one program takes all of them.
TILING = Tiling(split_tokens=32, num_programs=1, is_interpreted=True)
DECODE = Shape(8, 128, 64, 8, 8, page_size=16, time=1, totals=(0, 1, 100))
# Two blocks of query rows, and blocks of tokens that follow one another in a split.
CHUNK = Shape(24, 128, 64, 8, 8, page_size=64, time=3, totals=(2, 180), window=140)
# Pieces of steps, each of two blocks of query rows.
PREFILL = Shape(8, 128, 64, 8, 8, page_size=32, time=40, totals=(3, 0, 100), window=50)


def call_of(shape: Shape, num_pages: int, tiling: Tiling = TILING):
    """Return the interpreted kernel for a shape."""
    options = {"num_pages": num_pages, "scale": SCALE, "window": shape.window, "tiling": tiling}
    return jax.jit(functools.partial(pallas_gpu.latent_attention, **options))


# Compiled once for all calls.
compiled = functools.cache(call_of)


def run_kernel(shape: Shape, arguments: LatentArguments, num_pages: int, tiling: Tiling = TILING):
    return interpret(compiled(shape, num_pages, tiling), arguments)


def run_reference(shape: Shape, dtype, arguments: LatentArguments | None = None):
    made, num_pages = make_arguments(shape, is_absorbed=True, dtype=dtype)
    return run(latent_attention.reference, arguments or made, num_pages, window=shape.window)


def own_error(shape: Shape, dtype) -> float:
    """Return the error of the definition over a pool in `dtype`, and queries and outputs in it."""
    return max(relative_errors(run_reference(shape, dtype)[0], run_reference(shape, jnp.float32)[0]))


def own_log_error(shape: Shape, dtype) -> float:
    """Return the same of its log-sum-exp."""
    logs = (np.asarray(run_reference(shape, each)[1]) for each in (dtype, jnp.float32))
    return max(relative_errors(*(np.where(np.isfinite(each), each, 0) for each in logs)))


@pytest.mark.parametrize(
    ("shape", "dtype", "tiling"),
    [
        (DECODE, jnp.bfloat16, TILING),
        (CHUNK, jnp.float16, Tiling(num_programs=1, is_interpreted=True)),
        (PREFILL, jnp.bfloat16, TILING),
    ],
    ids=["decode", "chunk_of_a_window", "prefill"],
)
def test_the_kernel_equals_the_definition(shape: Shape, dtype, tiling: Tiling):
    arguments, num_pages = make_arguments(shape, is_absorbed=True, dtype=dtype)
    out, log_sum = run_kernel(shape, arguments, num_pages, tiling)
    expected, expected_log_sum = run_reference(shape, jnp.float32)
    assert_close(out, expected, 2 * own_error(shape, dtype))
    is_padding = np.arange(shape.time)[None] >= lens_of(shape)[:, None]
    assert (np.asarray(out)[is_padding] == 0).all()
    assert_log_sums_close(log_sum, expected_log_sum, 2 * own_log_error(shape, dtype))


@pytest.mark.parametrize(
    "case",
    [
        # codec, scaling, page_size
        ("fp8_e4m3", "token", 16),
        ("int4", "channels", 128),
        *(
            pytest.param(case, marks=pytest.mark.gate)
            for case in [
                ("int4", "channels", 16),
                ("int8", "token", 16),
                ("int8", "token", 128),
                ("int8", "head", 32),
                ("fp8_e4m3", "token", 128),
                ("fp8_e5m2", "head", 128),
            ]
        ),
    ],
)
def test_encoded_latents_cost_what_rounding_queries_and_weights_does(case):
    compare_encoded(*case)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("name", "codec", "scaling"),
    [
        ("deepseek_chunk", "int8", "token"),
        ("deepseek_chunk", "fp8_e4m3", "token"),
        ("deepseek_decode", "int4", "channels"),
    ],
)
def test_encoded_latents_in_named_shapes_cost_what_rounding_does(name: str, codec: str, scaling: str):
    shape = dataclasses.replace(SHAPES[name], page_size=128, totals=(0, 1, 37, 300))
    compare(shape, *encoded(shape, codec, scaling))


def compare_encoded(codec: str, scaling: str, page_size: int, *, with_other_scales: bool = False) -> None:
    latent_dim = 512 if codec == "int4" else 128
    shape = dataclasses.replace(DECODE, latent_dim=latent_dim, page_size=page_size)
    arguments, num_pages = encoded(shape, codec, scaling)
    given = arguments
    if with_other_scales:
        latents = arguments.latents
        assert latents.scale is not None
        other = dataclasses.replace(latents, scale=jnp.roll(latents.scale, 1, -1) * 1.1)
        given = arguments._replace(latents=other)
    compare(shape, given, num_pages, expected=arguments)


def compare_large_queries() -> None:
    """Of entries as large as float16 holds, and two past it, whose products with all keys are negative."""
    arguments, num_pages = encoded(DECODE, "fp8_e4m3", "head")
    latents, ropes = arguments.latents, arguments.ropes.data
    assert latents.scale is not None
    latents = dataclasses.replace(
        latents, data=latents.data.at[..., 5].set(MINUS_ONE), scale=latents.scale / 1e4
    )
    given = arguments._replace(
        query=(arguments.query * 1e4).astype(jnp.bfloat16),
        rope_query=(arguments.rope_query * 1e4).astype(jnp.bfloat16),
        latents=latents,
        ropes=Pages((ropes.at[..., 5].set(-1) / 1e4).astype(jnp.float16)),
    )
    expected, _ = run_reference(DECODE, jnp.float32, given)
    given = given._replace(
        query=given.query.at[-1, 0, 0, 5].set(TOO_LARGE),
        rope_query=given.rope_query.at[-1, 0, 1, 5].set(TOO_LARGE),
    )
    out, _ = interpret(call_of(DECODE, num_pages), given)
    rows = (-1, 0, slice(0, 2))
    assert jnp.isnan(out[rows]).all(), "the result of an entry past float16 is to be NaN"
    assert_close(out.at[rows].set(0), expected.at[rows].set(0), 2 * own_error(DECODE, jnp.bfloat16))


@pytest.mark.gate
def test_a_query_that_float16_does_not_hold_is_answered_with_nan():
    compare_large_queries()


@pytest.mark.gate
@pytest.mark.parametrize(("codec", "scaling"), [("fp8_e4m3", "token"), ("int4", "channels")])
def test_other_scales_are_found(codec: str, scaling: str):
    with pytest.raises(AssertionError, match="relative error"):
        compare_encoded(codec, scaling, 16, with_other_scales=True)


def encoded(shape: Shape, codec: str, scaling: str) -> tuple[LatentArguments, int]:
    """Return arguments with latents in a codec, near the end a token of zeros, and bfloat16 beside them."""
    arguments, num_pages = make_arguments(shape, is_absorbed=True)
    page, slot = place_near_the_end(arguments, shape.totals[-1], shape.page_size)
    latents = Pages(arguments.latents.data.at[page, :, slot].set(0))
    ropes = Pages(arguments.ropes.data.astype(jnp.bfloat16))
    return arguments._replace(latents=encode(latents, codec, scaling), ropes=ropes), num_pages


def compare(
    shape: Shape,
    arguments: LatentArguments,
    num_pages: int,
    stripes: int = 1,
    expected: LatentArguments | None = None,
) -> None:
    """Compare the kernel with the definition in float32, of the same call or of another."""
    call = call_of(shape, num_pages)
    if stripes > 1:
        out, log_sum = in_stripes(lambda arguments, _: interpret(call, arguments), arguments, stripes)
    else:
        out, log_sum = interpret(call, arguments)
    right, right_log_sum = run_reference(shape, jnp.float32, expected or arguments)
    assert_close(out, right, 2 * own_error(shape, jnp.bfloat16))
    assert_log_sums_close(log_sum, right_log_sum, 2 * own_log_error(shape, jnp.bfloat16))


def compare_in_stripes() -> None:
    """Of one row a stripe has nothing."""
    shape = Shape(8, 128, 64, 8, 8, page_size=32, time=3, totals=(3, 0, 151))
    arguments, num_pages = make_arguments(shape, is_absorbed=True, dtype=jnp.bfloat16)
    compare(shape, arguments, num_pages, stripes=2)


def compare_over_a_ring() -> None:
    """The table names two pages of four; the step's last tokens are written over what its first would see."""
    shape = Shape(2, 128, 64, 8, 8, page_size=32, time=40, totals=(100,))
    arguments, num_pages = make_arguments(shape, is_absorbed=True, dtype=jnp.bfloat16, dead=0.0)
    compare(shape, arguments._replace(page_table=arguments.page_table[:, 2:4]), num_pages)


def compare_in_4_bits() -> None:
    shape = Shape(1, 512, 64, 8, 8, page_size=64, time=1, totals=(70,))
    compare(shape, *encoded(shape, "int4", "channels"))


def compare_with_holes() -> None:
    """In a block that is seen wholly but for them."""
    arguments, num_pages = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16)
    compare(DECODE, unname(arguments, num_pages, 2, (1, 2, 3)), num_pages)


def compare_plain() -> None:
    arguments, num_pages = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16)
    compare(DECODE, arguments, num_pages)


@pytest.mark.parametrize("compare_kernel", [compare_in_stripes, compare_over_a_ring, compare_with_holes])
def test_stripes_merged_rings_and_holes_equal_the_definition(compare_kernel):
    compare_kernel()


FAULTS: dict[str, tuple[Callable[[], None], Fault]] = {
    "positions of all pages": (
        compare_in_stripes,
        (pallas_gpu, "first_seen, end, stripe\n", "first_seen, end, None\n"),
    ),
    "splits of all pages": (
        compare_in_stripes,
        (pallas_gpu, "        arguments.stripe,", "        arguments.stripe and Stripe(1, 0),"),
    ),
    "pages that are written over": (
        compare_over_a_ring,
        (pallas_gpu, "held=splitting.held_of_pieces(arguments)", "held=None"),
    ),
    "pieces that begin together": (
        compare_over_a_ring,
        (splitting, "starts=(starts[:, None] + past)", "starts=(starts[:, None] + 0 * past)"),
    ),
    "bits of the first half": (compare_in_4_bits, (stages, "4 * half", "0 * half")),
    "a page of the next layer": (
        compare_with_holes,
        (blocks, "entry < self.num_pages", "entry <= self.num_pages"),
    ),
    "latents of no page": (
        compare_with_holes,
        (pallas_gpu, "sizes.walk.is_whole(*held)", "sizes.walk.is_whole(block, jnp.int32(15), *held[2:])"),
    ),
    "logarithms of zero": (
        functools.partial(compare_encoded, "fp8_e4m3", "token", 16),
        (stages, "1.0), _LEAST_SCALE)", "1.0), 0.0)"),
    ),
    "scales of a page's first slots": (
        functools.partial(compare_encoded, "int8", "token", 128),
        (
            pallas_gpu,
            "copy_scales(pool.scale.at[*source]",
            "copy_scales(pool.scale.at[piece.page, pl.ds(slot, num_slots)]",
        ),
    ),
    "a log-sum-exp that is off": (
        functools.partial(compare_encoded, "int8", "head", 32),
        (pallas_gpu, "log_sum_of(peak, total)", "log_sum_of(peak, total) + 1"),
    ),
    "rotated parts that are infinite": (
        compare_large_queries,
        (pallas_gpu, "rope_form.multiplied(rope_query)", "rope_query.astype(ropes.data.dtype)"),
    ),
    "a copy into another stage": (
        compare_plain,
        (pallas_gpu, "blocks.latents.at[stage, group, pl", "blocks.latents.at[1 - stage, group, pl"),
    ),
    "rotated parts of another stage": (
        compare_plain,
        (pallas_gpu, "blocks.ropes.at[*target]", "blocks.ropes.at[1 - stage, *target[1:]]"),
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    compare_kernel, own = FAULTS[fault]
    put_fault(own, monkeypatch)
    # Of stripes the sums of what is NaN are a warning, and products of what is infinite.
    found = r"relative error|is to be NaN|races in kernels|invalid value"
    with pytest.raises((AssertionError, RuntimeWarning, jax.errors.JaxRuntimeError), match=found):
        compare_kernel()


def drop_last_page(arguments: LatentArguments) -> LatentArguments:
    """Unname the last page of the longest row of `DECODE`."""
    return arguments._replace(page_table=arguments.page_table.at[2, 6].set(-1))


@pytest.mark.parametrize("fault", [shift_mask, drop_last_page, change_scale])
def test_a_faulty_call_fails_the_comparison(fault):
    arguments, num_pages = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16, dead=0.0)
    out, _ = run_kernel(DECODE, fault(arguments), num_pages)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, run_reference(DECODE, jnp.float32)[0], 2 * own_error(DECODE, jnp.bfloat16))


@pytest.mark.gate
def test_a_wait_that_is_left_out_is_a_race(monkeypatch):
    """Of those for copies of blocks: a barrier that is passed twice without a wait is an error of its own."""
    shape = Shape(1, 128, 64, 8, 8, page_size=64, time=1, totals=(60,))
    arguments, num_pages = make_arguments(shape, is_absorbed=True, dtype=jnp.bfloat16)
    wait = plgpu.barrier_wait
    monkeypatch.setattr(
        plgpu, "barrier_wait", lambda barrier: None if hasattr(barrier, "transforms") else wait(barrier)
    )
    with pytest.raises(AssertionError, match=r"races in kernels: \[True, False\]"):
        run_kernel(shape, arguments, num_pages)


def test_neither_other_rows_nor_dead_slots_change_a_bit():
    arguments, num_pages = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16)
    together, _ = run_kernel(DECODE, arguments, num_pages)
    large, _ = make_arguments(DECODE, is_absorbed=True, dtype=jnp.bfloat16, dead=1e4)
    alone = jnp.arange(len(DECODE.totals)) == 2
    out, log_sum = run_kernel(DECODE, large._replace(lens=jnp.where(alone, large.lens, 0)), num_pages)
    np.testing.assert_array_equal(out[2], together[2])
    assert (np.asarray(out[:2]) == 0).all()
    assert (np.asarray(log_sum[:2]) == -np.inf).all()


def make_pool(
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    dtype=jnp.bfloat16,
    rope_dtype=jnp.bfloat16,
) -> LatentArguments:
    rows = jnp.zeros(1, jnp.int32)
    latents = Pages(jnp.zeros((2, 1, page_size, latent_dim), dtype))
    ropes = Pages(jnp.zeros((2, 1, page_size, rope_dim), rope_dtype))
    query, rope_query = (jnp.zeros((1, 1, 16, dim)) for dim in (latent_dim, rope_dim))
    table = jnp.zeros((1, 2), jnp.int32)
    return LatentArguments(query, rope_query, latents, ropes, table, rows, rows, page_offset=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            make_pool()._replace(up=UpProjections(jnp.zeros((16, 8, 512)), jnp.zeros((16, 8, 512)))),
            "attends to latents as they are, got up-projections of heads; use 'xla'",
        ),
        (
            make_pool(latent_dim=256)._replace(
                latents=encode(Pages(jnp.zeros((2, 1, 64, 256))), "int4", "channels")
            ),
            "takes 4-bit latents of 512 entries, got 256; use 'xla'",
        ),
        (
            make_pool(dtype=jnp.float32),
            "takes bfloat16 and float16 without .* of tokens or heads, .* got entries of number in float32",
        ),
        (make_pool(rope_dtype=jnp.float32), "rotated parts in bfloat16 and float16, got number in float32"),
        (make_pool(latent_dim=320), "multiple of 128 entries up to 512 .* of 64, got 320 and 64; use 'xla'"),
        (make_pool(rope_dim=32), "with rotated parts of 64, got 512 and 32; use 'xla'"),
        (make_pool(page_size=8), "takes pages of 16 tokens or more, got 8; use 'xla'"),
        (make_pool(page_size=4), "takes pages of 8, 16, 32 or a multiple of 64 tokens, got 4; use 'xla'"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(arguments: LatentArguments, message: str):
    with pytest.raises(ValueError, match=message):
        pallas_gpu.latent_attention(arguments, num_pages=2, scale=1.0)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("machine", "codec", "num_heads", "page_size", "time", "window"),
    [
        ("h200", "bf16", 128, 64, 1, None),
        ("h200", "bf16", 16, 16, 4, 1024),
        ("h100", "bf16", 128, 128, 2, None),
        ("h200", "fp8_e4m3", 128, 64, 1, None),
        ("h200", "fp8_e4m3", 128, 16, 4, 1024),
        ("h100", "int8", 16, 16, 4, 1024),
        ("h200", "int4_token", 128, 64, 1, None),
        ("h100", "int4_token", 16, 16, 40, 1024),
    ],
)
def test_kernels_for_hopper_spill_nothing_and_fit(
    machine: str, codec: str, num_heads: int, page_size: int, time: int, window: int | None, tmp_path: Path
):
    """DeepSeek-V3's heads, all and those of one of eight devices; 2^31 entries a pool and more."""
    shape = Shape(num_heads, 512, 64, 128, 128, page_size, time)
    num_pages = 2**31 // (2 * page_size * 512) + 1
    reports = compile_latent(
        find_target(machine), shape, codec, num_pages=num_pages, folder=tmp_path, scale=SCALE, window=window
    )
    assert len(reports) == 2
    for name, report in reports.items():
        print(name, report[:3])
        assert report.spilled_bytes == 0
        assert report.shared_bytes <= 227 * 1024


@pytest.mark.gpu_aot
@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "int4_token"])
def test_a_kernel_over_a_stripe_spills_nothing(codec: str, tmp_path: Path):
    shape = Shape(128, 512, 64, 128, 128, page_size=16, time=4)
    options: dict[str, Any] = {"num_pages": 2**16, "is_striped": True, "scale": SCALE, "window": 1024}
    reports = compile_latent(find_target("h200"), shape, codec, folder=tmp_path, **options)
    assert [report.spilled_bytes for report in reports.values()] == [0, 0]
