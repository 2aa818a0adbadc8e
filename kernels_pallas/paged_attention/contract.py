"""What paged attention may be called with, and how its work is tiled.

Checks shapes only; every refusal names the sizes.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class Tiling:
    """How the walk over a sequence's tokens is cut; fixed by configuration, never by the batch.

    Attributes:
        block_tokens: keys and values that one step of the online softmax takes, rounded to whole pages.
        query_tokens: queries of one sequence that a ragged step is cut into, at most.
        num_buffers: blocks that a TPU's kernel keeps at once: one in use, the others on their way.
        split_tokens: keys and values that a GPU's kernel sums by themselves, at least; a table has at most
            128 such splits.
        num_programs: programs that share a GPU's work; an H200 has room for two on 132 multiprocessors each.
    """

    block_tokens: int = 128
    query_tokens: int = 16
    num_buffers: int = 2
    split_tokens: int = 512
    num_programs: int = 264


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "scale", "zero"], meta_fields=["entry"]
)
@dataclass(frozen=True)
class Pages:
    """Keys or values of all layers in the `plain` pool layout (KV-head-major within a page).

    The head that a slot stands for is, with entries read as float32:

    - `data`, where there is no scale;
    - `data * scale`, the scale of a token and head `[page, kv_head, slot]` or of a head `[kv_head]`;
    - `data * scale + zero`, one of each for every run of channels, `[page, kv_head, slot, run]`, or for every
      channel and run of slots, `[page, kv_head, run, head_dim]`.

    Attributes:
        data: entries; where they are not numbers of its dtype, `entry` says what its bytes hold.
        scale: see above.
        zero: see above.
        entry: the bits of one fp8 number, or two 4-bit integers, `i` low and `i + head_dim / 2` high.
    """

    data: Num[Array, "page kv_head slot width"]
    scale: Float[Array, "..."] | None = None
    zero: Float[Array, "page kv_head ..."] | None = None
    entry: Literal["number", "fp8_e4m3", "fp8_e5m2", "int4"] = "number"

    @property
    def head_dim(self) -> int:
        """Entries of a head."""
        return self.data.shape[-1] * (2 if self.entry == "int4" else 1)

    @property
    def run_slots(self) -> int | None:
        """Slots of a run; None where a slot has scales of its own."""
        if self.zero is None or self.zero.shape[2] == self.data.shape[2]:
            return None
        return self.data.shape[2] // self.zero.shape[2]

    def read(self, data: Num[Array, "*rows width"]) -> Num[Array, "*rows head_dim"]:
        """Return entries taken from `data` as numbers, in whatever dtype holds them."""
        if self.entry == "number":
            return data
        if self.entry == "int4":
            return jnp.concatenate([data & 15, data >> 4], axis=-1)
        return jax.lax.bitcast_convert_type(data, _FP8[self.entry])


class PagedArguments(NamedTuple):
    """The arrays of one call.

    Attributes:
        query: the new tokens, padded per sequence.
        keys: pages of all layers.
        values: the same for values.
        page_table: page `p` of a sequence is in column `p` modulo the width; ids past `num_pages` or
            negative: none.
        starts: tokens that each sequence held before this step.
        lens: new tokens of each sequence, already written to the pool; 0 for an idle row.
        page_offset: the pool's page that is page 0 of this layer.
        recent: where keys are scaled by runs of slots, the keys as they were given, from the first position
            on of the run that `starts` lies in; a query sees the keys of its own run here, not in `keys`.
    """

    query: Float[Array, "seq time q_head head_dim"]
    keys: Pages
    values: Pages
    page_table: Int[Array, "seq max_pages"]
    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    page_offset: Int[Array, ""] | int
    recent: Float[Array, "seq kv_head recent head_dim"] | None = None


def check(arguments: PagedArguments, *, num_pages: int, window: int | None) -> None:
    """Refuse shapes that no implementation computes.

    Raises:
        ValueError: sizes disagree; the message names them.
    """
    query, keys, values = arguments.query, arguments.keys, arguments.values
    if keys.data.shape[:3] != values.data.shape[:3] or keys.head_dim != values.head_dim:
        raise ValueError(
            "key and value pools must have the same pages, KV heads, slots and head_dim, "
            f"got {(*keys.data.shape[:3], keys.head_dim)} and {(*values.data.shape[:3], values.head_dim)}"
        )
    if query.shape[-1] != keys.head_dim:
        raise ValueError(f"query head_dim must equal the pool's, got {query.shape[-1]} and {keys.head_dim}")
    total_pages, num_kv_heads, _, _ = keys.data.shape
    if query.shape[2] % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query.shape[2]} and {num_kv_heads}"
        )
    if total_pages % num_pages:
        raise ValueError(f"pool pages must be a multiple of pages a layer, got {total_pages} and {num_pages}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    for pages in (keys, values):
        _check_scale(pages)
    _check_recent(arguments)


def _check_recent(arguments: PagedArguments) -> None:
    span, recent, time = arguments.keys.run_slots, arguments.recent, arguments.query.shape[1]
    if arguments.values.run_slots is not None:
        raise ValueError("values must be scaled by token, head or channels, got scales of runs of slots")
    if (span is None) != (recent is None):
        raise ValueError(
            "recent keys are given where keys are scaled by runs of slots, got one without the other"
        )
    if span is not None and recent is not None:
        needed = span if time == 1 else (-(-time // span) + 1) * span
        if recent.shape[2] != needed:
            raise ValueError(
                f"a step of {time} tokens in runs of {span} needs {needed} recent keys, got {recent.shape[2]}"
            )


def _check_scale(pages: Pages) -> None:
    rows = pages.data.shape[:3]
    is_floating = jnp.issubdtype(pages.data.dtype, jnp.floating)
    if pages.entry != "number" and pages.data.dtype != jnp.uint8:
        raise ValueError(f"a pool of {pages.entry} must hold uint8, got {pages.data.dtype}")
    if pages.scale is None:
        if not is_floating:
            raise ValueError(f"a pool of {pages.data.dtype} must have scales, got none")
        return
    if pages.zero is not None:
        of_slots = pages.scale.shape[:2] == rows[:2] and pages.scale.shape[3] == pages.head_dim
        of_slots = of_slots and rows[2] % pages.scale.shape[2] == 0
        if pages.zero.shape != pages.scale.shape or not (pages.scale.shape[:3] == rows or of_slots):
            raise ValueError(
                f"scales and zero points must have one shape, {rows} and runs of channels, or {rows[:2]} and "
                f"runs of slots and {pages.head_dim}, got {pages.scale.shape} and {pages.zero.shape}"
            )
    elif pages.scale.shape not in (rows, rows[1:2]):
        raise ValueError(f"scales must have the shape {rows} or {rows[1:2]}, got {pages.scale.shape}")
