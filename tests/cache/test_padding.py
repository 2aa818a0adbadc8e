"""The padding of the layout `tpu`, beside what the TPU's own compiler gives an array."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from jkv.cache.codec import CODECS, ArraySpec

from ..machines import find_target

NUM_PAGES = 4096


def arrays() -> list[ArraySpec]:
    """Return the arrays of every codec with sizes that fill rows and that do not, each form once."""
    found = {
        array
        for codec in CODECS.values()
        for num_kv_heads, page_size, head_dim in ((2, 16, 128), (1, 8, 64), (3, 40, 80), (2, 128, 256))
        for array in codec.page_arrays(
            num_pages=NUM_PAGES,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            layout="tpu",
        ).values()
    }
    odd = {
        ArraySpec((NUM_PAGES, 2, rows, 130), dtype) for rows in (1, 3, 12) for dtype in ("float32", "int8")
    }
    return sorted(found | odd, key=lambda array: (array.dtype, array.shape))


def write(array: jax.Array) -> jax.Array:
    return array.at[0].set(jnp.ones((), array.dtype))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_padding_is_what_the_compiler_adds(name: str):
    place = NamedSharding(find_target(name), PartitionSpec())
    for array in arrays():
        in_order = Format(Layout(tuple(range(len(array.shape)))), place)
        program = jax.jit(write, in_shardings=in_order, donate_argnums=0)
        shape = jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=place)
        compiled = program.lower(shape).compile()
        taken = compiled.memory_analysis().argument_size_in_bytes
        assert taken == array.padded_bytes("tpu"), array
