"""Files of calibrated scales: what is kept, and every way in which one does not fit."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.scales import read_scales, write_scales

MODEL = "0123abcd"
SCALES = [(jnp.full((2, 3), 0.5), jnp.full((2, 3), 0.25)), (jnp.ones((2, 3)), None)]
BFLOAT16_VALUES = CacheGroup(2, 3, 8, "fp8_e4m3_static", "bf16")


def make_spec(codec: str = "int8_static", num_layers: int = 2) -> CacheSpec:
    return CacheSpec.create([CacheGroup(num_layers, 3, 8, codec), BFLOAT16_VALUES], page_size=4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scales.safetensors"
    write_scales(path, SCALES, make_spec(), model=MODEL, notes={"method": "mse"})
    return path


def test_scales_come_back_for_each_group(file: Path):
    for read, written in zip(read_scales(file, make_spec(), model=MODEL), SCALES, strict=True):
        for got, scales in zip(read, written, strict=True):
            np.testing.assert_array_equal(got, scales)


def test_copies_of_kv_heads_have_the_scales_of_their_heads(tmp_path: Path):
    copied = CacheSpec.create([CacheGroup(2, 6, 8, "int8_static")], page_size=4)
    own = jnp.arange(1.0, 7.0).reshape(2, 3)
    both = jnp.repeat(own, 2, axis=1)
    path = tmp_path / "copied.safetensors"
    write_scales(path, [(both, 2 * both)], copied, model=MODEL, kv_copies=2)
    np.testing.assert_array_equal(safetensors.numpy.load_file(path)["keys.0"], own)
    ((keys, values),) = read_scales(path, copied, model=MODEL, kv_copies=2)
    np.testing.assert_array_equal(keys, both)
    np.testing.assert_array_equal(values, 2 * both)
    with pytest.raises(ValueError, match=r"must hold keys.0 int8_static F32\[2, 6\].*got keys.0 .*\[2, 3\]"):
        read_scales(path, copied, model=MODEL)


def test_the_file_is_one_that_others_read(file: Path):
    arrays = safetensors.numpy.load_file(file)
    assert {name: array.shape for name, array in arrays.items()} == {
        "keys.0": (2, 3),
        "values.0": (2, 3),
        "keys.1": (2, 3),
    }
    with safetensors.safe_open(file, "np") as opened:
        metadata = opened.metadata()
    assert metadata["model"] == MODEL
    assert metadata["method"] == "mse"
    assert metadata["codec.keys.1"] == "fp8_e4m3_static"


@pytest.mark.parametrize(
    ("spec", "model", "message"),
    [
        (make_spec(), "ffff", "be calibrated on this model, ffff, got 0123abcd"),
        (
            make_spec("fp8_e4m3_static"),
            MODEL,
            r"hold keys.0 fp8_e4m3_static F32\[2, 3\].*got .*keys.0 int8_static",
        ),
        (make_spec("int8"), MODEL, r"hold keys.1 fp8_e4m3_static F32\[2, 3\], got .*keys.0 int8_static"),
        (make_spec(num_layers=4), MODEL, r"hold keys.0 int8_static F32\[4, 3\].*got .*F32\[2, 3\]"),
    ],
)
def test_scales_for_something_else_are_refused(file: Path, spec: CacheSpec, model: str, message: str):
    with pytest.raises(ValueError, match=f"{file} must {message}"):
        read_scales(file, spec, model=model)


@pytest.mark.parametrize("bad", [0, -1, np.nan, np.inf])
def test_a_scale_that_is_not_positive_and_finite_is_refused(file: Path, bad: float):
    scales = [(SCALES[0][0].at[1, 2].set(bad), SCALES[0][1]), SCALES[1]]
    write_scales(file, scales, make_spec(), model=MODEL)
    with pytest.raises(ValueError, match=r"must hold finite, positive scales, got others in keys.0"):
        read_scales(file, make_spec(), model=MODEL)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "hold 72 bytes of tensors, got 71"),
        (lambda data: data[:40], "begin with a header"),
        (
            lambda data: data.replace(b'"jkv_scales": "1"', b'"jkv_scales": "2"'),
            "hold scales of version 1, got 2",
        ),
        (
            lambda data: data.replace(b'"jkv_scales"', b'"xyz_scales"'),
            "hold scales of version 1, got none; jkv calibrate",
        ),
        (lambda data: data.replace(b'"codec.values.0"', b'"codec.values.9"'), "hold .*got .*values.0 None"),
        (lambda data: data.replace(b'"F32"', b'"I32"', 1), r"hold .*got .*keys.0 int8_static I32\[2, 3\]"),
    ],
)
def test_a_damaged_file_is_refused(file: Path, damage, message: str):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file} must {message}"):
        read_scales(file, make_spec(), model=MODEL)
