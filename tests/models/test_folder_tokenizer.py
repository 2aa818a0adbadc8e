import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jkv.models.tokenizer import Tokenizer

_SPACE = "▁"


@pytest.fixture
def make_folder(tmp_path):
    """A factory of folders: a byte-level tokenizer with tokens <s>, </s>, <end>, and the given JSON files."""

    def make(encoder=None, **files):
        encoder = encoder or make_byte_level_encoder()
        encoder.save(str(tmp_path / "tokenizer.json"))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        return tmp_path

    return make


def make_byte_level_encoder():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<s>", "</s>"])
    encoder.add_tokens(["<end>"])
    return encoder


def make_sentencepiece_encoder(prepend_scheme):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, "h", "i"]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    encoder.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(["<s>", "</s>"])
    return encoder


def add_bos_by_post_processor(encoder):
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", encoder.token_to_id("<s>"))])
    encoder.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return encoder


_NO_TOKENS = '{"type": "BPE", "vocab": {}, "merges": []}'
_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def test_special_tokens_come_from_the_configuration(make_folder):
    tokenizer = Tokenizer.from_folder(make_folder(tokenizer_config=_CONFIG))
    assert tokenizer.bos_id == tokenizer.token_id("<s>") == 256
    assert tokenizer.eos_ids == (257,)
    assert not tokenizer.adds_bos
    assert tokenizer.vocab_size == 259


def test_special_tokens_map_stands_in_for_the_configuration(make_folder):
    assert Tokenizer.from_folder(make_folder(special_tokens_map=_CONFIG)).eos_ids == (257,)


def test_generation_config_adds_end_tokens(make_folder):
    folder = make_folder(tokenizer_config=_CONFIG, generation_config={"eos_token_id": [258, 257]})
    assert Tokenizer.from_folder(folder).eos_ids == (257, 258)
    folder = make_folder(tokenizer_config=_CONFIG, generation_config={"eos_token_id": 258})
    assert Tokenizer.from_folder(folder).eos_ids == (257, 258)


@pytest.mark.parametrize("in_post_processor", [False, True])
@pytest.mark.parametrize("in_config", [None, False, True])
def test_bos_is_added_where_the_files_say_so(make_folder, in_post_processor, in_config):
    encoder = make_byte_level_encoder()
    if in_post_processor:
        encoder = add_bos_by_post_processor(encoder)
    config = _CONFIG if in_config is None else {**_CONFIG, "add_bos_token": in_config}
    tokenizer = Tokenizer.from_folder(make_folder(encoder, tokenizer_config=config))
    wants_bos = in_post_processor if in_config is None else in_config
    assert tokenizer.adds_bos == wants_bos
    assert tokenizer.encode("hi").count(tokenizer.bos_id) == wants_bos


def test_plain_text_parses_added_tokens_but_no_control_tokens(make_folder):
    tokenizer = Tokenizer.from_folder(make_folder(tokenizer_config=_CONFIG))
    assert tokenizer.encode("<end></s>") == [258, *tokenizer.encode("</s>")]
    assert len(tokenizer.encode("</s>")) == 4
    assert tokenizer.encode("<end></s>", special=True) == [258, 257]


def test_a_named_token_is_a_control_token(make_folder):
    tokenizer = Tokenizer.from_folder(make_folder(tokenizer_config={**_CONFIG, "eos_token": "<end>"}))
    assert tokenizer.is_special(258)
    assert len(tokenizer.encode("<end>")) == 5


def test_blanks_beside_a_control_token_go_where_it_says(make_folder):
    encoder = make_byte_level_encoder()
    encoder.add_special_tokens([AddedToken("<|a|>", rstrip=True), AddedToken("<|b|>", lstrip=True)])
    tokenizer = Tokenizer.from_folder(make_folder(encoder, tokenizer_config=_CONFIG))
    ids = tokenizer.encode(" <|a|> \n h <|b|> ", special=True)
    assert tokenizer.decode(ids, skip_special=False) == " <|a|>h<|b|> "


@pytest.mark.parametrize("prepend_scheme", ["always", "first", "never"])
def test_sentencepiece_folder_gives_the_tokens_of_its_library(make_folder, prepend_scheme):
    encoder = make_sentencepiece_encoder(prepend_scheme)
    tokenizer = Tokenizer.from_folder(make_folder(encoder, tokenizer_config=_CONFIG))
    for text in ["hi", " hi", "<s>hi</s> i", "h<s>hi", "é hi", ""]:
        assert tokenizer.encode(text, special=True) == encoder.encode(text).ids


def test_a_truncating_tokenizer_does_not_cut_prompts(make_folder):
    encoder = make_byte_level_encoder()
    encoder.enable_truncation(3)
    encoder.enable_padding(length=9)
    assert len(Tokenizer.from_folder(make_folder(encoder)).encode("hihihi")) == 6


def test_a_template_file_wins_over_the_configuration(make_folder):
    folder = make_folder(tokenizer_config={**_CONFIG, "chat_template": "{{ bos_token }}config"})
    assert Tokenizer.from_folder(folder).chat_template.render([]) == "<s>config"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template.render([]) == "file"


def test_the_default_of_several_templates_is_taken(make_folder):
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = make_folder(tokenizer_config={**_CONFIG, "chat_template": templates})
    assert Tokenizer.from_folder(folder).chat_template.render([]) == "plain"


def test_a_model_without_template_refuses_to_chat(make_folder):
    tokenizer = Tokenizer.from_folder(make_folder())
    with pytest.raises(ValueError, match="needs a model with a chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_a_folder_with_only_a_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must have a tokenizer\.json; convert its tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have a tokenizer\.json$"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_file_is_named(make_folder):
    folder = make_folder()
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must be JSON"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", *(f'{{"model": {model}}}' for model in ("{}", '{"type": "XYZ"}', _NO_TOKENS))],
)
def test_a_file_that_describes_no_tokenizer_is_named(make_folder, content):
    folder = make_folder()
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json must describe a tokenizer, got"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tokenizer_config", {"bos_token": 5}, "bos_token must be text or a mapping whose content is text"),
        ("special_tokens_map", {"eos_token": {"lstrip": True}}, "eos_token must be text or a mapping"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {}}}, "must be a mapping of token ids to"),
        ("tokenizer_config", {"added_tokens_decoder": {"1": {"content": "a", "x": 1}}}, "content and lstrip"),
        ("tokenizer_config", {"additional_special_tokens": [None]}, "special_tokens must be a list"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "each a mapping of name and template"),
        ("generation_config", {"eos_token_id": "2"}, "eos_token_id must be a whole number"),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_file(make_folder, name, fields, message):
    with pytest.raises(ValueError, match=rf"{name}\.json: .*{message}"):
        Tokenizer.from_folder(make_folder(**{name: fields}))


def test_a_field_that_is_null_says_nothing(make_folder):
    nothing = dict.fromkeys(("bos_token", "add_bos_token", "additional_special_tokens", "chat_template"))
    assert Tokenizer.from_folder(make_folder(tokenizer_config=nothing)).bos_id is None


def test_another_spelling_of_tokens_is_refused(make_folder):
    encoder = make_byte_level_encoder()
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="must decode by ByteLevel"):
        Tokenizer.from_folder(make_folder(encoder))


def test_two_tokens_before_a_text_are_refused(make_folder):
    encoder = make_byte_level_encoder()
    encoder.post_processor = processors.TemplateProcessing(
        "<s> </s> $A", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    with pytest.raises(ValueError, match="at most one token before a text"):
        Tokenizer.from_folder(make_folder(encoder))


def test_composing_tokenizers_compose(make_folder):
    encoder = make_byte_level_encoder()
    encoder.normalizer = normalizers.NFC()
    tokenizer = Tokenizer.from_folder(make_folder(encoder))
    assert (
        tokenizer.decode(tokenizer.encode("e\N{COMBINING ACUTE ACCENT}"))
        == "\N{LATIN SMALL LETTER E WITH ACUTE}"
    )
