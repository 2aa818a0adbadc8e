"""The gated MLP against its equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jkv.collectives import assert_collectives
from jkv.layers.mlp import GatedMLP
from jkv.models.load import parameter_targets, set_parameters
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


def test_tokens_travel_to_a_width_that_is_split_as_sequences_are():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = Sharding.create(mesh, {"seq": "data", "page": "data", "mlp": "data"})
    single, sharded = (
        GatedMLP(12, 20, has_bias=True, sharding=each, rngs=nnx.Rngs(0)) for each in (None, sharding)
    )
    biases = {"gate_proj.bias": jnp.arange(20.0), "down_proj.bias": jnp.arange(12.0)}
    for mlp in (single, sharded):
        state = {".".join(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(mlp, nnx.Param))}
        set_parameters(mlp, state | biases)
    targets = parameter_targets(sharded, sharding)
    set_parameters(
        sharded, {name: jax.device_put((state | biases)[name], targets[name].sharding) for name in targets}
    )
    x = jax.random.normal(jax.random.key(1), (8, 3, 12))
    placed = jax.device_put(x, sharding.named("seq", None, None))
    program = jax.jit(sharded).lower(placed).compile()
    assert_close(program(placed), single(x))
    assert_collectives(program, {"all-gather": (1, x.nbytes), "reduce-scatter": (1, x.nbytes)})
