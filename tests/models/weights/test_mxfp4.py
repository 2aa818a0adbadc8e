"""MXFP4 blocks and their scales; that whole models of them load is for the goldens to show."""

import ml_dtypes
import numpy as np
import pytest

from jkv.models.weights.mxfp4 import Mxfp4Source

from .checkpoints import ArraySource, make_normal


def make_packed(*outer: int, rows: int = 6, num_blocks: int = 3) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return random blocks and scales, and what they stand for, by another package's float4."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (*outer, rows, num_blocks, 32), np.uint8)
    scales = random.integers(120, 134, (*outer, rows, num_blocks), np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values = values * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    whole = values.reshape(*outer, rows, num_blocks * 32).swapaxes(-1, -2)
    return {"w_blocks": blocks, "w_scales": scales}, whole


def test_blocks_and_scales_are_read_as_one_tensor_with_inputs_first():
    arrays, whole = make_packed(2)
    source = Mxfp4Source(ArraySource(arrays))
    assert {name: (info.shape, info.encoding) for name, info in source.tensors.items()} == {
        "w": ((2, 96, 6), "MXFP4")
    }
    np.testing.assert_array_equal(source.read("w"), whole, strict=True)
    for index in [(slice(1, 2),), (slice(0, 2), slice(40, 70)), (slice(0, 1), slice(31, 33), slice(1, 6, 2))]:
        np.testing.assert_array_equal(source.read("w", index), whole[index], strict=True)


def test_only_the_blocks_of_a_piece_are_read():
    arrays, _ = make_packed(2)
    inner = ArraySource(arrays)
    Mxfp4Source(inner).read("w", (slice(0, 1), slice(33, 60)))
    assert {index[2] for _, index in inner.reads} == {slice(1, 2)}


def test_other_tensors_pass_through():
    arrays, _ = make_packed()
    norm = make_normal(4)
    source = Mxfp4Source(ArraySource(arrays | {"norm": norm}))
    assert set(source.tensors) == {"w", "norm"}
    np.testing.assert_array_equal(source.read("norm"), norm, strict=True)


@pytest.mark.parametrize("change", ["missing", "shape", "width"])
def test_blocks_without_fitting_scales_are_named(change: str):
    arrays, _ = make_packed()
    if change == "missing":
        del arrays["w_scales"]
    elif change == "shape":
        arrays["w_scales"] = arrays["w_scales"][:5]
    else:
        arrays["w_blocks"] = arrays["w_blocks"][..., :8]
    with pytest.raises(ValueError, match=r"16 bytes with a scale each, got others for \['w'\]"):
        Mxfp4Source(ArraySource(arrays))
