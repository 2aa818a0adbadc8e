import json
from pathlib import Path

import pytest

from jkv.models.tokenizer import Tokenizer

_GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2" / "tokens.json"


@pytest.mark.model
def test_smollm2_gives_the_tokens_of_llama_cpp(smollm2_metadata):
    tokenizer = Tokenizer.from_gguf(smollm2_metadata)
    for case in json.loads(_GOLDEN.read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"]) == case["plain"]
        assert tokenizer.encode(case["text"], special=True) == case["special"]
        assert tokenizer.decode(case["plain"]) == case["text"]
        assert tokenizer.decode(case["special"], skip_special=False) == case["text"]


@pytest.mark.model
def test_smollm2_ends_a_turn_and_a_text(smollm2_metadata):
    tokenizer = Tokenizer.from_gguf(smollm2_metadata)
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert not tokenizer.adds_bos


def test_sentencepiece_gives_the_tokens_of_the_sentencepiece_package(
    sentencepiece_metadata, sentencepiece_cases
):
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    for case in sentencepiece_cases:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"]


def test_sentencepiece_adds_bos_and_a_space_unless_told(sentencepiece_metadata):
    hi = Tokenizer.from_gguf(sentencepiece_metadata)
    assert hi.decode(hi.encode("hi"), skip_special=False) == "<s> hi"
    bare = Tokenizer.from_gguf(
        sentencepiece_metadata
        | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    assert bare.decode(bare.encode("hi")) == "hi"
    assert bare.decode(bare.encode(" hi")) == " hi"


def test_sentencepiece_prefixes_text_after_each_added_token(sentencepiece_metadata):
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    ids = tokenizer.encode("it<mask>it<|stop|>it", special=True, add_bos=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["▁it", "<mask>", "▁it", "<|stop|>", "▁it"]


def test_user_defined_tokens_are_parsed_in_plain_text(make_byte_level):
    tokenizer = Tokenizer.from_gguf(make_byte_level(user_defined=["<think>"]))
    ids = tokenizer.encode("<think><s>")
    assert ids[0] == tokenizer.token_id("<think>")
    assert len(ids) == 4
    assert not tokenizer.is_special(ids[0])
    assert tokenizer.decode(ids) == "<think><s>"


def test_every_kind_of_end_token_is_known(make_byte_level):
    control = ["<s>", "</s>", "<eot>", "<|eot_id|>", "<|start|>"]
    metadata = make_byte_level(control=control)
    metadata["tokenizer.ggml.eot_token_id"] = metadata["tokenizer.ggml.tokens"].index("<eot>")
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids] == [
        "</s>",
        "<eot>",
        "<|eot_id|>",
    ]


def test_a_message_of_harmony_does_not_end_a_generation(make_byte_level):
    control = ["<s>", "</s>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|call|>"]
    tokenizer = Tokenizer.from_gguf(make_byte_level(control=control))
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids}
    assert ends == {"</s>", "<|endoftext|>", "<|return|>", "<|call|>"}
    other = Tokenizer.from_gguf(make_byte_level(control=control[:-1]))
    assert {other.token_text(token_id) for token_id in other.eos_ids} == {"</s>", "<|endoftext|>", "<|end|>"}


def test_llama3_words_that_are_tokens_are_not_rebuilt(make_byte_level):
    # No merge makes "hello", so only a whole word can be that token.
    metadata = make_byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "hello"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    llama3 = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama3.encode("hello", add_bos=False) == [llama3.token_id("hello")]
    assert llama3.adds_bos
    assert len(Tokenizer.from_gguf(metadata).encode("hello")) == 5


def test_qwen2_composes_characters(make_byte_level):
    tokenizer = Tokenizer.from_gguf(make_byte_level(pre="qwen2"))
    assert (
        tokenizer.decode(tokenizer.encode("e\N{COMBINING ACUTE ACCENT}"))
        == "\N{LATIN SMALL LETTER E WITH ACUTE}"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", 'must be "gpt2" or "llama", got \'bert\''),
        ("pre", "klingon", r"must be one of default, .*, got 'klingon'"),
        ("token_type", [1, 1], "one entry per token, 264, got 2"),
        ("merges", ["h i", "h xyz"], "'xyz' is none"),
        ("eos_token_id", 264, "below the number of tokens, 264, got 264"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(make_byte_level, key, value, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(make_byte_level(**{key: value}))


def test_metadata_without_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"must have tokenizer\.ggml\.tokens"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "llama"})


def test_bos_without_a_token_is_refused(make_byte_level):
    metadata = make_byte_level(add_bos_token=True)
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match="must name the BOS token"):
        Tokenizer.from_gguf(metadata)
