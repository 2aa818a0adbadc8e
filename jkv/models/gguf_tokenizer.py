"""The tokenizer that a GGUF file's metadata describes.

Knows the `tokenizer.*` keys; reads no file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from jkv.models.fields import INDEX, NUMBER, SWITCH, TEXT, check_fields, many
from jkv.models.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from jkv.models.tokenizer_spec import SPACE, TokenizerSpec, find_unencodable_bytes

_PREFIX = "tokenizer.ggml."
# Values of `token_type`. Neither unknown nor control tokens are parsed in plain text; user-defined ones are.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# A file names one end token, or two, where chat models end a turn and a text in different ways. So control
# tokens of these names end a generation too.
_END_NAMES = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
}
# In harmony (gpt-oss) <|end|> closes a message of several: where both of these are, they end instead.
_HARMONY_END_NAMES = {"<|return|>", "<|call|>"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
}
_KINDS = {
    "pre": TEXT,
    "tokens": many(TEXT),
    "token_type": many(INDEX),
    "scores": many(NUMBER),
    "merges": many(TEXT),
    "add_space_prefix": SWITCH,
    "add_bos_token": SWITCH,
    **dict.fromkeys((*_NAMED_IDS.values(), *_END_KEYS), INDEX),
}
# What the ids are in a SentencePiece file that does not say.
_SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def spec_from_gguf(metadata: Mapping[str, Any]) -> TokenizerSpec:
    """Rebuild a tokenizer of model "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE).

    Another model, an unknown pre-tokenizer or arrays that do not fit each other are a ValueError.
    """
    keys: dict[str, Any] = {
        key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)
    }
    model = keys.get("model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f'tokenizer.ggml.model must be "gpt2" or "llama", got {model!r}')
    check_fields(keys, _KINDS, _PREFIX)
    check_fields(metadata, {"tokenizer.chat_template": TEXT}, "")
    is_byte_level = model == "gpt2"
    keys = keys if is_byte_level else {**_SENTENCEPIECE_IDS, **keys}
    _check_ids(keys)
    if is_byte_level:
        pre_tokenizer = _find_pre_tokenizer(keys)
        adds_bos = pre_tokenizer.adds_bos
        encoder = _make_byte_level(keys, pre_tokenizer)
    else:
        adds_bos = True
        encoder = _make_sentencepiece(keys)
    texts = _read_texts(keys)
    added = _add_tokens(encoder, texts, _read_types(keys))
    control_tokens = {token_id: token for token_id, token in added.items() if token.special}
    return TokenizerSpec(
        encoder=encoder,
        rest_encoder=encoder,
        texts=tuple(texts),
        control_tokens=control_tokens,
        added_ids=frozenset(added),
        is_byte_level=is_byte_level,
        # The key counts for SentencePiece only, as in llama.cpp.
        strips_first_space=not is_byte_level and keys.get("add_space_prefix", True),
        unencodable_bytes=find_unencodable_bytes(texts) if is_byte_level else frozenset(),
        bos_id=keys.get("bos_token_id"),
        eos_ids=_find_eos_ids(keys, control_tokens),
        adds_bos=keys.get("add_bos_token", adds_bos),
        named_tokens={name: texts[keys[key]] for name, key in _NAMED_IDS.items() if key in keys},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _check_ids(keys: Mapping[str, Any]) -> None:
    num_tokens = len(_read_texts(keys))
    for key in (*_NAMED_IDS.values(), *_END_KEYS):
        if keys.get(key, 0) >= num_tokens:
            raise ValueError(
                f"{_PREFIX}{key} must be below the number of tokens, {num_tokens}, got {keys[key]}"
            )


def _find_pre_tokenizer(keys: Mapping[str, Any]) -> PreTokenizer:
    name = keys.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, got {name!r}")
    return PRE_TOKENIZERS[name]


def _make_byte_level(keys: Mapping[str, Any], pre_tokenizer: PreTokenizer) -> tokenizers.Tokenizer:
    # A token may begin with a space of its own, so the separator is the first space after that.
    cuts = [(merge, merge.find(" ", 1)) for merge in _read_array(keys, "merges")]
    encoder = tokenizers.Tokenizer(
        _make_bpe(
            _read_texts(keys),
            [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts],
            ignore_merges=pre_tokenizer.keeps_whole_words,
        )
    )
    encoder.normalizer = pre_tokenizer.build_normalizer()
    encoder.pre_tokenizer = pre_tokenizer.build()
    return encoder


def _make_sentencepiece(keys: Mapping[str, Any]) -> tokenizers.Tokenizer:
    texts = _read_texts(keys)
    scores = _read_array(keys, "scores", len(texts))
    types = _read_types(keys)
    pieces = {text: score for text, score, kind in zip(texts, scores, types, strict=True) if kind == _NORMAL}
    encoder = tokenizers.Tokenizer(
        _make_bpe(
            texts,
            _rank_merges(pieces),
            unk_token=texts[keys["unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell = normalizers.Replace(" ", SPACE)
    has_prefix = keys.get("add_space_prefix", True)
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if has_prefix else spell
    return encoder


def _rank_merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece's rule as ranked merges: join the neighbours whose union scores highest."""
    best_first = sorted(pieces, key=lambda text: -pieces[text])
    cuts = ((text[:cut], text[cut:]) for text in best_first for cut in range(1, len(text)))
    return [(left, right) for left, right in cuts if left in pieces and right in pieces]


def _make_bpe(texts: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    unknown = next(
        (part for merge in merges for part in (*merge, "".join(merge)) if part not in vocabulary), None
    )
    if unknown is not None:
        raise ValueError(f"tokenizer.ggml.merges must join tokens into tokens, but {unknown!r} is none")
    return models.BPE(vocab=vocabulary, merges=merges, **options)


def _add_tokens(
    encoder: tokenizers.Tokenizer, texts: Sequence[str], types: Sequence[int]
) -> dict[int, AddedToken]:
    kinds = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    added = {
        token_id: AddedToken(text, special=kinds[kind], normalized=False)
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in kinds
    }
    encoder.add_special_tokens([token for token in added.values() if token.special])
    encoder.add_tokens([token for token in added.values() if not token.special])
    encoder.encode_special_tokens = True
    return added


def _find_eos_ids(keys: Mapping[str, Any], control_tokens: Mapping[int, AddedToken]) -> tuple[int, ...]:
    named = [keys[key] for key in _END_KEYS if key in keys]
    names = {token.content for token in control_tokens.values()}
    is_harmony = names >= _HARMONY_END_NAMES
    ends = (_END_NAMES - {"<|end|>"}) | _HARMONY_END_NAMES if is_harmony else _END_NAMES
    known = [token_id for token_id, token in control_tokens.items() if token.content in ends]
    return tuple(dict.fromkeys([*named, *known]))


def _read_texts(keys: Mapping[str, Any]) -> list[str]:
    return _read_array(keys, "tokens")


def _read_types(keys: Mapping[str, Any]) -> list[int]:
    num_tokens = len(_read_texts(keys))
    return _read_array(keys, "token_type", num_tokens) if "token_type" in keys else [_NORMAL] * num_tokens


def _read_array(keys: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    if name not in keys:
        raise ValueError(f"the metadata must have {_PREFIX}{name}; the file has no vocabulary")
    if length is not None and len(keys[name]) != length:
        raise ValueError(f"{_PREFIX}{name} must have one entry per token, {length}, got {len(keys[name])}")
    return keys[name]
