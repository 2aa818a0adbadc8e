"""The gated MLP against its equation."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jkv.layers.mlp import GatedMLP
from jkv.sharding import Sharding

from ..compare import assert_close


def test_the_gate_passes_through_silu_and_multiplies_the_rest():
    mlp = GatedMLP(12, 20, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 12))
    gate, up, down = (
        np.asarray(linear.weight[...], np.float64).T for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    wide = np.asarray(x, np.float64)
    gated = wide @ gate / (1 + np.exp(-(wide @ gate)))
    assert_close(mlp(x), (gated * (wide @ up)) @ down)


def test_a_width_that_the_mesh_does_not_divide_is_refused():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="'mlp' has 21 entries, which 2 shards"):
        GatedMLP(12, 21, sharding=Sharding.create(mesh, {"mlp": "model"}), rngs=nnx.Rngs(0))
