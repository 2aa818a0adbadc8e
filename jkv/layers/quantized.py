"""Weights in int8 or 4 bits, unpacked inside the product; a single row reads them in packed form.

The packings are chosen so that XLA's CPU backend compiles unpack, multiply and sum into one loop over vector
lanes (docs/performance.md); other backends compute the same values from the same arrays.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jkv.layers.dense import add_up, dense, inner_axis, split_row
from jkv.layers.linear import Embedding, Linear
from jkv.layers.moe import Experts

WeightCodec = Literal["int8", "int4"]

_GROUP = 32
# What the inputs of a weight are a multiple of: words of four bytes by eight lanes, two groups.
_MULTIPLES = {"int8": 32, "int4": 64}


class Int8Weight(nnx.Module):
    """A weight `[out, in]` as signed bytes with one float32 scale an output, four bytes a word.

    Word `w` of a row holds the inputs `w`, `w + in / 4`, `w + in / 2` and `w + 3 in / 4`, lowest byte first.

    Raises:
        ValueError: the inputs are not a multiple of 32.
    """

    def __init__(self, weight: Float[np.ndarray, "out in"]):
        _check_inputs(weight, "int8")
        peak = np.abs(weight).max(axis=1)
        scale = np.where(peak == 0, 1.0, peak / 127).astype(np.float32)
        levels = np.rint(weight / scale[:, None]).astype(np.int8).view(np.uint8).astype(np.uint32)
        parts = levels.reshape(len(weight), 4, -1)
        words = sum(parts[:, byte] << (8 * byte) for byte in range(4))
        self.words = nnx.Param(jnp.asarray(np.asarray(words).view(np.int32)))
        self.scale = nnx.Param(jnp.asarray(scale))

    def rows(self, ids: Int[Array, "*rows"]) -> Float[Array, "*rows in"]:
        """Return the float32 vectors of some outputs."""
        return _bytes(self.words[...][ids]) * self.scale[...][ids][..., None]

    def product(self, x: Float[Array, "seq time in"]) -> Float[Array, "seq time out"]:
        """Return `x @ weight.T` in float32."""
        # Tied to the input: XLA would otherwise unpack the whole weight once, ahead of a decode loop.
        x, words, scale = jax.lax.optimization_barrier(
            (x.astype(jnp.float32), self.words[...], self.scale[...])
        )
        if x.shape[:2] != (1, 1):
            return dense(x, jax.lax.optimization_barrier(_bytes(words))) * scale[None, None]
        outer, inner, lanes = split_row(words.shape[1])
        words = words.reshape(-1, outer, inner, lanes)
        inputs = x.reshape(4, outer, inner, lanes)
        terms = [
            ((words[:, :, c] << (24 - 8 * byte)) >> 24).astype(jnp.float32) * inputs[None, byte, :, c]
            for c in range(inner)
            for byte in range(4)
        ]
        return (add_up(terms).sum((1, 2)) * scale)[None, None]


class Int4Weight(nnx.Module):
    """A weight `[out, in]` as 4-bit levels with a float32 scale and minimum for each 32 inputs (GGUF's Q4_1).

    Levels are taken between each group's minimum and maximum, which gives a Q4_1 file's own levels back. A
    word's nibble `n` and lane `l` hold input `8 n + l` of its 64.

    Raises:
        ValueError: the inputs are not a multiple of 64.
    """

    def __init__(self, weight: Float[np.ndarray, "out in"]):
        _check_inputs(weight, "int4")
        groups = weight.reshape(len(weight), -1, _GROUP)
        minimum = groups.min(axis=2)
        scale = ((groups.max(axis=2) - minimum) / 15).astype(np.float32)
        step = np.where(scale == 0, 1, scale)[..., None]
        levels = np.clip(np.rint((groups - minimum[..., None]) / step), 0, 15).astype(np.uint32)
        parts = levels.reshape(len(weight), -1, 8, 8)
        words = sum(parts[:, :, nibble] << (4 * nibble) for nibble in range(8))
        self.words = nnx.Param(jnp.asarray(words))
        self.scale = nnx.Param(jnp.asarray(scale))
        self.minimum = nnx.Param(jnp.asarray(minimum.astype(np.float32)))

    def product(self, x: Float[Array, "seq time in"]) -> Float[Array, "seq time out"]:
        """Return `x @ weight.T` in float32."""
        operands = (x.astype(jnp.float32), self.words[...], self.scale[...], self.minimum[...])
        x, words, scale, minimum = jax.lax.optimization_barrier(operands)
        num_outputs, num_blocks, _ = words.shape
        if x.shape[:2] != (1, 1):
            shifts = 4 * jnp.arange(8, dtype=jnp.uint32)[None, None, :, None]
            levels = ((words[:, :, None] >> shifts) & 15).astype(jnp.float32)
            levels = levels.reshape(num_outputs, 2 * num_blocks, _GROUP)
            weight = levels * scale[..., None] + minimum[..., None]
            return dense(x, jax.lax.optimization_barrier(weight.reshape(num_outputs, -1)))
        inner = inner_axis(num_blocks)
        outer = num_blocks // inner
        words = words.reshape(num_outputs, outer, inner, 8)
        scale = scale.reshape(num_outputs, outer, inner, 2, 1)
        minimum = minimum.reshape(num_outputs, outer, inner, 2, 1)
        inputs = x.reshape(1, outer, inner, 2, 4, 8)
        totals = jax.lax.optimization_barrier(inputs.sum(4))
        terms = []
        for c in range(inner):
            for half in range(2):
                levels = [
                    ((words[:, :, c] >> (16 * half + 4 * n)) & 15).astype(jnp.int32).astype(jnp.float32)
                    * inputs[:, :, c, half, n]
                    for n in range(4)
                ]
                terms.append(add_up(levels) * scale[:, :, c, half])
                terms.append(totals[:, :, c, half] * minimum[:, :, c, half])
        return add_up(terms).sum((1, 2))[None, None]


class QuantizedLinear(nnx.Module):
    """A `Linear` whose weight is packed; the bias stays."""

    def __init__(self, linear: Linear, codec: WeightCodec):
        make = {"int8": Int8Weight, "int4": Int4Weight}[codec]
        self.weight = make(np.asarray(linear.weight[...], np.float32))
        self.bias = linear.bias
        self.dtype = linear.dtype

    def __call__(self, x: Float[Array, "seq time features"]) -> Float[Array, "seq time out"]:
        """Project the last axis; the product is float32."""
        y = self.weight.product(x).astype(self.dtype)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)[None, None]


class QuantizedEmbedding(nnx.Module):
    """An `Embedding` in int8: as an output head, 4 bits would cost more quality than bytes."""

    def __init__(self, embedding: Embedding):
        self.embedding = Int8Weight(np.asarray(embedding.embedding[...], np.float32))
        self.dtype: DTypeLike = embedding.dtype

    def __call__(self, tokens: Int[Array, "seq time"]) -> Float[Array, "seq time embed"]:
        """Look tokens up."""
        return self.embedding.rows(tokens).astype(self.dtype)

    def attend(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time vocab"]:
        """Return float32 logits of `x` against every token's vector."""
        return self.embedding.product(x)


def check_weight_codec(
    codec: WeightCodec, *, widths: Iterable[int], has_experts: bool, has_mesh: bool
) -> None:
    """Refuse weights that do not pack, before they are read.

    Args:
        codec: how they are to be packed.
        widths: inputs of each projection.
        has_experts: whether there are experts among them.
        has_mesh: whether they are to be placed on a mesh.

    Raises:
        ValueError: they have experts, a mesh, or inputs that do not pack.
    """
    if has_experts:
        raise ValueError(f"{codec} weights must have no experts among them, got some; use bfloat16")
    if has_mesh:
        raise ValueError(f"{codec} weights must be on one device, got a mesh; use float32 or bfloat16")
    multiple = _MULTIPLES[codec]
    wrong = sorted({width for width in widths if width % multiple})
    if wrong:
        got = " and ".join(map(str, wrong))
        raise ValueError(
            f"{codec} weights need inputs in multiples of {multiple}, got {got}; use float32 or bfloat16"
        )


def check_packs(model: nnx.Module, codec: WeightCodec) -> None:
    """Refuse a module that `quantize` cannot pack; its parameters may be shapes alone.

    Raises:
        ValueError: as `check_weight_codec`.
    """
    linears = [child for _, _, child in _projections(model) if isinstance(child, Linear)]
    modules = [module for _, module in nnx.iter_modules(model)]
    check_weight_codec(
        codec,
        widths=[linear.weight.shape[1] for linear in linears],
        has_experts=any(isinstance(module, Experts) for module in modules),
        has_mesh=any(
            module.sharding is not None for module in modules if isinstance(module, Linear | Embedding)
        ),
    )


def quantize(model: nnx.Module, codec: WeightCodec) -> None:
    """Replace each projection and embedding in the module by its packed form, one at a time.

    The output head is kept in int8 with either codec.

    Raises:
        ValueError: as `check_packs`.
    """
    check_packs(model, codec)
    for module, name, child in list(_projections(model)):
        if isinstance(child, Embedding):
            setattr(module, name, QuantizedEmbedding(child))
        else:
            setattr(module, name, QuantizedLinear(child, "int8" if name == "lm_head" else codec))


def _projections(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, Linear | Embedding]]:
    """Find what is packed: the module that has it, its name there, and itself."""
    for _, module in nnx.iter_modules(model):
        for name, child in vars(module).items():
            if type(child) in (Linear, Embedding):
                yield module, name, child


def _bytes(words: Int[Array, "*rows words"]) -> Float[Array, "*rows in"]:
    shifts = (24 - 8 * jnp.arange(4, dtype=jnp.int32)).reshape(*([1] * (words.ndim - 1)), 4, 1)
    levels = ((words[..., None, :] << shifts) >> 24).astype(jnp.float32)
    return levels.reshape(*words.shape[:-1], -1)


def _check_inputs(weight: np.ndarray, codec: WeightCodec) -> None:
    if weight.shape[1] % _MULTIPLES[codec]:
        raise ValueError(
            f"{codec} weights need inputs in multiples of {_MULTIPLES[codec]}, got a weight {weight.shape}"
        )
