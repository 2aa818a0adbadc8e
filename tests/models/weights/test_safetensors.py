"""safetensors files against the safetensors package, and every way in which a download breaks."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jkv.models.weights.safetensors import open_safetensors, read_metadata, write_safetensors
from jkv.models.weights.source import fingerprint

from .checkpoints import GOLDEN, GOLDEN_NAMES, make_normal, read_golden

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TENSORS = {"a": make_normal(4, 6), "b": make_normal(8), "c": make_normal(3, 5)}


def write_shards(folder: Path, *shards: dict[str, np.ndarray], index: dict[str, str] | None = None) -> Path:
    for file, tensors in zip(SHARDS, shards, strict=True):
        safetensors.numpy.save_file(tensors, folder / file)
    places = {name: file for file, tensors in zip(SHARDS, shards, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index or places}))
    return folder


def make_two_shards(folder: Path) -> Path:
    return write_shards(folder, {"a": TENSORS["a"]}, {"b": TENSORS["b"], "c": TENSORS["c"]})


def write_raw(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_tensors_equal_the_packages_reading(name: str):
    source = open_safetensors(GOLDEN / name)
    expected = read_golden(name)
    assert source.tensors.keys() == expected.keys()
    for tensor, array in expected.items():
        assert source.tensors[tensor].shape == array.shape
        np.testing.assert_array_equal(source.read(tensor), array, strict=True)


@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
        (np.float16, "F16"),
        (np.float64, "F64"),
        (np.int32, "I32"),
        (np.uint8, "U8"),
        (np.bool_, "BOOL"),
    ],
)
def test_every_dtype_is_read_bit_by_bit(tmp_path: Path, dtype: type, encoding: str):
    array = (4 * make_normal(6, 10)).astype(dtype)
    safetensors.numpy.save_file({"x": array}, tmp_path / "x.safetensors")
    source = open_safetensors(tmp_path / "x.safetensors")
    assert source.tensors["x"].encoding == encoding
    assert source.tensors["x"].dtype == array.dtype
    assert source.read("x").tobytes() == array.tobytes()


def test_a_piece_is_a_view_of_the_file(tmp_path: Path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "x.safetensors")
    source = open_safetensors(tmp_path / "x.safetensors")
    piece = source.read("a", (slice(1, 3), slice(2, 6)))
    np.testing.assert_array_equal(piece, TENSORS["a"][1:3, 2:6])
    assert not piece.flags.owndata
    assert not piece.flags.writeable


def test_a_tensor_may_begin_at_an_odd_byte(tmp_path: Path):
    data = b"\x01" + TENSORS["b"].tobytes()
    header = {"u": entry("U8", [1], 0, 1), "b": entry("F32", [8], 1, 33), "__metadata__": {"format": "pt"}}
    source = open_safetensors(write_raw(tmp_path / "x.safetensors", header, data))
    np.testing.assert_array_equal(source.read("b"), TENSORS["b"])
    assert set(source.tensors) == {"u", "b"}


def test_what_is_written_is_read_by_the_package(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, TENSORS, {"who": "jkv"})
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == read_metadata(path) == {"who": "jkv"}
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(opened.get_tensor(name), array)


def test_shards_are_read_as_one_checkpoint(tmp_path: Path):
    source = open_safetensors(make_two_shards(tmp_path))
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(source.read(name), array)


def test_sharding_does_not_change_the_fingerprint(tmp_path: Path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "x.safetensors")
    whole = fingerprint(open_safetensors(tmp_path / "x.safetensors"))
    assert fingerprint(open_safetensors(make_two_shards(tmp_path))) == whole


def test_a_deleted_shard_is_named(tmp_path: Path):
    make_two_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=rf"lacks the shards \['{SHARDS[1]}'\]"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("kept", [-1, -40, 100, 8, 3, 0])
def test_a_cut_shard_is_named(tmp_path: Path, kept: int):
    make_two_shards(tmp_path)
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(ValueError, match=SHARDS[1]):
        open_safetensors(tmp_path)


def test_bytes_past_the_last_tensor_are_refused(tmp_path: Path):
    path = write_raw(tmp_path / "x.safetensors", {"a": entry("U8", [2], 0, 2)}, b"abc")
    with pytest.raises(ValueError, match="must hold 2 bytes of tensors, got 3"):
        open_safetensors(path)


def test_the_index_wins_over_an_unindexed_duplicate(tmp_path: Path):
    stale = {"b": TENSORS["b"], "c": TENSORS["c"], "a": np.zeros((4, 6), np.float32)}
    index = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}
    source = open_safetensors(write_shards(tmp_path, {"a": TENSORS["a"]}, stale, index=index))
    np.testing.assert_array_equal(source.read("a"), TENSORS["a"])


def test_a_file_that_the_index_does_not_name_is_left_alone(tmp_path: Path):
    make_two_shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half a download")
    assert set(open_safetensors(tmp_path).tensors) == set(TENSORS)


def test_a_tensor_that_no_index_places_is_still_listed(tmp_path: Path):
    index = {"a": SHARDS[0], "b": SHARDS[1]}
    shards = {"a": TENSORS["a"]}, {"b": TENSORS["b"], "c": TENSORS["c"]}
    assert "c" in open_safetensors(write_shards(tmp_path, *shards, index=index)).tensors


def test_two_shards_with_one_name_that_no_index_places_are_refused(tmp_path: Path):
    index = {"a": SHARDS[0], "b": SHARDS[1]}
    shards = {"a": TENSORS["a"], "c": TENSORS["c"]}, {"b": TENSORS["b"], "c": TENSORS["c"]}
    with pytest.raises(ValueError, match="second tensor 'c'"):
        open_safetensors(write_shards(tmp_path, *shards, index=index))


@pytest.mark.parametrize("places", [{"ghost": SHARDS[0]}, {"b": SHARDS[0]}])
def test_a_tensor_that_is_not_where_the_index_has_it_is_named(tmp_path: Path, places: dict[str, str]):
    index = {"a": SHARDS[0], "b": SHARDS[1], **places}
    write_shards(tmp_path, {"a": TENSORS["a"]}, {"b": TENSORS["b"]}, index=index)
    with pytest.raises(
        ValueError, match=rf"lacks the tensors \['{next(iter(places))}'\] where its index has them"
    ):
        open_safetensors(tmp_path)


def test_an_index_that_places_a_tensor_twice_is_refused(tmp_path: Path):
    make_two_shards(tmp_path)
    places = ", ".join(f'"a": "{file}"' for file in SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{places}}}}}')
    with pytest.raises(ValueError, match=r"index\.json must be JSON, got two values of 'a'"):
        open_safetensors(tmp_path)


def test_an_index_must_not_lead_out_of_its_folder(tmp_path: Path):
    write_shards(tmp_path, {"a": TENSORS["a"]}, {"b": TENSORS["b"]}, index={"a": "../secret.safetensors"})
    with pytest.raises(ValueError, match="files of its own folder"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json must (be JSON|hold a JSON object)"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "must have a safetensors header"),
        (b"[1]", "must have a safetensors header, got other JSON"),
        ({"__metadata__": 1}, "must have a safetensors header, got other JSON"),
        ({"a": {"dtype": "U8"}}, "must say dtype, shape and data_offsets of each tensor, got others of 'a'"),
        ({"a": 1}, "got others of 'a'"),
        ({"a": entry("U8", [-4], 0, 4)}, "got others of 'a'"),
        ({"a": {"dtype": [], "shape": [4], "data_offsets": [0, 4]}}, "got others of 'a'"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, "got others of 'a'"),
        ({"a": entry("F4", [4], 0, 4)}, "F64, got F4"),
        ({"a": entry("U8", [5], 0, 4)}, "tensor 'a' of U8.5. takes bytes 0 to 4"),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [2], 2, 4)},
            "tensor 'b' .* the one before ends at 4",
        ),
        ({"a": entry("U8", [2], 2, 4)}, "tensor 'a' .* the one before ends at 0"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: object, message: str):
    with pytest.raises(ValueError, match=rf"x\.safetensors .*{message}"):
        open_safetensors(write_raw(tmp_path / "x.safetensors", header, b"abcd"))


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="got neither"):
        open_safetensors(tmp_path)
