"""What paged attention may be called with, and how its work is tiled.

Checks shapes only; every refusal names the sizes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from kernels_pallas.slots import as_matrices, page_rows

_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class Tiling:
    """How the walk over a sequence's tokens is cut; fixed by configuration, never by the batch.

    Attributes:
        block_tokens: keys and values that one step of the online softmax takes, rounded to whole pages.
        query_tokens: queries of one sequence that a ragged step is cut into, at most.
        num_buffers: blocks that a TPU's kernel keeps at once, in use or on their way, at least; where it
            attends to several pieces at once, it keeps three for each.
        split_tokens: keys and values that a GPU's kernel sums by themselves, at least; a table has at most
            128 such splits.
        num_programs: programs that share a GPU's work, of steps of up to 16 tokens of heads; an H200 has room
            for two on 132 multiprocessors each.
        is_interpreted: whether a GPU's kernel does without what its interpreter has not: products that begin
            with the sums in registers, other shapes of what shared memory holds, and bits taken for numbers.

    Raises:
        ValueError: a number is too small.
    """

    block_tokens: int = 128
    query_tokens: int = 16
    num_buffers: int = 2
    split_tokens: int = 512
    num_programs: int = 264
    is_interpreted: bool = False

    # It is no tree of arrays, of which JAX would make others.
    def __post_init__(self) -> None:
        for name in ("block_tokens", "query_tokens", "num_buffers", "split_tokens", "num_programs"):
            number, least = getattr(self, name), 2 if name == "num_buffers" else 1
            if number < least:
                raise ValueError(f"{name} of a tiling must be at least {least}, got {number}")


@dataclass(frozen=True)
class PageSizes:
    """What a page holds.

    Attributes:
        page_size: slots.
        head_dim: entries of a head.
        scales: shape of its scales, and of its zero points, for a head: slots or runs of slots, then runs of
            channels or channels; None where it has none.
    """

    page_size: int
    head_dim: int
    scales: tuple[int, ...] | None = None


# Checked annotations would refuse the shapes that stand for arrays before a program is compiled.
@no_type_check
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "scale", "zero"], meta_fields=["entry", "stated"]
)
@dataclass(frozen=True)
class Pages:
    """Keys or values of all layers; `kernels_pallas.slots` says how a page's slots lie in its rows.

    The head that a slot stands for is, with entries read as float32:

    - `data`, where there is no scale;
    - `data * scale`, the scale of a token and head, `[page, kv_head, slot]`, or of a head, `[kv_head]`;
    - `data * scale + zero`, one of each for every run of channels, `[page, kv_head, slot, run]`, or for every
      channel and run of slots, `[page, kv_head, run, head_dim]`.

    Attributes:
        data: entries; where they are not numbers of its dtype, `entry` says what its bytes hold.
        scale: see above.
        zero: see above.
        entry: the bits of one fp8 number, or two 4-bit integers, `i` low and `i + head_dim / 2` high.
        stated: what a page holds, where shapes do not say it; None is as above, data `[..., slot, width]`.
    """

    data: Num[Array, "page kv_head row lane"]
    scale: Float[Array, "..."] | None = None
    zero: Float[Array, "page kv_head ..."] | None = None
    entry: Literal["number", "fp8_e4m3", "fp8_e5m2", "int4"] = "number"
    stated: PageSizes | None = None

    @property
    def sizes(self) -> PageSizes:
        """What a page holds."""
        if self.stated is not None:
            return self.stated
        page_size, width = self.data.shape[2:]
        scales = None if self.scale is None or self.scale.ndim == 1 else self.scale.shape[2:]
        return PageSizes(page_size, width * (2 if self.entry == "int4" else 1), scales)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.sizes.page_size

    @property
    def head_dim(self) -> int:
        """Entries of a head."""
        return self.sizes.head_dim

    @property
    def data_shape(self) -> tuple[int, int]:
        """Slots of a page, and the stored entries of one."""
        return self.page_size, self.head_dim // (2 if self.entry == "int4" else 1)

    @property
    def run_slots(self) -> int | None:
        """Slots of a run; None where a slot has scales of its own."""
        if self.zero is None or self.sizes.scales is None or self.sizes.scales[0] == self.page_size:
            return None
        return self.page_size // self.sizes.scales[0]

    def read(self, data: Num[Array, "*rows width"]) -> Num[Array, "*rows head_dim"]:
        """Return entries taken from `data` as numbers, in whatever dtype holds them."""
        if self.entry == "number":
            return data
        if self.entry == "int4":
            return jnp.concatenate([data & 15, data >> 4], axis=-1)
        return jax.lax.bitcast_convert_type(data, _FP8[self.entry])


class Stripe(NamedTuple):
    """Which of a sequence's pages a table names, where devices share them: one in `stride`, from `offset` on.

    Column `c` is page `c * stride + offset`, modulo the pages of all stripes. Slots of other pages are not
    attended to; partial results are merged by their log-sum-exp.
    """

    stride: Int[Array, ""] | int
    offset: Int[Array, ""] | int

    def pages_before(self, page: Int[Array, "*seq"]) -> Int[Array, "*seq"]:
        """Return how many pages of the stripe come before a sequence's `page`."""
        return jax.lax.div(page - self.offset + (self.stride - 1), jnp.int32(self.stride))


class PagedArguments(NamedTuple):
    """The arrays of one call.

    Attributes:
        query: the new tokens, padded per sequence.
        keys: pages of all layers.
        values: the same for values.
        page_table: page `p` of a sequence is in column `p` modulo the width; ids past `num_pages` or
            negative: none. Of more tokens than the table's pages have slots for, the latest are seen.
        starts: tokens that each sequence held before this step.
        lens: new tokens of each sequence, already written to the pool; 0 for an idle row.
        page_offset: the pool's page that is page 0 of this layer.
        recent: where keys are scaled by runs of slots, the keys as they were given, from the first position
            on of the run that `starts` lies in; a query sees the keys of its own run here, not in `keys`.
        stripe: the pages that the table names; None is all of them.
    """

    query: Float[Array, "seq time q_head head_dim"]
    keys: Pages
    values: Pages
    page_table: Int[Array, "seq max_pages"]
    starts: Int[Array, " seq"]
    lens: Int[Array, " seq"]
    page_offset: Int[Array, ""] | int
    recent: Float[Array, "seq kv_head recent head_dim"] | None = None
    stripe: Stripe | None = None


def check(arguments: PagedArguments, *, num_pages: int, window: int | None) -> None:
    """Refuse shapes that no implementation computes.

    Raises:
        ValueError: sizes disagree; the message names them.
    """
    query, keys, values = arguments.query, arguments.keys, arguments.values
    check_rows(arguments)
    for pages in (keys, values):
        check_pages(pages)
    sizes = [(*pages.data.shape[:2], pages.page_size, pages.head_dim) for pages in (keys, values)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"key and value pools must have the same pages, KV heads, slots and head_dim, got {sizes[0]} and "
            f"{sizes[1]}"
        )
    if query.shape[-1] != keys.head_dim:
        raise ValueError(f"query head_dim must equal the pool's, got {query.shape[-1]} and {keys.head_dim}")
    total_pages, num_kv_heads, _, _ = keys.data.shape
    if query.shape[2] % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query.shape[2]} and {num_kv_heads}"
        )
    check_walk(total_pages, num_pages=num_pages, window=window)
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


def check_rows(arguments: Any) -> None:
    """Refuse a call of nothing, and rows that are not those of its sequences.

    Args:
        arguments: `PagedArguments` or `LatentArguments`.

    Raises:
        ValueError: the message names the sizes.
    """
    (num_seqs, time), rows = arguments.query.shape[:2], arguments.page_table
    if 0 in (num_seqs, time, rows.shape[-1]):
        raise ValueError(
            "a call must be of at least a sequence, a new token and a column of the page table, got "
            f"{num_seqs} sequences, {time} tokens and {rows.shape[-1]} columns"
        )
    for name in ("page_table", "starts", "lens"):
        rows = getattr(arguments, name)
        if rows.shape[:1] != (num_seqs,) or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be whole numbers of {num_seqs} sequences, got {rows.dtype} of {rows.shape}"
            )


def check_walk(total_pages: int, *, num_pages: int, window: int | None) -> None:
    """Refuse a pool that is not whole layers, and a window of nothing.

    Raises:
        ValueError: the message names the sizes.
    """
    if total_pages % num_pages:
        raise ValueError(f"pool pages must be a multiple of pages a layer, got {total_pages} and {num_pages}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")


def check_pages(pages: Pages) -> None:
    """Refuse arrays that do not hold what their pages are said to.

    Raises:
        ValueError: sizes or dtypes disagree; the message names them.
    """
    _check_rows("entries", pages.data, pages, pages.data_shape)
    if pages.entry != "number" and pages.data.dtype != jnp.uint8:
        raise ValueError(f"a pool of {pages.entry} must hold uint8, got {pages.data.dtype}")
    if pages.scale is None:
        if not jnp.issubdtype(pages.data.dtype, jnp.floating):
            raise ValueError(f"a pool of {pages.data.dtype} must have scales, got none")
        return
    num_heads, page_size, scales = pages.data.shape[1], pages.page_size, pages.sizes.scales
    if pages.zero is None:
        if pages.scale.shape == (num_heads,):
            return
        if scales != (page_size,):
            raise ValueError(
                f"scales without zero points must be those of {num_heads} heads or of a page's {page_size} "
                f"slots, got the shape {pages.scale.shape}, of a page {scales}"
            )
    else:
        _check_runs(pages)
        _check_rows("zero points", pages.zero, pages, scales)
    _check_rows("scales", pages.scale, pages, scales)


def _check_runs(pages: Pages) -> None:
    sizes = pages.sizes
    match sizes.scales:
        case (sizes.page_size, runs) if sizes.head_dim % runs == 0:
            return
        case (runs, sizes.head_dim) if sizes.page_size % runs == 0:
            return
    raise ValueError(
        f"scales and zero points must be those of {sizes.page_size} slots and runs of channels, or of runs "
        f"of slots and {sizes.head_dim} channels, got {sizes.scales}"
    )


def _check_rows(what: str, array: Array, pages: Pages, shape: tuple[int, ...] | None) -> None:
    """Refuse an array that does not hold `shape` for each page and head."""
    assert shape is not None
    num_slots, num_entries = shape[0], math.prod(shape[1:])
    *outer, num_rows, num_lanes = as_matrices(array).shape
    needed = page_rows(num_slots, num_entries, num_lanes)
    if outer != [*pages.data.shape[:2]] or num_rows < needed:
        raise ValueError(
            f"{num_slots} slots of {num_entries} {what} in rows of {num_lanes} lanes need {needed} rows for "
            f"each of {pages.data.shape[:2]} pages and KV heads, got {num_rows} for each of {tuple(outer)}"
        )
