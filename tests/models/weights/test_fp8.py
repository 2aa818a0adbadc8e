"""FP8 weights and their scales: one number, one a row, one a block."""

import ml_dtypes
import numpy as np
import pytest

from jkv.models.weights.fp8 import Fp8Source

from .checkpoints import ArraySource, make_normal

E4M3 = ml_dtypes.float8_e4m3fn


def make_weight(rows: int, columns: int) -> np.ndarray:
    return (8 * make_normal(rows, columns)).astype(E4M3)


def make_scale(*shape: int) -> np.ndarray:
    return np.exp(make_normal(*shape, seed=1))


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def test_block_scales_multiply_their_blocks_ragged_ones_too():
    weight, scale = make_weight(20, 27), make_scale(3, 4)
    source = Fp8Source(ArraySource({"w.weight": weight, "w.weight_scale_inv": scale}), (8, 8))
    assert set(source.tensors) == {"w.weight"}
    assert source.tensors["w.weight"].dtype == np.float32
    expected = weight.astype(np.float32) * spread(scale, (8, 8), (20, 27))
    np.testing.assert_array_equal(source.read("w.weight"), expected, strict=True)
    for index in [(slice(3, 17),), (slice(0, 20), slice(5, 11)), (slice(7, 9), slice(24, 27))]:
        np.testing.assert_array_equal(source.read("w.weight", index), expected[index])


@pytest.mark.parametrize("shape", [(), (1,), (6, 1)])
def test_one_number_or_one_a_row_needs_no_blocks(shape: tuple[int, ...]):
    weight, scale = make_weight(6, 10), np.asarray(make_scale(*shape))
    source = Fp8Source(ArraySource({"w.weight": weight, "w.weight_scale": scale}), None)
    expected = weight.astype(np.float32) * scale
    np.testing.assert_array_equal(source.read("w.weight"), expected)
    np.testing.assert_array_equal(source.read("w.weight", (slice(2, 5), slice(1, 4))), expected[2:5, 1:4])


def test_a_bfloat16_scale_is_widened_first():
    weight, scale = make_weight(4, 4), make_scale(1, 1).astype(ml_dtypes.bfloat16)
    source = Fp8Source(ArraySource({"w.weight": weight, "w.weight_scale_inv": scale}), (128, 128))
    np.testing.assert_array_equal(
        source.read("w.weight"), weight.astype(np.float32) * np.float32(scale[0, 0])
    )


def test_other_tensors_pass_through_and_activation_scales_are_left_out():
    norm = make_normal(4).astype(ml_dtypes.bfloat16)
    arrays = {"w.weight": make_weight(4, 4), "w.weight_scale": make_scale(1), "w.input_scale": make_scale(1)}
    source = Fp8Source(ArraySource(arrays | {"norm.weight": norm}), None)
    assert set(source.tensors) == {"w.weight", "norm.weight"}
    np.testing.assert_array_equal(source.read("norm.weight"), norm, strict=True)


def test_an_fp8_weight_without_a_scale_is_named():
    with pytest.raises(ValueError, match=r"must have scales, got none for \['w.weight'\]"):
        Fp8Source(ArraySource({"w.weight": make_weight(4, 4)}), None)


@pytest.mark.parametrize("block", [None, (4, 4), (128, 128)])
def test_a_scale_of_another_shape_is_named(block: tuple[int, int] | None):
    arrays = {"w.weight": make_weight(20, 27), "w.weight_scale_inv": make_scale(3, 4)}
    with pytest.raises(ValueError, match=r"scale of w.weight \(20, 27\) .* got \(3, 4\)"):
        Fp8Source(ArraySource(arrays), block)
