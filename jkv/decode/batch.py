"""How prompts become padded steps: chunks, buckets, capacities.

Host arithmetic on lengths; knows no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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


def check_prompts(prompts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    """Refuse what cannot be decoded.

    Raises:
        ValueError: there is no prompt, one is empty, or an id is outside the vocabulary.
    """
    if not prompts:
        raise ValueError("at least one prompt is needed, got none")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty; give at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {index} has token id {token}, outside the vocabulary [0, {vocab_size})"
                )
