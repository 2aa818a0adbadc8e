"""A tokenizer goes along to another folder, whatever files it is in."""

import gguf
import numpy as np

from jkv.models.gguf_metadata import gguf_metadata
from jkv.models.tokenizer_files import copy_tokenizer, has_tokenizer, read_tokenizer, tokenizer_kind


def write_gguf(file, metadata):
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_s_tokenizer_is_that_of_the_folder_it_went_to(tmp_path, make_byte_level):
    file, folders = tmp_path / "model.gguf", [tmp_path / "first", tmp_path / "second"]
    write_gguf(file, make_byte_level())
    for folder, source in zip(folders, [file, folders[0]], strict=True):
        folder.mkdir()
        assert not has_tokenizer(folder)
        copy_tokenizer(source, folder)
        assert has_tokenizer(folder)
        assert tokenizer_kind(folder) == "gpt2"
        assert read_tokenizer(folder).encode("hi hi") == read_tokenizer(file).encode("hi hi")
        assert gguf_metadata(folder / "tokenizer.gguf") == gguf_metadata(file)
    assert (folders[0] / "tokenizer.gguf").stat().st_size < file.stat().st_size - 4 * 256 * 64


def test_a_gguf_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    write_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.model": "no_vocab"})
    assert not has_tokenizer(tmp_path / "model.gguf")


def test_a_folder_without_a_tokenizer_leaves_nothing(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "model").mkdir()
    copy_tokenizer(tmp_path / "model", tmp_path / "other")
    assert not has_tokenizer(tmp_path / "other")
