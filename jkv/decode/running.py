"""A batch that is being decoded: which of its sequences run, and the pages that they get.

Knows a step function and the host's books; nothing of requests and what their tokens mean.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.decode.batch import chunks
from jkv.decode.loop import RUNNING, STOP, WAITING, DecodeState, decode, prefill, start
from jkv.decode.pages import PageBooks
from jkv.models.step import StepFunction


class RunningBatch:
    """Sequences on the device; where they share a pool, those that it has no room for wait.

    The host may be a step behind the device: a sequence that has ended there writes nothing more.

    Attributes:
        state: the latest decode state.
        finish: why each sequence ended as far as the host has been told; RUNNING or WAITING before that.
        books: of the pool's pages; None where every sequence owns its pages.
    """

    def __init__(
        self,
        step: StepFunction,
        weights: Any,
        state: DecodeState,
        prompts: Sequence[Sequence[int]],
        books: PageBooks | None,
        *,
        buckets: Sequence[int],
        vocab_size: int,
        place: Callable[..., Any],
    ):
        """Let all sequences wait.

        Args:
            step: see `jkv.decode.generate.Decoding`.
            weights: what `step` takes first.
            state: all of whose sequences wait; consumed.
            prompts: token ids of each.
            books: of the pages of the state's cache.
            buckets: widths of prefill steps.
            vocab_size: columns of the logits.
            place: puts a tree of arrays, and the logical axes that they begin with, where the weights are.
        """
        self.state = state
        self.finish = np.full(len(prompts), WAITING)
        self.books = books
        self._step, self._weights = step, weights
        self._prompts = prompts
        self._buckets = buckets
        self._vocab_size = vocab_size
        self._place = place

    def admit(self) -> bool:
        """Start the waiting sequences that there is room for, in their order; returns whether any runs."""
        fresh: list[int] = []
        for row in self._rows(WAITING):
            # None overtakes: a long sequence would wait for ever while short ones come.
            if self.books is not None and not self.books.start(row):
                break
            fresh.append(row)
        if fresh:
            self._prefill(fresh)
        return bool((self.finish == RUNNING).any())

    def reserve(self, num_tokens: int) -> None:
        """Give each running sequence pages for more tokens, up to all that it may hold."""
        self._extend({row: num_tokens for row in self._rows(RUNNING)})

    def advance(self, num_steps: int) -> None:
        """Queue at most `num_steps` steps, and the pages for them.

        There are fewer where all sequences end, or one of them while others wait for its pages.
        """
        self.reserve(num_steps)
        has_waiting = bool((self.finish == WAITING).any())
        self.state = decode(self._step, self._weights, self.state, num_steps, has_waiting)

    def tell(self, finish: np.ndarray) -> None:
        """Take in which sequences have ended, and take their pages back."""
        self.finish = np.array(finish)
        if self.books is not None:
            for row in np.flatnonzero((finish != RUNNING) & (finish != WAITING)):
                self.books.end(int(row))

    def stop(self, row: int, num_new: int) -> None:
        """End a sequence with reason STOP after `num_new` tokens, and take its pages back."""
        # Not written by index: a mesh with Explicit axes has no rule for that.
        is_row = self._place(np.arange(len(self.finish)) == row)
        state = self.state
        self.state = state.replace(
            finish=jnp.where(is_row, STOP, state.finish), num_new=jnp.where(is_row, num_new, state.num_new)
        )
        finish = self.finish.copy()
        finish[row] = STOP
        self.tell(finish)

    def _rows(self, finish: int) -> list[int]:
        return np.flatnonzero(self.finish == finish).tolist()

    def _extend(self, tokens: dict[int, int]) -> None:
        """Give rows pages for more tokens, and tell the device where any was needed."""
        if self.books is None:
            return
        # All of them: each call has an effect.
        if any([self.books.extend(row, count) for row, count in tokens.items()]):
            tables = self._place(self.books.tables(), ("seq", None))
            self.state = self.state.replace(cache=self.state.cache.assign(tables))

    def _prefill(self, rows: list[int]) -> None:
        """Read the prompts of rows into the cache, and sample the first token of each."""
        self._extend({row: len(self._prompts[row]) for row in rows})
        is_fresh = np.isin(np.arange(len(self.finish)), rows)
        prompts = [prompt if fresh else [] for prompt, fresh in zip(self._prompts, is_fresh, strict=True)]
        cache = self.state.cache
        logits = self._place(jnp.zeros((len(prompts), self._vocab_size), jnp.float32), ("seq", "vocab"))
        for chunk in chunks(prompts, self._buckets):
            tokens, lens = self._place((chunk.tokens, chunk.lens))
            logits, cache = prefill(self._step, self._weights, cache, tokens, lens, logits)
        self.state = start(self.state.replace(cache=cache), logits, self._place(is_fresh))
        self.finish[rows] = RUNNING
