"""`jkv tokenize`: a text's tokens, or the text of tokens.

Reads a model's tokenizer and none of its weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jkv.cli.options import Flag, parse_alone
from jkv.models.load import load_tokenizer
from jkv.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show a text's tokens."""

    model: str
    """Bundled model's name, GGUF file, folder or hub id."""
    text: str
    """Text to encode."""
    special: Flag = False
    """Text that spells a control token is that token."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> None:
    """Tokenize as the command line says, and print the tokens."""
    arguments = parse_alone(Arguments, argv, "tokenize")
    tokenizer = load_tokenizer(arguments.model)
    shown = tokenize(tokenizer, arguments.text, special=arguments.special)
    if arguments.json:
        print(json.dumps(shown))
        return
    for token, spelling in zip(shown["tokens"], shown["spellings"], strict=True):
        print(f"{token:8} {spelling!r}")


def tokenize(tokenizer: Tokenizer, text: str, *, special: bool = False) -> dict[str, Any]:
    """Return a text's token ids, how the model's files spell them, and what they decode to.

    Raises:
        ValueError: the text cannot be encoded.
    """
    tokens = tokenizer.encode(text, special=special)
    return {
        "text": text,
        "tokens": tokens,
        "spellings": [tokenizer.token_text(token) for token in tokens],
        "decoded": tokenizer.decode(tokens, skip_special=False),
    }
