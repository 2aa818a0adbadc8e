"""Text from prompts of token ids, piece by piece as it comes.

Puts `Stream` and the tokenizer's text together; knows no terminal and no server.
"""

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jkv.decode.batch import Prompts, read_prompts
from jkv.decode.generate import GREEDY, Decoding, StepResult, Stream, results
from jkv.decode.params import SamplingParams
from jkv.models.detokenize import Detokenizer, StopStrings
from jkv.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextStep:
    """What one step brought, one entry a sequence.

    Attributes:
        pieces: text that is final with this step, often none.
        finish_reasons: `stop` or `length` in the step that ends a sequence, and after it; None while it runs.
    """

    pieces: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]


@dataclass(frozen=True)
class TextGeneration:
    """One sequence's continuation.

    Attributes:
        text: without the stop string or the stop token; None without a tokenizer.
        tokens: up to the stop token, or to the token that completed a stop string, included.
        logprobs: log-probability of each token under the model's raw logits.
        top_logprobs: for each token's place, the likeliest tokens and their log-probabilities.
        finish_reason: `stop` or `length`; None if the stream was left early.
        seconds: host time that each token took; the first is all until it came.
    """

    text: str | None
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str | None
    seconds: tuple[float, ...]


class TextStream:
    """Text of a batch as it comes; iterating again goes on where the last time ended.

        for step in TextStream(decoding, tokenizer, [tokenizer.encode("Once")], max_new_tokens=32):
            print(step.pieces[0], end="", flush=True)

    Args:
        decoding: the model and its cache.
        tokenizer: what the tokens belong to; None gives tokens without text.
        prompts: token ids, in lists or in the rows of an array; lengths may differ.
        max_new_tokens: most new tokens of a sequence.
        sampling: for all sequences, or one each.
        stop_strings: texts that end a sequence; nothing of one is passed on.
        seed: base of the streams of requests that have no seed of their own.
        first_request: the first prompt's index among all, where they come in several batches.

    Raises:
        ValueError: as `jkv.decode.generate.generate`, or there are stop strings and no tokenizer.
    """

    def __init__(
        self,
        decoding: Decoding,
        tokenizer: Tokenizer | None,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        first_request: int = 0,
    ):
        check_stop_strings(stop_strings, tokenizer)
        rows = read_prompts(prompts, vocab_size=decoding.vocab_size)
        self._rows = [_Row(_TextEnd(tokenizer, stop_strings) if tokenizer else None) for _ in rows]
        self._stream = Stream(
            decoding,
            rows,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            first_request=first_request,
        )

    def __iter__(self) -> Iterator[TextStep]:
        for step in self._stream:
            pieces = tuple(self._advance(index, step) for index in range(len(self._rows)))
            yield TextStep(pieces, tuple(row.finish_reason for row in self._rows))

    @property
    def cache_bytes(self) -> list[int]:
        """Bytes of each sequence's pages: its own, or the most that it has held of a shared pool."""
        return [self._stream.cache_bytes(index) for index in range(len(self._rows))]

    @property
    def pages(self) -> list[tuple[int, int]] | None:
        """The most pages held at once, and all of the pool, in each cache group; None without a pool."""
        books = self._stream.books
        return None if books is None else list(zip(books.peaks, books.plan.pool_pages, strict=True))

    def generations(self) -> list[TextGeneration]:
        """Return what the sequences have generated so far."""
        # The device runs a step ahead: only tokens that arrived count.
        arrived = zip(self._rows, results(self._stream.state), strict=True)
        return [
            TextGeneration(
                text=None if row.end is None else "".join(row.pieces),
                tokens=generation.tokens[: len(row.seconds)],
                logprobs=generation.logprobs[: len(row.seconds)],
                top_logprobs=generation.top_logprobs[: len(row.seconds)],
                finish_reason=row.finish_reason,
                seconds=tuple(row.seconds),
            )
            for row, generation in arrived
        ]

    def _advance(self, index: int, step: StepResult) -> str:
        """Take a sequence's new token, if it has one, and return the text that is final with it."""
        row, token = self._rows[index], step.tokens[index]
        if token is None:
            return ""
        # The first token has taken all the time until it came, a wait for pages included.
        row.seconds.append(self._stream.step_seconds[-1] if row.seconds else sum(self._stream.step_seconds))
        row.finish_reason = step.finish_reasons[index]
        if row.end is None:
            return ""
        piece = row.end.push(token, row.finish_reason)
        if row.end.is_stopped:
            row.finish_reason = "stop"
            self._stream.stop(index)
        row.pieces.append(piece)
        return piece


def check_stop_strings(stop_strings: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise ValueError unless the stop strings are texts, and there is a tokenizer where there are any."""
    is_list = isinstance(stop_strings, Sequence) and not isinstance(stop_strings, str)
    if not is_list or not all(isinstance(stop, str) for stop in stop_strings):
        raise ValueError(f"stop_strings must be a list of texts, got {reprlib.repr(stop_strings)}")
    if stop_strings and tokenizer is None:
        raise ValueError(f"stop strings need a model with a tokenizer, got {list(stop_strings)} without one")


class _TextEnd:
    """Turns a sequence's tokens into text up to its end."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, is_continuation=True)
        self._stops = StopStrings(stop_strings)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.matched is not None

    def push(self, token: int, finish_reason: str | None) -> str:
        """Add a token and return the text that is final with it; a stop token gives none.

        Logits may be wider than the vocabulary, padded to round sizes. An id that is no token gives no text,
        so that what is sampled does not depend on whether it is shown.
        """
        has_text = finish_reason != "stop" and self._tokenizer.has_token(token)
        piece = self._detokenizer.push(token) if has_text else ""
        if finish_reason is None:
            return self._stops.push(piece)
        return self._stops.push(piece + self._detokenizer.flush()) + self._stops.flush()


@dataclass
class _Row:
    """What the host has seen of a sequence."""

    end: _TextEnd | None
    pieces: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    finish_reason: str | None = None
