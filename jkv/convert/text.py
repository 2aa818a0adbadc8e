"""A text as rows of tokens: those to learn from, drawn by seed, and those held out.

Knows token ids; no model.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

HELD_OUT = 0.125


@dataclass(frozen=True)
class SplitText:
    """Tokens of a text, the last of them held out.

    Attributes:
        tokens: the first part, from which rows are drawn.
        held_out: the last part, cut into rows.
    """

    tokens: Int[np.ndarray, " token"]
    held_out: Int[np.ndarray, "row time"]

    @property
    def rows(self) -> Int[np.ndarray, "row time"]:
        """The first part, cut into rows."""
        return _cut(self.tokens, self.held_out.shape[1])


def split_text(tokens: Int[np.ndarray, " token"], length: int, *, held_out: float = HELD_OUT) -> SplitText:
    """Return the text with its last share held out.

    Args:
        tokens: of the text.
        length: tokens of a row.
        held_out: share of the text, above 0 and below 1.

    Raises:
        ValueError: the share is none, or a part has no whole row.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"the held-out share must be above 0 and below 1, got {held_out}")
    if length < 2:
        raise ValueError(f"a row must have at least 2 tokens, got {length}")
    border = len(tokens) - round(held_out * len(tokens))
    # One more than a row, for the last token's successor.
    if min(border, len(tokens) - border) <= length:
        raise ValueError(
            f"a text must have more than {length} tokens to learn from and as many held out, "
            f"got {border} and {len(tokens) - border}; give a longer text or shorter rows"
        )
    return SplitText(tokens[:border], _cut(tokens[border:], length))


def draw_rows(text: SplitText, *, seed: int, first: int, count: int) -> Int[np.ndarray, "row successor"]:
    """Return rows `first` to `first + count` - 1 of a seed's endless order, each with its last successor.

    Every row of the text comes once an epoch; each epoch has its own order, and cuts the text elsewhere.
    """
    length = text.held_out.shape[1]
    num_rows, slack = divmod(len(text.tokens) - 1, length)
    rows = []
    for index in range(first, first + count):
        epoch, place = divmod(index, num_rows)
        generator = np.random.default_rng((seed, epoch))
        offset = generator.integers(slack + 1)
        start = offset + generator.permutation(num_rows)[place] * length
        rows.append(text.tokens[start : start + length + 1])
    return np.stack(rows)


def _cut(tokens: Int[np.ndarray, " token"], length: int) -> Int[np.ndarray, "row time"]:
    whole = len(tokens) // length
    return tokens[: whole * length].reshape(whole, length)
