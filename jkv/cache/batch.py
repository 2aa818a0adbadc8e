"""The new tokens of one step: where each goes and which of them are real.

Knows positions and slots; made by `Cache.begin`.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jkv.pytree import State, pytree, static

Outputs = Literal["last", "all"]


@dataclass(frozen=True)
class Pieces:
    """A step cut into runs of tokens of one sequence each; inside one program.

    Attributes:
        sequences: of each piece.
        tokens: index of its first token among all of the step's, padding included.
        starts: position of that token.
        lens: tokens; 0 for a piece that is not needed.
        size: tokens of a piece at most.
        places: of each of the step's tokens, `piece * size + token`; None where pieces are the step's rows.
        is_valid: of the step's tokens.
    """

    sequences: Int[Array, " piece"]
    tokens: Int[Array, " piece"]
    starts: Int[Array, " piece"]
    lens: Int[Array, " piece"]
    size: int
    places: Int[Array, " token"] | None
    is_valid: Bool[Array, "row time"]

    def of_sequences(self, x: Shaped[Array, "seq *rest"]) -> Shaped[Array, "piece *rest"]:
        """Return each piece's entry of what sequences have."""
        return x if self.places is None else x[self.sequences]

    def cut(self, x: Shaped[Array, "row time *rest"]) -> Shaped[Array, "piece size *rest"]:
        """Return the tokens of each piece; past its end there may be anything."""
        if self.places is None:
            return x
        flat = x.reshape(-1, *x.shape[2:])
        index = self.tokens[:, None] + jnp.arange(self.size, dtype=jnp.int32)[None]
        return flat.at[jnp.clip(index, 0, flat.shape[0] - 1)].get(mode="promise_in_bounds")

    def join(self, x: Float[Array, "piece size *rest"], fill: float) -> Float[Array, "row time *rest"]:
        """Put the tokens of pieces back into the step's rows, with `fill` as padding."""
        if self.places is None:
            return x
        flat = x.reshape(-1, *x.shape[2:]).at[self.places].get(mode="promise_in_bounds")
        is_valid = self.is_valid[0].reshape(-1, *[1] * (flat.ndim - 1))
        return jnp.where(is_valid, flat, jnp.asarray(fill, flat.dtype))[None]


@pytree
class TokenBatch(State):
    """The new tokens of one step, by `Cache.begin` or `Cache.begin_ragged`.

    Padded, each sequence has a row of `time` tokens. Ragged, one row holds the tokens of all sequences, one
    sequence after the other, and padding at its end: prefill chunks and single tokens share a step.

    Attributes:
        starts: tokens that each sequence held before the step.
        lens: new tokens of each sequence; 0 for an idle or refused one.
        positions: place of each token in its sequence.
        is_valid: False for padding, which writes nothing and attends to nothing.
        slots: for each cache group, each token's place among its layer's pages, `page * page_size + slot`;
            -1 where it is not stored.
        sequences: of each token of a ragged step; None in a padded one.
        offsets: place of each sequence's first token in a ragged step.
        outputs: the rows whose logits a model computes: each sequence's last new token, or all.
    """

    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    positions: Int[Array, "row time"]
    is_valid: Bool[Array, "row time"]
    slots: tuple[Int[Array, "row time"], ...]
    sequences: Int[Array, "row time"] | None = None
    offsets: Int[Array, " seq"] | None = None
    outputs: Outputs = static(default="last")

    @property
    def last(self) -> Int[Array, " seq"]:
        """Index in `time` of each sequence's last new token; that of any token for an idle one."""
        last = self.lens - 1 if self.offsets is None else self.offsets + self.lens - 1
        return jnp.clip(last, 0, self.positions.shape[1] - 1)

    def pieces(self, size: int) -> Pieces:
        """Cut the step: a padded one into its rows, a ragged one into pieces of at most `size` tokens."""
        num_rows, time = self.positions.shape
        if self.sequences is None or self.offsets is None:
            rows = jnp.arange(num_rows, dtype=jnp.int32)
            return Pieces(rows, rows * time, self.starts, self.lens, time, None, self.is_valid)
        counts = -(-self.lens // size)
        ends = jnp.cumsum(counts)
        # As many as there can be: each sequence may have one that is not full.
        pieces = jnp.arange(time // size + self.lens.shape[0], dtype=jnp.int32)
        # Other methods are loops of kernels, in every layer.
        rows = jnp.searchsorted(ends, pieces, side="right", method="compare_all").astype(jnp.int32)
        rows = jnp.minimum(rows, self.lens.shape[0] - 1)
        past = (pieces - (ends - counts)[rows]) * size
        own = self.sequences[0]
        within = jnp.arange(time, dtype=jnp.int32) - self.offsets[own]
        places = jnp.clip((ends - counts)[own] * size + within, 0, pieces.shape[0] * size - 1)
        return Pieces(
            sequences=rows,
            tokens=self.offsets[rows] + past,
            starts=self.starts[rows] + past,
            lens=jnp.clip(self.lens[rows] - past, 0, size),
            size=size,
            places=places,
            is_valid=self.is_valid,
        )

    def select(self, x: Float[Array, "row time *rest"]) -> Float[Array, "seq *time_rest"]:
        """Return what `outputs` asks for: `x` at each sequence's last new token, or all of `x`."""
        if self.outputs == "all":
            return x
        if self.sequences is not None:
            return x[0].at[self.last].get(mode="promise_in_bounds")
        index = self.last.reshape(-1, *([1] * (x.ndim - 1)))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]
