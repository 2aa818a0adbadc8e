"""Control tokens in text: where they stand, and how text is kept from forming them.

Knows the spellings of one vocabulary's control tokens; encodes nothing.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken

_PRIVATE_USE = range(0xE000, 0xF900)


class ControlTokens:
    """Finds control tokens: the leftmost, and of those the longest.

    Args:
        tokens: the control tokens by id, with their rules about the blanks beside them.
    """

    def __init__(self, tokens: Mapping[int, AddedToken]):
        self._tokens = {
            token.content: (token_id, token) for token_id, token in tokens.items() if token.content
        }
        texts = sorted(self._tokens, key=len, reverse=True)
        spellings = "|".join(_spelling(self._tokens[text][1]) for text in texts) or "(?!)"
        self._pattern = re.compile(spellings)
        self._beginning = re.compile(f"(?={spellings})")
        self._heads = {text[:end] for text in texts for end in range(1, len(text))}
        self._tails = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = len(texts[0]) if texts else 0

    def split(self, text: str) -> list[int | str]:
        """Cut `text` into ids of control tokens and the plain text between them; no part is empty."""
        parts: list[int | str] = []
        position = 0
        for match in self._pattern.finditer(text):
            token_id, token = self._tokens[match.group()]
            before = text[position : match.start()]
            parts += [before.rstrip() if token.lstrip else before, token_id]
            position = match.end()
            if token.rstrip:
                position += _num_leading_blanks(text[position:])
        return [part for part in [*parts, text[position:]] if part != ""]

    def cover(self, value: Any, mark: str) -> Any:
        """Put `mark` into the strings of a nested `value` so that none helps to form a control token.

        A string gets it inside every control token that it holds, begins (at its end) or ends (at its
        beginning). So no control token that `split` finds has its first or last character from `value`,
        however its strings are joined, stripped or wrapped in other text. (A control token of one character
        has no inside.) Strings without such text stay as they are, so that a template may look into them; so
        do keys that are identifiers and hold no control token, by which it finds what it looks for.
        """
        if isinstance(value, str):
            return self._cover_text(value, mark)
        if isinstance(value, Mapping):
            return {self._cover_key(key, mark): self.cover(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item, mark) for item in value]
        return value

    def _cover_key(self, key: Any, mark: str) -> Any:
        is_name = isinstance(key, str) and key.isidentifier() and not self._pattern.search(key)
        return key if is_name else self.cover(key, mark)

    def _cover_text(self, text: str, mark: str) -> str:
        cuts = {match.start() + 1 for match in self._beginning.finditer(text)}
        start, end = _num_leading_blanks(text), len(text.rstrip())
        for size in range(1, min(self._longest, end - start + 1)):
            if text[end - size : end] in self._heads:
                cuts.add(end - size + 1)
            if text[start : start + size] in self._tails:
                cuts.add(start + size - 1)
        borders = [0, *sorted(cuts), len(text)]
        return mark.join(text[left:right] for left, right in pairwise(borders))


def choose_mark(*values: Any) -> str:
    """Choose a private-use character that no string in the nested `values` holds."""
    used = {char for value in values for text in _strings(value) for char in text}
    return next(char for char in map(chr, _PRIVATE_USE) if char not in used)


def _spelling(token: AddedToken) -> str:
    text = re.escape(token.content)
    return rf"(?<!\w){text}(?!\w)" if token.single_word else text


def _num_leading_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings([key, item])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
