"""Weights that are drawn: what a matrix is, and that a mesh has its part of the same one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jkv.layers.latent import LatentDims
from jkv.models.load import abstract_decoder, parameter_targets
from jkv.models.weights.drawn import draw_matrix, draw_parameters
from jkv.sharding import Sharding

from ...tiny import make_config


def test_a_matrix_is_noise_of_the_width_s_variance():
    first, second = (np.asarray(draw_matrix((256, 128), jnp.float32, jnp.uint32(seed))) for seed in (0, 1))
    # Of independent entries the singular values lie so (Marchenko and Pastur 1967).
    values = np.linalg.svd(first, compute_uv=False)
    np.testing.assert_allclose(values[[0, -1]], [2**0.5 + 1, 2**0.5 - 1], rtol=0.05)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / first.size**0.5


def test_a_matrix_is_made_without_memory_beside_it():
    draw = jax.jit(functools.partial(draw_matrix, (1024, 512), jnp.bfloat16))
    memory = draw.lower(jnp.uint32(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 1024 * 512 * 2
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_has_its_part_of_the_same_weights(axis_type: AxisType):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(axis_type,), devices=jax.devices()[:2])
    sharding = Sharding.create(mesh, {"mlp": "model", "vocab": "model"})
    config = make_config(has_qkv_bias=True, latent=LatentDims(8, 8, 8, 8))
    whole = draw_parameters(parameter_targets(abstract_decoder(config, param_dtype=jnp.bfloat16)))
    targets = parameter_targets(
        abstract_decoder(config, param_dtype=jnp.bfloat16, sharding=sharding), sharding
    )
    for name, array in draw_parameters(targets).items():
        assert (array.dtype, array.sharding) == (jnp.bfloat16, targets[name].sharding)
        np.testing.assert_array_equal(array, whole[name])
        entries = np.asarray(array, np.float32)
        constant = {"scale": 1, "bias": 0}.get(name.rpartition(".")[2])
        assert entries.std() > 0 if constant is None else (entries == constant).all(), name
