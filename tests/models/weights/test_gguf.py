"""GGUF tensors, whole and in pieces, for the types that models come in."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jkv.models.weights.gguf import GgufSource

from .checkpoints import make_normal

Type = gguf.GGMLQuantizationType
# 32 and 256 values a block.
QUANTIZED = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
SUPERBLOCKS = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS)


def write_tensor(path: Path, stored: np.ndarray, encoding: Type | None = None, name: str = "x") -> GgufSource:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, stored, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(path)


def make_blocks(encoding: Type, rows: int, columns: int) -> np.ndarray:
    """Return random blocks: bytes below 64 keep their float16 scales finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
    shape = (rows, columns // block_size * block_bytes)
    return np.random.default_rng(0).integers(0, 64, shape, np.uint8)


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_a_quantized_tensor_reads_as_its_values(tmp_path: Path, encoding: Type):
    values = make_normal(6, 64)
    stored = gguf.quantize(values, encoding)
    source = write_tensor(tmp_path / "x.gguf", stored, encoding)
    info = source.tensors["x"]
    assert (info.shape, info.dtype, info.encoding) == ((6, 64), np.float32, encoding.name)
    read = source.read("x")
    np.testing.assert_array_equal(read, gguf.dequantize(stored, encoding))
    assert np.abs(read - values).max() < 0.5


@pytest.mark.parametrize("encoding", [*QUANTIZED, *SUPERBLOCKS])
def test_a_piece_equals_the_same_piece_of_the_whole(tmp_path: Path, encoding: Type):
    source = write_tensor(tmp_path / "x.gguf", make_blocks(encoding, 6, 768), encoding)
    whole = source.read("x")
    assert np.isfinite(whole).all()
    for index in [(slice(2, 5),), (slice(None), slice(256, 512)), (slice(1, 4), slice(37, 300))]:
        np.testing.assert_array_equal(source.read("x", index), whole[index], strict=True)


def test_only_the_blocks_of_a_piece_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_tensor(tmp_path / "x.gguf", make_blocks(Type.Q8_0, 6, 768), Type.Q8_0)
    shapes = []

    def dequantize(blocks: np.ndarray, encoding: Type) -> np.ndarray:
        shapes.append(blocks.shape)
        return gguf.dequantize(blocks, encoding)

    monkeypatch.setattr("jkv.models.weights.gguf.dequantize", dequantize)
    source.read("x", (slice(2, 4), slice(40, 70)))
    assert shapes == [(2, 2 * 34)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int32])
def test_a_plain_tensor_is_a_view_in_its_dtype(tmp_path: Path, dtype: type):
    values = (8 * make_normal(4, 8)).astype(dtype)
    read = write_tensor(tmp_path / "x.gguf", values).read("x", (slice(1, 3),))
    np.testing.assert_array_equal(read, values[1:3], strict=True)
    assert not read.flags.owndata


def test_bfloat16_is_read_bit_by_bit(tmp_path: Path):
    values = make_normal(4, 8).astype(ml_dtypes.bfloat16)
    read = write_tensor(tmp_path / "x.gguf", values.view(np.uint8), Type.BF16).read("x")
    np.testing.assert_array_equal(read, values, strict=True)


def test_a_type_that_the_package_cannot_decode_is_named(tmp_path: Path):
    source = write_tensor(tmp_path / "x.gguf", make_blocks(Type.Q8_K, 2, 256), Type.Q8_K)
    with pytest.raises(
        ValueError, match="tensor 'x' must be of a type that the gguf package decodes, got Q8_K"
    ):
        source.read("x")
