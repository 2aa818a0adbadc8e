import gguf
import pytest

from jkv.models.gguf_metadata import gguf_metadata


@pytest.fixture
def make_file(tmp_path):
    def make():
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("llama.block_count", 3)
        writer.add_float32("llama.epsilon", 0.5)
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
        writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, -2.0])
        writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


def test_values_come_back_as_plain_python(make_file):
    metadata = gguf_metadata(make_file())
    assert metadata == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.epsilon": 0.5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "tokenizer.ggml.scores": [0.0, -1.5, -2.0],
        "tokenizer.ggml.token_type": [1, 1, 3],
    }
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert type(metadata["llama.block_count"]) is int


def test_a_file_cut_anywhere_is_refused(make_file, tmp_path):
    whole = make_file().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf must"):
            gguf_metadata(cut)


def test_a_damaged_length_is_refused_before_memory_is_asked_for(make_file):
    path = make_file()
    data = bytearray(path.read_bytes())
    data[24:32] = (2**62).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cut or damaged"):
        gguf_metadata(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(ValueError, match="must be a GGUF file"):
        gguf_metadata(path)


def test_another_version_or_byte_order_is_refused(make_file):
    path = make_file()
    data = bytearray(path.read_bytes())
    data[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="must be little-endian, of version 2 or 3"):
        gguf_metadata(path)
