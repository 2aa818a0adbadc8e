"""Loops over every form of the cache update it in place, and the check that says so catches what is not."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.cache.cache import Cache
from jkv.decode.platform import COMPILER_OPTIONS
from jkv.in_place import (
    _makers,
    added_temporaries,
    assert_programs_update_in_place,
    assert_updates_in_place,
    made_anew,
)
from jkv.targets import shapes_on

from .loops import CODECS, LARGE, LAYOUTS, SMALL, loop, make_arguments
from .machines import find_target

TPU, GPU = pytest.mark.tpu_aot, pytest.mark.gpu_aot


def check(function: Callable[..., Any], codec: str, layout: str = "dense") -> None:
    small, large = (make_arguments(codec, layout, nbytes) for nbytes in (SMALL, LARGE))
    assert_updates_in_place(function, small, large, compiler_options=COMPILER_OPTIONS["cpu"])


def check_for(machine: str, codec: str, layout: str, **sizes: int) -> None:
    """Check the loop as the compiler of a machine that is not here makes it."""
    mesh = find_target(machine)
    platform = mesh.devices.flat[0].platform
    small, large = (
        shapes_on(mesh, make_arguments(codec, layout, nbytes, platform=platform, **sizes))
        for nbytes in (SMALL, LARGE)
    )
    assert_updates_in_place(loop, small, large, max_growth=0.03 if machine == "h200" else 0.01)


@pytest.mark.gate
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_updates_every_form_of_the_cache_in_place(layout: str, codec: str):
    check(loop, codec, layout)


def covering_cases() -> list[Any]:
    """Return every codec on a TPU and on a GPU, in two layouts; TPUs, head sizes and layouts take turns."""
    tpus = [
        pytest.param(("v5e", "v6e")[j % 2], codec, LAYOUTS[j % 3], (128, 64)[j // 2 % 2], marks=TPU)
        for j, codec in enumerate(CODECS)
    ]
    gpus = [
        pytest.param("h200", codec, LAYOUTS[(j + 1) % 3], (64, 128)[j % 2], marks=GPU)
        for j, codec in enumerate(CODECS)
    ]
    return tpus + gpus


@pytest.mark.parametrize(("machine", "codec", "layout", "head_dim"), covering_cases())
def test_a_loop_for_an_accelerator_updates_the_cache_in_place(
    machine: str, codec: str, layout: str, head_dim: int
):
    check_for(machine, codec, layout, head_dim=head_dim)


@pytest.mark.parametrize(
    ("machine", "codec", "layout"),
    [
        pytest.param("v6e", "int8", "paged", marks=TPU),
        pytest.param("v6e", "bf16", "window", marks=TPU),
        pytest.param("h200", "bf16", "dense", marks=GPU),
        pytest.param("h200", "int8", "window", marks=GPU),
    ],
)
def test_a_prompt_s_chunks_are_written_in_place(machine: str, codec: str, layout: str):
    check_for(machine, codec, layout, time=64)


@TPU
@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_tpus_update_small_pages_of_one_sequence_in_place(codec: str):
    """Of such pages rows are not full, heads of 80 leave lanes of theirs, and a step writes one slot."""
    check_for("v6e", codec, "paged", page_size=16, head_dim=80, num_rows=1)


def reverse(cache: Cache, query: jax.Array) -> Cache:
    """Put the pages in another order, which no program can do in place."""
    (pool,) = cache.pools
    return cache.replace(pools=(pool.replace(keys=jax.tree.map(lambda array: array[::-1], pool.keys)),))


def drop(cache: Cache, query: jax.Array) -> jax.Array:
    """Return no cache."""
    return cache.pools[0].keys.data.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drop, r"all that is donated must be aliased, .* bytes, got 0"),
        (reverse, r"temporaries must grow by at most 0\.01 bytes for each added byte, got 0\.[3-9]"),
    ],
)
def test_what_is_not_in_place_is_said(function: Callable[..., Any], message: str):
    with pytest.raises(AssertionError, match=message):
        check(function, "bf16")


def compile_both(
    function: Callable[..., Any], mesh: Mesh | None = None, **options: Any
) -> list[jax.stages.Compiled]:
    """Compile a function of one array for two sizes of it, past what a TPU's VMEM holds."""
    shapes = [jax.ShapeDtypeStruct((rows, 384), jnp.float32) for rows in (2**17, 2**18)]
    if mesh is not None:
        shapes = shapes_on(mesh, shapes)
    return [jax.jit(function, **options).lower(shape).compile() for shape in shapes]


MAKERS: dict[str, Callable[[jax.Array], Any]] = {
    "copy": lambda x: (x.at[0].set(1), x),
    "convert": lambda x: (x, x.astype(jnp.bfloat16)),
    "transpose": lambda x: (x, x.T),
    "bitcast-convert": lambda x: (x, jax.lax.bitcast_convert_type(x, jnp.int32)),
}


@pytest.mark.gate  # Of programs as users compile them.
@pytest.mark.parametrize("operation", MAKERS)
def test_each_way_to_make_the_cache_anew_is_found(operation: str):
    found = made_anew(*compile_both(MAKERS[operation], donate_argnums=0))
    # With some CPUs' vectors XLA makes the last two as copies.
    assert any(f" {name}(" in line for line in found for name in (operation, "copy")), found


@pytest.mark.parametrize(
    "machine",
    [pytest.param("v6e", marks=TPU), pytest.param("h200", marks=GPU)],
)
def test_each_way_of_an_accelerator_to_make_the_cache_anew_is_found(machine: str):
    mesh = find_target(machine)
    ways = MAKERS | {
        "reshape": lambda x: (x, x.reshape(-1, 96)),
        "copy-start": lambda x: (x + 1, jax.device_put(x, jax.memory.Space.Host)),
    }
    for operation, function in ways.items():
        assert made_anew(*compile_both(function, mesh, donate_argnums=0)), operation


def test_what_no_program_of_the_cpu_does_is_found_too():
    """Asynchronous copies make tuples; a reshape is a copy where tiles change."""
    program = """
        %copy-start.1 = (f32[2,8]{1,0:T(2,128)S(1)}, f32[2,8]{1,0}, u32[]{:S(2)}) copy-start(%p)
        %small = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[]) copy-start(%p)
        ROOT %reshape = s4[16]{0:T(1024)(8,1)} reshape(%q), metadata={op_name="reshape"}
        %kept = f32[2,8]{1,0} add(%p, %p), metadata={op_name=" copy("}
    """
    assert [line.split()[0] for line in _makers(program, 16)] == ["%copy-start.1", "ROOT"]


def test_tiles_under_another_name_are_no_copy():
    program = """
%copy_fusion (input: u8[2,32,128]) -> u8[2,32,128] {
  %input = u8[2,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = u8[2,32,128]{2,1,0:T(8,128)(4,1)} copy(%input)
}

ENTRY %main (p: u8[2,32,128]) -> u8[2,32,128] {
  %p = u8[2,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %fusion = u8[2,32,128]{2,1,0} fusion(%p), kind=kLoop, ALIASING, calls=%copy_fusion
}
"""
    aliasing = "output_to_operand_aliasing={{}: (0, {})}"
    assert _makers(program.replace("ALIASING", aliasing), 8192) == []
    assert [line.split()[1] for line in _makers(program, 8192)] == ["%copy.1"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, unread: x.at[:, 0].set(1), None),
        (lambda x, unread: x.at[:, 0].set(1).sum(), "all that is donated must be aliased, 50,331,648 bytes"),
        (lambda x, unread: x[:, ::-1], "temporaries must grow"),
    ],
)
def test_a_device_is_asked_for_its_part_of_a_split_cache(function: Callable[..., Any], message: str | None):
    split = NamedSharding(Mesh(jax.devices()[:8], "data"), PartitionSpec("data"))
    small, large = (jax.ShapeDtypeStruct((rows, 384), jnp.float32, sharding=split) for rows in (2**17, 2**18))
    unread = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext():
        assert_updates_in_place(function, (small, unread), (large, unread))


def test_an_output_that_is_not_aliased_counts():
    assert added_temporaries(*compile_both(lambda x: (x + 1, x + 2), donate_argnums=0)) == 1


def test_a_program_that_is_donated_nothing_is_refused():
    with pytest.raises(ValueError, match="must be donated more bytes than the smaller one, got 0 and 0"):
        assert_programs_update_in_place(*compile_both(MAKERS["copy"]))
