"""Text as it comes: tokens to text piece by piece, and the strings that stop it.

Knows one sequence; knows nothing of models or of requests.
"""

import codecs
from collections.abc import Iterable

from jkv.models.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into text, each piece as soon as it is final.

    A piece never ends within a character. All pieces and `flush()`, joined, are `tokenizer.decode` of all
    tokens.

    Args:
        tokenizer: what the tokens belong to.
        skip_special: control tokens give no text.
        is_continuation: other text came before, so that a leading space is a space.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, is_continuation: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strips_space = tokenizer.strips_first_space and not is_continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is final with it, often none. An unknown id is a ValueError."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """End the sequence; returns U+FFFD if it ends within a character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Passes text on until a stop string is complete, and nothing of a stop string.

    The first stop string to be complete wins; of several complete at the same character, the longest. So what
    is passed on does not depend on how the text is cut into pieces.

    Args:
        stops: the stop strings; an empty one is a ValueError.
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        if "" in self._stops:
            raise ValueError("a stop string must have at least one character, got an empty one")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None so far."""
        return self._matched

    def push(self, piece: str) -> str:
        """Add text; returns what can no longer be part of a stop string. After a match, nothing."""
        if self._matched is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self._matched = min(found)
            self._held = ""
            return text[: end - len(self._matched)]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """End the text; returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
