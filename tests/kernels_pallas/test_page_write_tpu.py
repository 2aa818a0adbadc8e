"""The TPU kernel of page writes, interpreted: bit for bit what the scatter writes, and with faults put in."""

import functools
import importlib.util
import inspect
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.targets import shapes_on
from kernels_pallas import page_write
from kernels_pallas.page_write import pallas_tpu
from kernels_pallas.slots import page_rows

from ..machines import find_target
from .tpu_kernels import has_races, interpreted

NUM_LAYERS, NUM_PAGES, LAYER = 3, 4, 1


def make_pool(
    dtype: type, num_heads: int, page_size: int, head_dim: int | None, num_pages: int = NUM_PAGES
) -> jax.ShapeDtypeStruct:
    """Return the shape of a pool in the layout of TPUs, of numbers where there is no `head_dim`."""
    rows = -(-page_size // 128) if head_dim is None else page_rows(page_size, head_dim, 128)
    matrix = (128,) if head_dim is None and rows == 1 else (rows, 128)
    return jax.ShapeDtypeStruct((NUM_LAYERS * num_pages, num_heads, *matrix), dtype)


def make_call(
    pool: jax.ShapeDtypeStruct, slots: list[list[int]], head_dim: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a pool of any bits, NaN among them, and normal rows."""
    random, bits = np.random.default_rng(0), jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    held = random.integers(0, 2 ** (8 * bits.itemsize), pool.shape, np.uint64).astype(bits).view(pool.dtype)
    entry = () if head_dim is None else (head_dim,)
    rows = random.standard_normal((len(slots), len(slots[0]), pool.shape[1], *entry), np.float32)
    return jnp.asarray(held), jnp.asarray(50 * rows), jnp.array(slots, jnp.int32)


def write(module: ModuleType, call: tuple[jax.Array, ...], page_size: int) -> np.ndarray:
    """Write into a layer; return the pool's bits."""
    options = {"page_offset": jnp.int32(LAYER * NUM_PAGES), "page_size": page_size}
    # Traced anew: the kernel's source may have changed.
    written = interpreted(lambda: jax.jit(functools.partial(module.write_pages, **options))(*call))
    return np.asarray(written).view(f"uint{8 * written.dtype.itemsize}")


def write_by_scatter(call: tuple[jax.Array, ...], page_size: int) -> np.ndarray:
    """Return what the scatter writes of the entries' bits: XLA may quiet a NaN that it moves in bfloat16."""
    pool, rows, slots = call
    held, rows = (x.astype(pool.dtype).view(f"uint{8 * pool.dtype.itemsize}") for x in (pool, rows))
    offset = jnp.int32(LAYER * NUM_PAGES)
    return np.asarray(page_write.xla(held, rows, slots, page_offset=offset, page_size=page_size))


# The first sequence's slots go on in another page, and the second's are the last of the layer.
STEP = [[3, -1, 31, 64, 65], [-1, 127, 126, -1, -1]]
# A page and a half, which comes back to the columns and windows that it began with.
CHUNK = [list(range(17, 114))]


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim", "page_size", "slots"),
    [
        (jnp.float32, 2, 128, 32, STEP),
        (jnp.bfloat16, 2, 80, 32, STEP),
        (jnp.bfloat16, 1, 64, 64, CHUNK),
        (jnp.int8, 2, 256, 32, STEP),
        (jnp.float32, 2, None, 32, STEP),
        (jnp.float32, 2, None, 256, [[127, 128, 255, 256]]),
        # Past the pool, beside a page of it.
        (jnp.bfloat16, 1, 128, 16, [[NUM_LAYERS * NUM_PAGES * 16 + 1, 5]]),
        (jnp.bfloat16, 1, 128, 16, [[-1]]),
    ],
)
def test_the_kernel_writes_bit_for_bit_what_the_scatter_writes(
    dtype: type, num_heads: int, head_dim: int | None, page_size: int, slots: list[list[int]]
):
    """Holes, pages that are written in part, and several entries of a row: with no race among the copies."""
    call = make_call(make_pool(dtype, num_heads, page_size, head_dim), slots, head_dim)
    found = write(pallas_tpu, call, page_size)
    assert not has_races()
    np.testing.assert_array_equal(found, write_by_scatter(call, page_size))


def small_blocks(monkeypatch, module: ModuleType = pallas_tpu) -> tuple[jax.Array, ...]:
    """Return a call of two blocks, in each of which windows take turns in three buffers, and come again."""
    monkeypatch.setattr(module, "_MAX_BLOCK", 12)
    monkeypatch.setattr(module, "_MAX_WINDOWS", 3)
    slots = [[13 * i % (NUM_PAGES * 64) for i in range(24)]]
    return make_call(make_pool(jnp.bfloat16, 1, 64, 64), slots, 64)


def test_windows_take_turns_in_buffers_and_blocks(monkeypatch):
    call = small_blocks(monkeypatch)
    found = write(pallas_tpu, call, page_size=64)
    assert not has_races()
    np.testing.assert_array_equal(found, write_by_scatter(call, page_size=64))


FAULTS = {
    "a window that is not waited for": ("        bring(index).wait()", "        pass"),
    "a buffer that is still on its way back": ("take_back(later - num_buffers).wait()", "None"),
    "a block that does not wait for its last windows": ("        take_back(index).wait()", "        pass"),
    "a window that is fetched for each of its entries": (
        "jax.lax.sort((window, item, place), dimension=1, num_keys=1)",
        "(window, item, place)",
    ),
    "an entry in its neighbour's place": ("jax.lax.rem(row, sizes.share) *", "0 * row *"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str, monkeypatch):
    found, replacement = FAULTS[fault]
    source = inspect.getsource(pallas_tpu)
    assert source.count(found) == 1, f"{found!r} is to be in the source once"
    spec = importlib.util.spec_from_loader("faulty", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    exec(source.replace(found, replacement), module.__dict__)
    call = small_blocks(monkeypatch, module)
    written = write(module, call, page_size=64)
    assert has_races() or (written != write_by_scatter(call, page_size=64)).any()


@pytest.mark.parametrize(
    ("shape", "dtype", "entry", "message"),
    [
        ((8, 2, 16, 64), jnp.bfloat16, (64,), "rows of 128 lanes, got 64; use the pool layout 'tpu'"),
        ((8, 2, 16, 128), jnp.bfloat16, (8, 128), "written one by one, got runs of 8"),
        ((8, 2, 5, 128), jnp.bfloat16, (128,), "must fill words of 32 bits, got 5 rows of bfloat16"),
        ((8, 2, 128), jnp.bfloat16, (), "numbers 32, got bfloat16 in 3 axes"),
        (
            (8, 32, 144, 128),
            jnp.int8,
            (128,),
            "at most 524,288 bytes, got 589,824 for 144 rows of 32 KV heads; use pages of a multiple of 32",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_its_sizes(
    shape: tuple[int, ...], dtype: type, entry: tuple[int, ...], message: str
):
    pool, rows = jnp.zeros(shape, dtype), jnp.zeros((1, 1, shape[1], *entry), dtype)
    with pytest.raises(ValueError, match=f"page writes on TPUs cannot run: .*{message}"):
        pallas_tpu.write_pages(pool, rows, jnp.zeros((1, 1), jnp.int32), page_offset=0, page_size=16)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("tokens", "machine"), [((64, 1), "v5e"), ((1, 512), "v6e")], ids=["decode-v5e", "chunk-v6e"]
)
@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim", "page_size"),
    [
        (jnp.float32, 8, 128, 128),
        (jnp.bfloat16, 8, 128, 128),
        (jnp.bfloat16, 32, 128, 16),
        (jnp.bfloat16, 8, 64, 128),
        (jnp.bfloat16, 8, 80, 16),
        (jnp.bfloat16, 8, 256, 128),
        (jnp.bfloat16, 1, 512, 64),
        (jnp.int8, 8, 128, 128),
        (jnp.int8, 8, 128, 16),
        (jnp.float32, 8, None, 128),
        (jnp.float32, 1, None, 64),
        (jnp.float32, 8, None, 512),
    ],
)
def test_the_kernel_compiles_for_tpus_in_place(
    dtype: type, num_heads: int, head_dim: int | None, page_size: int, tokens: tuple[int, int], machine: str
):
    pool = make_pool(dtype, num_heads, page_size, head_dim, num_pages=4096)
    entry = () if head_dim is None else (head_dim,)
    rows = jax.ShapeDtypeStruct((*tokens, num_heads, *entry), dtype)
    slots, offset = jax.ShapeDtypeStruct(tokens, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(pool: jax.Array, rows: jax.Array, slots: jax.Array, page_offset: jax.Array) -> jax.Array:
        return pallas_tpu.write_pages(pool, rows, slots, page_offset=page_offset, page_size=page_size)

    program = call.lower(*shapes_on(find_target(machine), (pool, rows, slots, offset))).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**20
