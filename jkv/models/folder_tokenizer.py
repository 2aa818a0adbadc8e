"""The tokenizer of a model's folder: tokenizer.json and the small files beside it.

Knows Hugging Face's files; splits no text.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jkv.models.fields import (
    INDEX,
    SWITCH,
    TEXT,
    Kind,
    check_fields,
    either,
    many,
    read_json_object,
)
from jkv.models.tokenizer_spec import SPACE, TokenizerSpec, find_unencodable_bytes

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_ADDED_SWITCHES = ("lstrip", "normalized", "rstrip", "single_word", "special")


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _are_added(value: Any) -> bool:
    """Whether a value is what `AddedToken` takes, by id."""
    if not isinstance(value, dict) or not all(map(str.isdecimal, value)):
        return False
    tokens = list(value.values())
    return all(map(_is_content, tokens)) and all(
        name == "content" or (name in _ADDED_SWITCHES and isinstance(field, bool))
        for token in tokens
        for name, field in token.items()
    )


def _is_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


_TOKEN = either(TEXT, Kind("a mapping whose content is text", _is_content))
_ADDED = Kind(f"a mapping of token ids to mappings of content and {', '.join(_ADDED_SWITCHES)}", _are_added)
_KINDS = {
    **dict.fromkeys(_NAMES, _TOKEN),
    "added_tokens_decoder": _ADDED,
    "additional_special_tokens": many(_TOKEN),
    "add_bos_token": SWITCH,
    "chat_template": either(TEXT, many(Kind("a mapping of name and template", _is_template))),
    "eos_token_id": either(INDEX, many(INDEX)),
}


def spec_from_folder(path: str | Path) -> TokenizerSpec:
    """Read tokenizer.json and, where they are, the configuration files and the chat template beside it.

    A folder without tokenizer.json is a ValueError, and so are a file that holds something else and a
    tokenizer that spells its tokens neither in bytes nor as SentencePiece does.
    """
    folder = Path(path)
    encoder = read_encoder(folder)
    # As the library writes it, whatever form the file has.
    raw = json.loads(encoder.to_str())
    config = _read_fields(folder / "special_tokens_map.json") | _read_fields(folder / "tokenizer_config.json")
    named_tokens = {name: _text(config[name]) for name in _NAMES if config.get(name)}
    added = _list_added_tokens(encoder, config, named_tokens.values())
    _prepare(encoder, added)
    decoders = _steps(raw.get("decoder"))
    is_byte_level = _is_byte_level(decoders)
    texts = _list_texts(encoder)
    bos_id, adds_bos = _find_bos(encoder, _steps(raw.get("post_processor")), config)
    drops_unknown = is_byte_level and raw["model"].get("unk_token") is None
    return TokenizerSpec(
        encoder=encoder,
        rest_encoder=_make_rest_encoder(encoder, raw, added),
        texts=texts,
        control_tokens={token_id: token for token_id, token in added.items() if token.special},
        added_ids=frozenset(added),
        is_byte_level=is_byte_level,
        strips_first_space=any(_strips_first_space(decoder) for decoder in decoders),
        unencodable_bytes=find_unencodable_bytes(texts) if drops_unknown else frozenset(),
        bos_id=bos_id,
        eos_ids=_find_eos_ids(folder, encoder.token_to_id(named_tokens.get("eos_token", ""))),
        adds_bos=adds_bos,
        named_tokens=named_tokens,
        chat_template=_find_chat_template(folder, config),
    )


def read_encoder(folder: Path) -> tokenizers.Tokenizer:
    """Read a folder's tokenizer.json.

    Raises:
        ValueError: there is none, or it describes no tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        hint = ""
        if (folder / "tokenizer.model").exists():
            hint = "; convert its tokenizer.model with save_pretrained of transformers' fast tokenizer"
        raise ValueError(f"{folder} must have a tokenizer.json{hint}")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises no class of its own.
        raise ValueError(f"{file} must describe a tokenizer, got {error}") from error
    if not encoder.get_vocab_size():
        raise ValueError(f"{file} must describe a tokenizer, got one without tokens")
    return encoder


def _read_fields(file: Path) -> dict[str, Any]:
    """Return the fields of a file beside it that say something; none where there is no such file."""
    given = read_json_object(file) if file.exists() else {}
    fields = {name: value for name, value in given.items() if value is not None}
    check_fields(fields, _KINDS, f"{file}: ")
    return fields


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _list_added_tokens(
    encoder: tokenizers.Tokenizer, config: Mapping[str, Any], named_tokens: Iterable[str]
) -> dict[int, AddedToken]:
    """The tokens outside the model, by id; any file may make one a control token."""
    added = encoder.get_added_tokens_decoder()
    for number, fields in config.get("added_tokens_decoder", {}).items():
        is_special = fields.get("special", False) or (int(number) in added and added[int(number)].special)
        added[int(number)] = AddedToken(**{**fields, "special": is_special})
    for text in (*named_tokens, *map(_text, config.get("additional_special_tokens", ()))):
        token_id = encoder.token_to_id(text)
        if token_id is not None and not (token_id in added and added[token_id].special):
            added[token_id] = AddedToken(text, normalized=False, special=True)
    return added


def _prepare(encoder: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> None:
    for token_id, token in sorted(added.items()):
        add = encoder.add_special_tokens if token.special else encoder.add_tokens
        add([token])
        if encoder.token_to_id(token.content) != token_id:
            raise ValueError(
                f"token {token.content!r} must have one id, got {token_id} in tokenizer_config.json "
                f"and {encoder.token_to_id(token.content)} in tokenizer.json"
            )
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()


def _make_rest_encoder(
    encoder: tokenizers.Tokenizer, raw: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    steps = _steps(raw.get("pre_tokenizer"))
    firsts = [step for step in steps if step.get("prepend_scheme") == "first"]
    if not firsts:
        return encoder
    for step in firsts:
        step["prepend_scheme"] = "never"
    rest_encoder = tokenizers.Tokenizer.from_str(json.dumps(raw))
    _prepare(rest_encoder, added)
    return rest_encoder


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A pipeline's steps in order, those of nested sequences included."""
    return list(_walk(node)) if node else []


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = next((node[key] for key in ("decoders", "processors", "pretokenizers") if key in node), None)
    if parts is None:
        yield node
    else:
        for part in parts:
            yield from _walk(part)


def _is_byte_level(decoders: list[dict[str, Any]]) -> bool:
    kinds = {decoder["type"] for decoder in decoders}
    spells_spaces = any(
        decoder["type"] == "Replace" and decoder["pattern"] == {"String": SPACE} for decoder in decoders
    )
    if "ByteLevel" not in kinds and "Metaspace" not in kinds and not spells_spaces:
        raise ValueError(
            f"tokenizer.json must decode by ByteLevel or undo SentencePiece's spaces, got {sorted(kinds)}"
        )
    return "ByteLevel" in kinds


def _strips_first_space(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Metaspace":
        return decoder["prepend_scheme"] != "never"
    return decoder["type"] == "Strip" and decoder["start"] > 0


def _list_texts(encoder: tokenizers.Tokenizer) -> tuple[str | None, ...]:
    ids = encoder.get_vocab()
    texts: list[str | None] = [None] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text
    return tuple(texts)


def _find_bos(
    encoder: tokenizers.Tokenizer, processors: list[dict[str, Any]], config: Mapping[str, Any]
) -> tuple[int | None, bool]:
    """The token that begins a text, and whether one does: the configuration says, or the post-processor."""
    prefix = _list_prefix(processors)
    if len(prefix) > 1:
        raise ValueError(f"the post-processor must put at most one token before a text, got {prefix}")
    text = prefix[0] if prefix else _text(config.get("bos_token") or "")
    adds_bos = config.get("add_bos_token")
    return encoder.token_to_id(text), bool(prefix if adds_bos is None else adds_bos)


def _list_prefix(processors: list[dict[str, Any]]) -> list[str]:
    for processor in processors:
        if processor["type"] == "TemplateProcessing":
            before = itertools.takewhile(lambda piece: "SpecialToken" in piece, processor["single"])
            return [piece["SpecialToken"]["id"] for piece in before]
    return []


def _find_eos_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    listed = _read_fields(folder / "generation_config.json").get("eos_token_id")
    ids = [eos_id, *(listed if isinstance(listed, list) else [listed])]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
