"""Weights that are drawn instead of read, so that a model of a real size runs without its files.

Knows names and shapes of parameters; no layer.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32

from jkv.models.weights.load import placed

# What is no matrix; biases, sinks and corrections that change nothing.
_FILLED = {"scale": 1, "bias": 0, "sinks": 0, "correction": 0}


def draw_parameters(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Make each parameter where it lives, in its own dtype; the same whatever the mesh.

    Entries of matrices are uniform with a variance of one over their last axis, so that activations neither
    vanish nor overflow.

    Args:
        targets: shape, dtype and sharding of each parameter, by its dotted path.
    """
    wanted = {name: placed(target) for name, target in targets.items()}
    # Layers are alike: one program for each shape and placement.
    programs = {
        target: jax.jit(
            functools.partial(draw_matrix, target.shape, target.dtype), out_shardings=target.sharding
        )
        for target in set(wanted.values())
    }
    parameters = {}
    for number, (name, target) in enumerate(wanted.items()):
        filled = _FILLED.get(name.rpartition(".")[2])
        if filled is None:
            parameters[name] = programs[target](jnp.uint32(number))
        else:
            parameters[name] = jnp.full(target.shape, filled, target.dtype, device=target.sharding)
    return parameters


def draw_matrix(shape: tuple[int, ...], dtype: DTypeLike, number: UInt32[Array, ""]) -> jax.Array:
    """Return a matrix, or several in one array, of which each number names another; see `draw_parameters`."""
    # A hash of each entry's place is one loop without a temporary. jax.random's default generator takes eight
    # times the bytes of a bfloat16 array beside it on a CPU, and the bits of its others differ by platform.
    bits = _scramble(number)
    for axis in range(len(shape)):
        bits = _scramble(bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
    # The 24 bits that a float32 in [0, 1) holds.
    uniform = (bits >> 8).astype(jnp.float32) * 2**-24
    return ((uniform - 0.5) * (12 / shape[-1]) ** 0.5).astype(dtype)


def _scramble(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return what each number becomes in the last step of MurmurHash3 (Appleby 2011), which is one to one."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
