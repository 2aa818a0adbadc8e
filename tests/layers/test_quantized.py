import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.layers.linear import Embedding, Linear
from jkv.layers.moe import MoE, Routing
from jkv.layers.quantized import Int4Weight, Int8Weight, QuantizedEmbedding, QuantizedLinear, quantize

SIZES = [(64, 7), (576, 40), (1536, 12), (4096, 5)]


def make_weight(inputs: int, outputs: int) -> np.ndarray:
    return np.random.default_rng(inputs).standard_normal((outputs, inputs)).astype(np.float32)


def make_rows(rows: int, inputs: int) -> jax.Array:
    return jax.random.normal(jax.random.key(rows), (rows, 1, inputs))


def unpacked(weight: Int8Weight | Int4Weight, inputs: int) -> np.ndarray:
    """Return the weight that the packed form stands for, by asking for its product with the identity."""
    return np.asarray(weight.product(jnp.eye(inputs)[:, None]))[:, 0].T


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def int8_oracle(weight: np.ndarray) -> np.ndarray:
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    return np.rint(weight / scale) * scale


def int4_oracle(weight: np.ndarray) -> np.ndarray:
    groups = weight.reshape(len(weight), -1, 32)
    low = groups.min(axis=2, keepdims=True)
    step = (groups.max(axis=2, keepdims=True) - low) / 15
    return (np.rint((groups - low) / step) * step + low).reshape(weight.shape)


ORACLES = {Int8Weight: int8_oracle, Int4Weight: int4_oracle}


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES[:3])
def test_packed_weight_stands_for_the_nearest_levels(make, inputs, outputs):
    weight = make_weight(inputs, outputs)
    assert relative_error(unpacked(make(weight), inputs), ORACLES[make](weight)) < 1e-6


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 3])
def test_product_equals_that_of_the_unpacked_weight(make, inputs, outputs, rows):
    weight = make_weight(inputs, outputs)
    x = make_rows(rows, inputs)
    expected = np.asarray(x, np.float64)[:, 0] @ ORACLES[make](weight).T
    assert relative_error(np.asarray(make(weight).product(x))[:, 0], expected) < 1e-5


@pytest.mark.parametrize("make", [Int8Weight, Int4Weight])
def test_zero_and_constant_rows_stay_exact(make):
    weight = np.stack([np.zeros(64), np.full(64, 3e-4)]).astype(np.float32)
    assert relative_error(unpacked(make(weight), 64)[1], weight[1]) < 1e-6
    assert not unpacked(make(weight), 64)[0].any()


def test_int4_gives_the_levels_of_a_q4_1_file_back():
    gguf = pytest.importorskip("gguf")
    weight = make_weight(64, 5)
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
    weight = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)
    assert relative_error(unpacked(Int4Weight(weight), 64), weight) < 1e-6


def test_int8_rows_equal_the_looked_up_vectors():
    weight = make_weight(64, 9)
    ids = jnp.asarray([[3, 8], [0, 3]], jnp.int32)
    got = np.asarray(Int8Weight(weight).rows(ids))
    assert relative_error(got, int8_oracle(weight)[np.asarray(ids)]) < 1e-6


@pytest.mark.parametrize(("make", "inputs"), [(Int8Weight, 40), (Int4Weight, 96)])
def test_inputs_that_do_not_pack_are_refused_with_the_shape(make, inputs):
    with pytest.raises(ValueError, match=rf"multiples of \d+, got a weight \(7, {inputs}\)"):
        make(make_weight(inputs, 7))


class Tiny(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = Embedding(32, 64, rngs=rngs)
        self.up = Linear(64, 128, axes=("embed", "mlp"), has_bias=True, rngs=rngs)
        self.lm_head = Linear(64, 32, axes=("embed", "vocab"), rngs=rngs)


def test_quantize_packs_every_projection_and_keeps_the_head_in_int8():
    model = Tiny()
    bias = model.up.bias
    quantize(model, "int4")
    assert isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.up, QuantizedLinear)
    assert isinstance(model.up.weight, Int4Weight)
    assert model.up.bias is bias
    assert isinstance(model.lm_head.weight, Int8Weight)


def test_experts_are_not_packed():
    with pytest.raises(ValueError, match="int8 weights must have no experts"):
        quantize(MoE(64, 64, Routing(4, 2), rngs=nnx.Rngs(0)), "int8")


def test_packed_bytes_are_an_eighth_and_a_quarter_of_float32_and_scales():
    weight = make_weight(1536, 16)
    size = {make: sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(make(weight)))) for make in ORACLES}
    assert size[Int8Weight] == weight.size + 16 * 4
    assert size[Int4Weight] == weight.size // 2 + 2 * 4 * weight.size // 32
