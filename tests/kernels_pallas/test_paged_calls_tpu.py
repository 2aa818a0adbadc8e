"""What the TPU kernel of paged attention takes, and what the compiler makes of it for TPUs not here."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jkv.in_place import assert_updates_in_place
from jkv.targets import shapes_on
from kernels_pallas.paged_attention import Stripe, pallas_tpu
from kernels_pallas.paged_attention.shapes import MODELS, Shape

from ..loops import LARGE, SMALL, loop
from ..loops import make_arguments as make_loop_arguments
from ..machines import find_target
from .models import model_arguments
from .test_paged_attention import make_arguments, make_options
from .test_paged_attention_tpu import CHUNK
from .tpu_kernels import CODECS_IN_TURNS, aot_cases, assert_nothing_is_as_a_pool


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
            Shape(2, 1, 128, page_size=16, time=1),
            "int4",
            "a page of keys must be a multiple of 16 rows of 128 lanes, got 8 for 16 slots of 128 entries",
        ),
        (
            Shape(2, 1, 128, page_size=16, time=1),
            "bf16/int4",
            "scales of a page of values must fill their rows of 128 lanes, got 4 for each of 16 slots",
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


def test_a_row_of_the_page_table_that_does_not_fit_is_refused_with_its_sizes():
    arguments, _ = make_arguments(Shape(2, 1, 128, page_size=16, time=1), jnp.bfloat16)

    def refused(*dims: int) -> str | None:
        return pallas_tpu.refusal(arguments._replace(page_table=jax.ShapeDtypeStruct(dims, jnp.int32)))

    assert refused(1, 131_072) is None
    assert refused(1024, 65_536) is None
    assert "at most 262,144 bytes, got 262,148 for 65537 pages" in str(refused(1024, 65_537))


def test_queries_and_pieces_that_the_kernel_does_not_take_are_refused():
    arguments, _ = model_arguments(Shape(2, 1, 128, page_size=16, time=1), "bf16")
    query = jax.ShapeDtypeStruct(arguments.query.shape, jnp.float16)
    refused = pallas_tpu.refusal(arguments._replace(query=query))
    assert refused == "queries must be bfloat16 or float32, got float16"
    many = jax.ShapeDtypeStruct((36_000, 1, 2, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((36_000, 4), jnp.int32)
    refused = pallas_tpu.refusal(arguments._replace(query=many, page_table=table))
    assert refused is not None
    assert "at most 393,216 bytes" in refused
    assert "for 36000 rows of 1 tokens" in refused


def test_a_window_longer_than_any_sequence_is_not_counted_past_32_bits():
    arguments, num_pages = make_arguments(CHUNK)
    options = make_options(CHUNK) | {"window": 2**31 - 1, "num_pages": num_pages}
    out, _ = jax.eval_shape(functools.partial(pallas_tpu.paged_attention, **options), arguments)
    assert out.shape == arguments.query.shape


def test_a_tile_is_a_small_part_of_what_may_be_seen():
    arguments, _ = model_arguments(Shape(32, 8, 128, page_size=16, time=1, totals=(1024,)), "bf16")
    assert pallas_tpu.tiling_for(arguments, window=None).block_tokens == 512
    assert pallas_tpu.tiling_for(arguments, window=100).block_tokens == 116


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "codec", "machine"), aot_cases(MODELS, (*CODECS_IN_TURNS, "int8/int4", "int4", "int4_token"))
)
def test_the_kernel_compiles_for_tpus_within_their_memories(name: str, codec: str, machine: str):
    """Mosaic refuses what does not fit VMEM or SMEM; there is nothing beside the kernel that is as a pool."""
    mesh = find_target(machine)
    arguments, num_pages = model_arguments(MODELS[name], codec)
    options = make_options(MODELS[name])
    call = functools.partial(pallas_tpu.paged_attention, num_pages=num_pages, **options)
    program = jax.jit(call).lower(shapes_on(mesh, arguments)).compile()
    assert_nothing_is_as_a_pool(program, arguments.keys)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("machine", ["v5e", "tpu7x"])
def test_the_kernel_compiles_for_tpus_with_a_stripes_page_table_larger_than_their_smem(machine: str):
    arguments, num_pages = model_arguments(MODELS["llama3_70b_of_8"], "bf16")
    table, scalar = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((64, 8192), ()))
    arguments = arguments._replace(page_table=table, stripe=Stripe(scalar, scalar))
    call = functools.partial(pallas_tpu.paged_attention, num_pages=num_pages, scale=0.1)
    jax.jit(call).lower(shapes_on(find_target(machine), arguments)).compile()


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("machine", "codec", "layout"),
    [
        ("v5e", "bf16", "dense"),
        ("v6e", "bf16", "paged"),
        ("v6e", "f32", "window"),
        ("v5e", "int8", "window"),
        ("v6e", "int8/int4", "dense"),
        ("v6e", "int4", "dense"),
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
