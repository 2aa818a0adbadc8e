"""The sizes that every reader checks."""

from dataclasses import replace

import pytest

from jkv.models.families import FAMILIES
from jkv.models.model_config import check_sizes

from ..tiny import make_config

CONFIG = make_config(
    vocab_size=320,
    num_layers=2,
    embed_dim=64,
    num_heads=8,
    num_kv_heads=2,
    mlp_dim=96,
    max_length=512,
    windows=(None, 16),
)


def test_sizes_that_fit_pass_through():
    assert check_sizes(CONFIG) is CONFIG


def test_query_heads_that_kv_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of the KV heads, got 8 and 3"):
        check_sizes(replace(CONFIG, num_kv_heads=3))


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        check_sizes(replace(CONFIG, windows=(None, 0)))


def test_a_config_is_hashable():
    assert hash(CONFIG) == hash(replace(CONFIG))


def test_mistral_is_llama_inside_a_gguf_file():
    assert FAMILIES["mistral"].gguf_name == FAMILIES["llama"].gguf_name == "llama"
