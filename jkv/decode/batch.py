"""How prompts become padded steps: chunks, buckets, capacities.

Host arithmetic on lengths; knows no model.
"""

import operator
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

# Token ids in lists or in the rows of an array.
Prompts = Iterable[Iterable[SupportsIndex]]

DEFAULT_BUCKETS = (16, 64, 256)


@dataclass(frozen=True)
class Chunk:
    """A step's new tokens, `tokens [seq, time]` int32 padded with 0, and how many of each row count."""

    tokens: np.ndarray
    lens: np.ndarray


def chunks(prompts: Sequence[Sequence[int]], buckets: Sequence[int] = DEFAULT_BUCKETS) -> Iterator[Chunk]:
    """Cut prompts into steps whose widths are all among `buckets`, so that few programs compile.

    Every row starts at its first token; a shorter prompt idles in the later chunks.
    """
    widest = max(buckets)
    longest = max(len(prompt) for prompt in prompts)
    start = 0
    while start < longest:
        width = min((b for b in buckets if b >= longest - start), default=widest)
        tokens = np.zeros((len(prompts), width), np.int32)
        lens = np.zeros(len(prompts), np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[start : start + width]
            tokens[row, : len(piece)] = piece
            lens[row] = len(piece)
        yield Chunk(tokens, lens)
        start += width


def round_capacity(num_tokens: int, page_size: int) -> int:
    """Return the least power-of-two number of pages that holds `num_tokens`, in tokens.

    Cost follows tokens written, so the rounding takes memory only, and bounds how many programs compile.
    """
    pages = -(-num_tokens // page_size)
    return page_size * (1 << (pages - 1).bit_length())


def read_prompts(prompts: Prompts, *, vocab_size: int) -> list[list[int]]:
    """Return prompts, be they lists or arrays, as lists of ids of the vocabulary.

    Raises:
        ValueError: there is no prompt, one is empty or no list of ids, or an id is outside the vocabulary.
    """
    try:
        given = list(prompts)
    except TypeError:
        raise ValueError(f"prompts must be lists of token ids, as [[1, 2], [3]], got {prompts!r}") from None
    if not given:
        raise ValueError("at least one prompt is needed, got none")
    rows = [read_ids(f"prompt {index}", prompt) for index, prompt in enumerate(given)]
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty; give at least one token")
        for token in row:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {index} has token id {token}, outside the vocabulary [0, {vocab_size})"
                )
    return rows


def read_ids(name: str, ids: Iterable[SupportsIndex]) -> list[int]:
    """Return the ids, Python's, NumPy's or JAX's, as a list.

    Raises:
        ValueError: they are not whole numbers in one list.
    """
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        raise ValueError(
            f"{name} must be a list of whole token ids, got {reprlib.repr(ids)}; "
            "a tokenizer makes ids of a text, and prompts are lists of lists, as [[1, 2], [3]]"
        ) from None
