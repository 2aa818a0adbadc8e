"""The TPU kernel of latent attention, interpreted: against its definition, and with faults in its source."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jkv.cache.spec import CacheGroup
from jkv.targets import shapes_on
from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments, UpProjections, pallas_tpu
from kernels_pallas.latent_attention.shapes import MODELS, Shape
from kernels_pallas.paged_attention import Tiling
from kernels_pallas.tpu import walk

from ..compare import assert_close, relative_errors
from ..machines import find_target
from .faults import put_fault
from .models import latent_arguments
from .stripes import in_stripes
from .test_latent_attention import SCALE, make_arguments, run
from .tpu_kernels import (
    CODECS_IN_TURNS,
    FAULTS,
    aot_cases,
    assert_nothing_is_as_a_pool,
    encoded_pages,
    has_races,
    interpreted,
)

# Several tiles for the longest row, and several pieces of a chunk.
TILING = Tiling(block_tokens=128, query_tokens=3)


def encoded(shape: Shape, codec_name: str) -> tuple[LatentArguments, int]:
    """Return the arguments of a bfloat16 model, of a float32 one in f32, whose pools lie as on a TPU."""
    arguments, num_pages = make_arguments(shape, is_absorbed=True)
    codecs = CacheGroup(1, 1, shape.latent_dim, codec_name, kind="latent", rope_dim=shape.rope_dim).codecs
    pools = (arguments.latents, arguments.ropes)
    latents, ropes = (encoded_pages(codec, pages) for codec, pages in zip(codecs, pools, strict=True))
    dtype = jnp.float32 if codec_name == "f32" else jnp.bfloat16
    query, rope_query = (query.astype(dtype) for query in arguments[:2])
    pools = {"latents": latents, "ropes": ropes}
    return arguments._replace(query=query, rope_query=rope_query, **pools), num_pages


def run_kernel(shape: Shape, arguments: LatentArguments, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """Run in the interpreter."""
    # Traced anew: the kernel's source may have changed.
    options = {"num_pages": num_pages, "scale": SCALE, "window": shape.window, "tiling": TILING}
    return interpreted(lambda: jax.jit(functools.partial(pallas_tpu.latent_attention, **options))(arguments))


def run_reference(shape: Shape, arguments: LatentArguments, num_pages: int) -> tuple[jax.Array, jax.Array]:
    return run(latent_attention.reference, arguments, num_pages, window=shape.window)


DECODE = Shape(8, 256, 64, 64, 64, page_size=32, time=1, totals=(0, 1, 37, 300))
CHUNK = Shape(4, 128, 64, 32, 32, page_size=64, time=7, totals=(0, 1, 37, 190), window=130)
DEEPSEEK = Shape(16, 512, 64, 128, 128, page_size=128, time=1, totals=(3, 300))
# Two of the three rows of a latent are full, and four rotated parts share one.
PADDED = Shape(4, 320, 32, 64, 64, page_size=64, time=4, totals=(0, 5, 200))
CASES = [
    (DECODE, "bf16"),
    (CHUNK, "int8"),
    *[
        pytest.param(shape, codec, marks=pytest.mark.gate)
        for shape, codec in [
            (DECODE, "f32"),
            (DECODE, "int8"),
            (DECODE, "fp8_e4m3"),
            (DECODE, "int8_static"),
            (CHUNK, "bf16"),
            (CHUNK, "fp8_e5m2"),
            (DEEPSEEK, "bf16"),
            (DEEPSEEK, "int8"),
            (PADDED, "bf16"),
            (PADDED, "int8"),
        ]
    ],
]


@pytest.mark.parametrize(("shape", "codec"), CASES)
def test_the_kernel_costs_at_most_twice_the_definitions_own_error(shape: Shape, codec: str):
    """Idle and empty rows, dead slots of NaN, partial pages, windows: with no race among the copies."""
    arguments, num_pages = encoded(shape, codec)
    latent_attention.check(arguments, num_pages=num_pages, window=shape.window)
    out, log_sum = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    query, rope_query = (query.astype(jnp.float32) for query in arguments[:2])
    wide = arguments._replace(query=query, rope_query=rope_query)
    exact, _ = run_reference(shape, wide, num_pages)
    expected, expected_log_sum = run_reference(shape, arguments, num_pages)
    assert_close(out, exact, max(1e-5, 2 * max(relative_errors(expected, exact))))
    is_seen = jnp.isfinite(expected_log_sum)
    assert (jnp.isfinite(log_sum) == is_seen).all()
    assert_close(log_sum[is_seen], expected_log_sum[is_seen], 1e-5)


@pytest.mark.gate
def test_stripes_of_pages_merged_are_the_whole():
    arguments, num_pages = encoded(DECODE, "f32")
    columns = -arguments.page_table.shape[1] % 3
    arguments = arguments._replace(page_table=jnp.pad(arguments.page_table, ((0, 0), (0, columns))))
    out, log_sum = in_stripes(lambda arguments, _: run_kernel(DECODE, arguments, num_pages), arguments, 3)
    expected, expected_log_sum = run_reference(DECODE, arguments, num_pages)
    assert_close(out, expected)
    is_seen = jnp.isfinite(expected_log_sum)
    assert_close(log_sum[is_seen], expected_log_sum[is_seen])


@pytest.mark.parametrize(
    "fault",
    [fault if "2 %" in fault else pytest.param(fault, marks=pytest.mark.gate) for fault in FAULTS],
)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    """All tiles are full: the count of another one in the same buffer would be waited for in vain."""
    shape = Shape(2, 128, 64, 32, 32, page_size=32, time=5, totals=(384, 128))
    arguments, num_pages = encoded(shape, "f32")
    put_fault(FAULTS[fault], monkeypatch)
    out, _ = run_kernel(shape, arguments, num_pages)
    whole, row = relative_errors(out, run_reference(shape, arguments, num_pages)[0])
    assert has_races() or not (whole < 1e-3 and row < 1e-3)


@pytest.mark.gate
def test_the_kernel_without_a_fault_passes_where_faults_are_found():
    shape = Shape(2, 128, 64, 32, 32, page_size=32, time=5, totals=(384, 128))
    arguments, num_pages = encoded(shape, "f32")
    out, _ = run_kernel(shape, arguments, num_pages)
    assert not has_races()
    assert_close(out, run_reference(shape, arguments, num_pages)[0])


def test_what_the_kernel_does_not_take_is_refused_with_its_sizes():
    arguments, num_pages = encoded(Shape(2, 128, 64, 32, 32, page_size=16, time=1), "bf16")
    message = "a page of rotated parts must be a multiple of 16 rows of 128 lanes, got 8 for 16 slots of 64"
    with pytest.raises(ValueError, match=f"latent attention on TPUs cannot run: {message}"):
        pallas_tpu.latent_attention(arguments, num_pages=num_pages, scale=1.0)
    up = UpProjections(jnp.zeros((2, 32, 128)), jnp.zeros((2, 32, 128)))
    refused = pallas_tpu.refusal(arguments._replace(up=up))
    assert refused == "latents must be attended to as they are, got up-projections of every head"
    refused = pallas_tpu.refusal(latent_arguments(MODELS["deepseek_v3"], "int4")[0])
    assert refused == "latents must have no zero points, got int4 entries; use int8"


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("name", "codec", "machine"), aot_cases(MODELS, CODECS_IN_TURNS))
def test_the_kernel_compiles_for_tpus_within_their_memories(name: str, codec: str, machine: str):
    """Mosaic refuses what does not fit VMEM or SMEM; there is nothing beside the kernel that is as a pool."""
    mesh = find_target(machine)
    arguments, num_pages = latent_arguments(MODELS[name], codec)
    call = functools.partial(pallas_tpu.latent_attention, num_pages=num_pages, scale=SCALE)
    assert_nothing_is_as_a_pool(jax.jit(call).lower(shapes_on(mesh, arguments)).compile(), arguments.latents)


@pytest.mark.tpu_aot
def test_pools_that_are_not_kept_in_hbm_are_found_in_vmem(monkeypatch):
    """XLA copies the scales of all pages there before the kernel begins, where there is room."""
    arguments, num_pages = latent_arguments(MODELS["deepseek_v3_of_8"], "int8")
    put_fault((walk, "pltpu.with_memory_space_constraint(array, pltpu.HBM)", "array"), monkeypatch)
    call = functools.partial(pallas_tpu.latent_attention, num_pages=num_pages, scale=SCALE)
    program = jax.jit(call).lower(shapes_on(find_target("v6e"), arguments)).compile()
    with pytest.raises(AssertionError, match=r"nothing may be made of a pool, got .*S\(1\)"):
        assert_nothing_is_as_a_pool(program, arguments.latents)
