"""Loops over caches of latents update them in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import PoolLayout
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.platform import COMPILER_OPTIONS
from jkv.in_place import assert_updates_in_place
from jkv.targets import shapes_on

from .loops import LARGE, SMALL
from .machines import find_target

ROWS, NUM_LAYERS, NUM_HEADS, LATENT_DIM, ROPE_DIM = 2, 2, 8, 512, 64
CODECS = ("f32", "bf16", "int8", "int4")


def make_arguments(
    codec: str, nbytes: int, *, page_size: int = 64, layout: PoolLayout = "plain"
) -> tuple[Cache, jax.ShapeDtypeStruct]:
    """Return the shapes of a loop's arguments: a cache of about `nbytes`, and the first queries."""
    group = CacheGroup(NUM_LAYERS, 1, LATENT_DIM, codec, kind="latent", rope_dim=ROPE_DIM)
    spec = CacheSpec.create([group], page_size=page_size, layout=layout)
    capacity = nbytes // (spec.padded_bytes_per_page * ROWS) * page_size
    cache = jax.eval_shape(lambda: Cache.dense(spec, num_sequences=ROWS, capacity=capacity))
    return cache, jax.ShapeDtypeStruct((ROWS, 1, NUM_HEADS, LATENT_DIM), jnp.float32)


def loop(
    cache: Cache, query: jax.Array, implementation: ops.Implementation = "auto"
) -> tuple[Cache, jax.Array]:
    """Take 32 absorbed steps of all layers; their rows depend on what was attended, as in a model."""

    def step(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, query = carry
        cache, batch = cache.begin(jnp.ones(ROWS, jnp.int32), time=1)
        for layer in range(NUM_LAYERS):
            latent, rope = query[:, :, 0], query[:, :, 1, :ROPE_DIM]
            rope_query = query[..., -ROPE_DIM:]
            rows = (query, rope_query, latent, rope)
            options = {"scale": 0.1, "implementation": implementation}
            attended = ops.attend_latent(*rows, cache, (0, layer), batch, **options)
            query, cache = attended.out, attended.cache
        return cache, query

    return jax.lax.fori_loop(0, 32, step, (cache, query))


@pytest.mark.gate
@pytest.mark.parametrize("codec", CODECS)
def test_a_loop_updates_latents_in_place(codec: str):
    small, large = (make_arguments(codec, nbytes) for nbytes in (SMALL, LARGE))
    assert_updates_in_place(loop, small, large, compiler_options=COMPILER_OPTIONS["cpu"])


@pytest.mark.gpu_aot
@pytest.mark.parametrize("codec", CODECS)
def test_a_loop_for_a_gpu_updates_latents_in_place(codec: str):
    mesh = find_target("h200")
    small, large = (shapes_on(mesh, make_arguments(codec, nbytes)) for nbytes in (SMALL, LARGE))
    assert_updates_in_place(loop, small, large, max_growth=0.03)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("machine", "codec"), [("v6e", "bf16"), ("v5e", "int8")])
def test_a_loop_over_a_tpus_kernel_updates_latents_in_place(machine: str, codec: str):
    mesh = find_target(machine)
    small, large = (shapes_on(mesh, make_arguments(codec, nbytes, layout="tpu")) for nbytes in (SMALL, LARGE))
    assert_updates_in_place(functools.partial(loop, implementation="pallas_tpu"), small, large)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_a_loop_over_a_gpus_kernel_updates_latents_in_place(codec: str):
    mesh = find_target("h200")
    small, large = (shapes_on(mesh, make_arguments(codec, nbytes)) for nbytes in (SMALL, LARGE))
    own = functools.partial(loop, implementation="pallas_gpu")
    assert_updates_in_place(own, small, large, max_growth=0.03)
