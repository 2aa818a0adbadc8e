"""Page writes: each row in its slot, and nothing anywhere else."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.targets import shapes_on
from kernels_pallas import page_write

from ..machines import find_target
from ..rows import in_rows

NUM_LAYERS, NUM_PAGES, NUM_HEADS, PAGE_SIZE, HEAD_DIM = 3, 4, 2, 5, 8


def write(slots: list[list[int]], layer: int = 1, dtype=jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """Write normal rows into a pool of NaN; return the pool and what a loop over slots gives."""
    places = np.array(slots, np.int32)
    rows = jax.random.normal(jax.random.key(0), (*places.shape, NUM_HEADS, HEAD_DIM))
    pool = jnp.full((NUM_LAYERS * NUM_PAGES, NUM_HEADS, PAGE_SIZE, HEAD_DIM), jnp.nan, dtype)
    expected = np.array(pool)
    for index, place in np.ndenumerate(places):
        if place >= 0:
            page, slot = divmod(int(place), PAGE_SIZE)
            expected[layer * NUM_PAGES + page, :, slot] = rows[index].astype(dtype)
    return write_rows(pool, rows, places, layer), expected


def write_rows(pool: jax.Array, rows: jax.Array, places: np.ndarray, layer: int) -> np.ndarray:
    jitted = jax.jit(page_write.xla, static_argnames="page_size")
    return np.asarray(
        jitted(pool, rows, places, page_offset=jnp.int32(layer * NUM_PAGES), page_size=PAGE_SIZE)
    )


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("slots", [[[7]], [[0]], [[19]], [[3, 4, 5], [19, 0, 1]], [[12], [2]]], ids=str)
def test_rows_land_in_their_slots_of_their_layer_alone(slots: list[list[int]], layer: int):
    got, expected = write(slots, layer)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("slots", [[[-1]], [[-1, 6, -1], [-1, -1, -1]]], ids=str)
def test_rows_without_a_slot_are_dropped(slots: list[list[int]]):
    got, expected = write(slots)
    np.testing.assert_array_equal(got, expected)


def test_rows_are_rounded_to_the_pools_dtype():
    got, expected = write([[3, 4, 5]], dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("entry", "num_lanes"),
    [((8,), 16), ((8,), 4), ((6,), 8), ((6,), 4), ((), 4)],
    ids=["two_a_row", "two_rows_each", "padded", "padded_rows", "numbers"],
)
def test_slots_of_a_page_lie_in_columns(entry: tuple[int, ...], num_lanes: int):
    places = np.array([[3, -1, 5], [19, 0, 1]], np.int32)
    rows = np.random.default_rng(0).standard_normal((*places.shape, NUM_HEADS, *entry), np.float32)
    plain = np.full((NUM_LAYERS * NUM_PAGES, NUM_HEADS, PAGE_SIZE, *entry), 7, np.float32)
    pool = jnp.asarray(in_rows(plain, num_lanes))
    got = write_rows(pool, jnp.asarray(rows), places, layer=1)
    for index, place in np.ndenumerate(places):
        if place >= 0:
            page, slot = divmod(int(place), PAGE_SIZE)
            plain[NUM_PAGES + page, :, slot] = rows[index]
    expected = in_rows(plain, num_lanes)
    is_held = ~np.isnan(expected)
    np.testing.assert_array_equal(got[is_held], expected[is_held])


@pytest.mark.parametrize(
    ("width", "num_lanes", "page_size"), [(8, 16, 8), (8, 16, 12), (8, 8, 8), (12, 8, 8)], ids=str
)
def test_a_run_of_slots_is_its_slots(width: int, num_lanes: int, page_size: int):
    """In one column, from one into the next, and in slots of two rows."""
    random, run = np.random.default_rng(0), 4
    places = np.array([[page_size - run, -1], [2 * page_size, run]], np.int32)
    rows = random.standard_normal((*places.shape, NUM_HEADS, run, width), np.float32)
    plain = np.full((NUM_PAGES, NUM_HEADS, page_size, width), 7, np.float32)
    pool = jnp.asarray(in_rows(plain, num_lanes))
    got = page_write.xla(pool, jnp.asarray(rows), jnp.asarray(places), page_offset=0, page_size=page_size)
    for index, place in np.ndenumerate(places):
        if place >= 0:
            page, slot = divmod(int(place), page_size)
            plain[page, :, slot : slot + run] = rows[index]
    expected = in_rows(plain, num_lanes)
    is_held = ~np.isnan(expected)
    np.testing.assert_array_equal(np.asarray(got)[is_held], expected[is_held])


@pytest.mark.gpu_aot
@pytest.mark.parametrize("tokens", [(64, 1), (1, 512)], ids=["decode", "chunk"])
@pytest.mark.parametrize(
    ("dtype", "pages"),
    [
        (jnp.bfloat16, (8, 64, 128)),
        (jnp.int8, (8, 16, 128)),
        (jnp.float32, (8, 64)),
        (jnp.bfloat16, (1, 64, 512)),
    ],
    ids=["entries", "rounded", "scales", "latents"],
)
def test_a_write_is_one_kernel_of_a_gpu_in_place(
    dtype: type, pages: tuple[int, ...], tokens: tuple[int, int]
):
    """For all tokens and heads, with the places worked out inside it."""
    num_heads, page_size, *entry = pages
    pool = jax.ShapeDtypeStruct((4096, *pages), dtype)
    rows = jax.ShapeDtypeStruct((*tokens, num_heads, *entry), jnp.bfloat16)
    slots, offset = jax.ShapeDtypeStruct(tokens, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(pool: jax.Array, rows: jax.Array, slots: jax.Array, page_offset: jax.Array) -> jax.Array:
        return page_write.xla(pool, rows, slots, page_offset=page_offset, page_size=page_size)

    program = call.lower(*shapes_on(find_target("h200"), (pool, rows, slots, offset))).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    operations = re.findall(r"^ .*?= \S+ ([\w-]+)\(", text[text.index("ENTRY") :], re.MULTILINE)
    assert [name for name in operations if name not in ("parameter", "bitcast")] == ["fusion"]
    assert memory.temp_size_in_bytes == 0
    assert memory.alias_size_in_bytes == pool.size * pool.dtype.itemsize
