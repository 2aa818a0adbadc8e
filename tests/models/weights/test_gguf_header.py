"""GGUF headers against the gguf package's reader and writer."""

from pathlib import Path

import gguf
import pytest

from jkv.models.weights.gguf_header import read_gguf_header

from .checkpoints import make_hf_llama, make_normal, write_gguf


def make_file(path: Path, alignment: int | None = None, **values: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_string("a.text", "straße")
    writer.add_bool("a.flag", True)
    writer.add_float32("a.number", 0.5)
    writer.add_array("a.words", ["one", "two"])
    writer.add_array("a.numbers", [1, -2, 3])
    for name, value in values.items():
        writer.add_uint32(name.replace("__", "."), value)
    writer.add_tensor("x", make_normal(4, 32))
    writer.add_tensor("y", make_normal(8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_becomes_plain_values(tmp_path: Path):
    metadata = read_gguf_header(make_file(tmp_path / "x.gguf")).metadata
    assert metadata == {
        "general.architecture": "llama",
        "a.text": "straße",
        "a.flag": True,
        "a.number": 0.5,
        "a.words": ["one", "two"],
        "a.numbers": [1, -2, 3],
    }


def test_tensors_lie_where_the_package_finds_them(tmp_path: Path):
    path = write_gguf(tmp_path / "x.gguf", *make_hf_llama(8), encoding=gguf.GGMLQuantizationType.Q8_0)
    tensors = read_gguf_header(path).tensors
    expected = gguf.GGUFReader(path).tensors
    assert list(tensors) == [tensor.name for tensor in expected]
    for tensor in expected:
        place = tensors[tensor.name]
        assert place.shape == tuple(tensor.shape.tolist()[::-1])
        assert (place.type, place.start, place.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_another_alignment_is_followed(tmp_path: Path):
    path = make_file(tmp_path / "x.gguf", alignment=1024)
    starts = {name: place.start for name, place in read_gguf_header(path).tensors.items()}
    assert starts == {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(path).tensors}
    assert starts == {"x": 1024, "y": 2048}


def test_an_alignment_of_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"its general\.alignment is 0"):
        read_gguf_header(make_file(tmp_path / "x.gguf", general__alignment=0))


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_a_cut_file_is_one_clear_error(tmp_path: Path, fraction: float):
    path = make_file(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"x\.gguf must be a whole GGUF file, but") as error:
        read_gguf_header(path)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 64])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="must be a GGUF file, but does not begin with 'GGUF'"):
        read_gguf_header(tmp_path / "x.gguf")


def test_a_damaged_length_does_not_ask_for_all_memory(tmp_path: Path):
    path = make_file(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    content[24:32] = b"\xff" * 7 + b"\x0f"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="its header ends at byte"):
        read_gguf_header(path)


def test_a_big_endian_file_is_refused(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\x00\x00\x00\x03" + bytes(64))
    with pytest.raises(ValueError, match="its version is 50331648, and little-endian"):
        read_gguf_header(tmp_path / "x.gguf")


def test_one_part_of_several_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="one of 3 parts; merge them with llama-gguf-split"):
        read_gguf_header(make_file(tmp_path / "x.gguf", split__count=3))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\x01\x00\x00\x00\x00\x00\x00\x00y", b"\x01\x00\x00\x00\x00\x00\x00\x00x", "two tensors 'x'"),
        (b"x\x02\x00\x00\x00", b"x\x00\x00\x00\x00", "its header ends|does not fit|unknown type"),
        (b"a.flag\x07", b"a.flag\x63", "a value of the unknown type 99"),
        (b"a.flag\x07", b"a.text\x07", "two values of 'a.text'"),
    ],
)
def test_a_damaged_entry_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str):
    path = make_file(tmp_path / "x.gguf")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_gguf_header(path)


def test_tensors_that_overlap_are_refused(tmp_path: Path):
    path = make_file(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    # The entry of y: its name, 1 dimension of 8, type F32, and then the offset, 512 in a sound file.
    entry = content.index(b"y\x01\x00\x00\x00\x08")
    content[entry + 17 : entry + 25] = (64).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="tensor 'y' overlaps the one before it"):
        read_gguf_header(path)
