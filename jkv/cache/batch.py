"""The new tokens of one step: where each goes and which of them are real.

Knows positions and slots; made by `Cache.begin`.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.pytree import State, pytree, static

Outputs = Literal["last", "all"]


@pytree
class TokenBatch(State):
    """The new tokens of one step, padded per sequence to `time`; made by `Cache.begin`.

    Attributes:
        starts: tokens that each sequence held before the step.
        lens: new tokens of each sequence; 0 for an idle or refused row.
        positions: place of each token in its sequence.
        is_valid: False for padding, which writes nothing and attends to nothing.
        slots: for each cache group, each token's place among its layer's pages, `page * page_size + slot`;
            -1 where it is not stored.
        outputs: the rows whose logits a model computes: each sequence's last new token, or all.
    """

    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    positions: Int[Array, "seq time"]
    is_valid: Bool[Array, "seq time"]
    slots: tuple[Int[Array, "seq time"], ...]
    outputs: Outputs = static(default="last")

    @property
    def last(self) -> Int[Array, " seq"]:
        """Index in `time` of each sequence's last new token; 0 for an idle row."""
        return jnp.maximum(self.lens - 1, 0)

    def select(self, x: Float[Array, "seq time *rest"]) -> Float[Array, "seq *time_rest"]:
        """Return what `outputs` asks for: `x` at each sequence's last new token, or all of `x`."""
        if self.outputs == "all":
            return x
        index = self.last.reshape(-1, *([1] * (x.ndim - 1)))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]
