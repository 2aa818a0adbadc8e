"""What a model's files say about its tokenizer, whatever kind of files they are.

Knows ids, their bytes and the policy for a text's ends; splits no text.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's spelling of a space


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as its files describe it.

    Attributes:
        encoder: splits a text from its beginning; leaves control tokens unparsed, ignores its post-processor.
        rest_encoder: the same for text after a control token, where a prefix for beginnings only is not due.
        texts: per id, the token as the files spell it; None for an id without a token.
        control_tokens: tokens that text may not form by itself, and that decoding hides.
        added_ids: tokens whose spelling is their text, control tokens included.
        is_byte_level: other tokens are spelled in GPT-2's byte alphabet; otherwise as SentencePiece does.
        strips_first_space: decoding drops one space at the beginning, the one that encoding put there.
        unencodable_bytes: bytes of UTF-8 that no token covers and that `encoder` would drop.
        bos_id: token that begins a text; None if there is none.
        eos_ids: tokens that end a generation.
        adds_bos: a text begins with `bos_id`.
        named_tokens: what chat templates call `bos_token`, `eos_token` and so on.
        chat_template: its source; None if there is none.
    """

    encoder: tokenizers.Tokenizer
    rest_encoder: tokenizers.Tokenizer
    texts: tuple[str | None, ...]
    control_tokens: Mapping[int, tokenizers.AddedToken]
    added_ids: frozenset[int]
    is_byte_level: bool
    strips_first_space: bool
    unencodable_bytes: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    named_tokens: Mapping[str, str]
    chat_template: str | None

    def has_token(self, token_id: int) -> bool:
        """Whether the id is a token's."""
        return 0 <= token_id < len(self.texts) and self.texts[token_id] is not None

    def text(self, token_id: int) -> str:
        """The token as the files spell it; an id without a token is a ValueError."""
        text = self.texts[token_id] if self.has_token(token_id) else None
        if text is None:
            raise ValueError(
                f"a token id must name one of this vocabulary's {len(self.texts)}, got {token_id}"
            )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; they may end within a character."""
        text = self.text(token_id)
        if token_id in self.added_ids:
            return text.encode()
        if self.is_byte_level:
            return _byte_level_bytes(text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace(SPACE, " ").encode()


def find_unencodable_bytes(texts: Iterable[str | None]) -> frozenset[int]:
    """Bytes that the byte-level tokens `texts` do not spell; those that UTF-8 never uses do not count."""
    never_used = {0xC0, 0xC1, *range(0xF5, 0x100)}
    spelled = set(texts)
    return frozenset(byte for char, byte in _BYTE_ALPHABET.items() if char not in spelled) - never_used


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_ALPHABET[char] for char in text)
    except KeyError:  # A token that its files spell as it is, such as a run of spaces.
        return text.encode()


def _make_byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _make_byte_alphabet()
