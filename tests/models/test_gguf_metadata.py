import gguf
import pytest

from jkv.models.gguf_metadata import gguf_metadata


@pytest.fixture
def file(tmp_path):
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


def test_values_come_back_as_plain_python(file):
    metadata = gguf_metadata(file)
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


def test_a_file_cut_anywhere_is_refused(file, tmp_path):
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf must"):
            gguf_metadata(str(cut))
