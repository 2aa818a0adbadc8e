"""The pools that a walk reads, of keys, values, latents or their rotated parts, as it sees them.

Knows what lies in one page of one pool; no call.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.paged_attention.contract import Pages
from kernels_pallas.slots import Columns, as_matrices, columns_of

LANES = 128
# Rows of queries are whole tiles of 8 sublanes.
SUBLANES = 8


class Stored(NamedTuple):
    """The arrays of one pool, or what a kernel has in their place.

    Attributes:
        data: entries; `[page, kv_head, row, 128]`.
        scale: float32; of tokens, `[page, kv_head * row, 128]`, or of heads, `[kv_head, 1, 128]`; of runs,
            bfloat16 `[page, kv_head, row, 128]`; None where there are none.
        zero: zero points of runs.
    """

    data: Any
    scale: Any = None
    zero: Any = None


@dataclasses.dataclass(frozen=True)
class Runs:
    """How the scales of runs lie, and their zero points.

    Attributes:
        count: runs of channels of a head, or runs of slots of a page.
        span: channels or slots of one.
        columns: how they lie in a page.
        rows: of a page.
    """

    count: int
    span: int
    columns: Columns
    rows: int


@dataclasses.dataclass(frozen=True)
class Part:
    """What is known of a pool before a call runs.

    Attributes:
        columns: how the slots of a page lie.
        rows: of a page.
        head_dim: entries of a head.
        dtype: of what is stored.
        entry: what the entries are; see `Pages`.
        scaling: whose scales they have: of runs of a token's channels, or of each channel's in runs of slots.
        runs: where these are of runs.
    """

    columns: Columns
    rows: int
    head_dim: int
    dtype: Any
    entry: str
    scaling: Literal["token", "head", "channels", "slots"] | None
    runs: Runs | None = None

    @property
    def halves(self) -> int:
        """Entries of a byte, of which each is in a half of its head."""
        return 2 if self.entry == "int4" else 1

    @property
    def num_parts(self) -> int:
        """Rows of 128 lanes that a slot's entries take where they are numbers."""
        return self.halves * self.columns.num_parts

    @property
    def lanes(self) -> int:
        """Lanes of a slot's entries where they are numbers, one row beside another."""
        return self.num_parts * LANES

    @property
    def place_lanes(self) -> int:
        """Lanes of a half's entries at one of the places of a row."""
        return self.columns.num_parts * LANES // self.columns.share

    @property
    def is_raw(self) -> bool:
        """Whether entries are the numbers that they stand for."""
        return self.scaling is None and self.entry == "number"


def part_of(pages: Pages) -> Part:
    """Return what is known of a pool."""
    columns = columns_of(*pages.data_shape, LANES)
    form = (columns, pages.data.shape[2], pages.head_dim, pages.data.dtype, pages.entry)
    if pages.scale is None:
        return Part(*form, None)
    if pages.zero is None:
        return Part(*form, "head" if pages.scale.ndim == 1 else "token")
    assert pages.sizes.scales is not None
    num_slots, count = pages.sizes.scales
    of_runs, rows = columns_of(num_slots, count, LANES), pages.scale.shape[2]
    if pages.run_slots is not None:
        return Part(*form, "slots", Runs(num_slots, pages.run_slots, of_runs, rows))
    return Part(*form, "channels", Runs(count, pages.head_dim // count, of_runs, rows))


def stored_of(pages: Pages) -> Stored:
    """Return the arrays of a pool as a kernel takes them."""
    return Stored(pages.data, _scale_rows(pages), pages.zero)


def _scale_rows(pages: Pages) -> Array | None:
    if pages.scale is None or pages.zero is not None:
        return pages.scale
    if pages.scale.ndim == 1:
        return jnp.broadcast_to(
            pages.scale.astype(jnp.float32)[:, None, None], (pages.scale.shape[0], 1, LANES)
        )
    matrices = as_matrices(pages.scale)
    return matrices.reshape(matrices.shape[0], -1, LANES)


def refused_pages(name: str, pages: Pages, *, is_latent: bool = False) -> str | None:
    """Return why no kernel reads a pool, in one sentence; None where they do."""
    rows, lanes = pages.data.shape[2:]
    if lanes != LANES:
        return f"{name} must lie in rows of {LANES} lanes, got {lanes}; use the pool layout 'tpu'"
    if pages.zero is not None and (is_latent or pages.entry != "int4"):
        return f"{name} must have no zero points, got {pages.entry} entries; use int8"
    part = part_of(pages)
    if pages.run_slots not in (None, 8, 16, 32):
        return f"runs of slots of {name} must be of 8, 16 or 32 slots, got {pages.run_slots}"
    runs = part.runs if part.scaling == "channels" else None
    if runs is not None and runs.count % part.halves:
        return f"runs of channels of {name} must be of a half of a head each, got {runs.count} runs"
    if runs is not None and runs.columns.num_rows * runs.columns.share != pages.page_size:
        return (
            f"the scales of a page of {name} must fill their rows of {LANES} lanes, got {runs.count} "
            f"for each of {pages.page_size} slots; use larger pages"
        )
    if part.is_raw and part.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{name} without scales must be bfloat16 or float32, got {part.dtype}"
    # What is multiplied is bfloat16, whose tiles are 16 rows high, or float32.
    least = SUBLANES if part.dtype == jnp.float32 else 2 * SUBLANES
    num_rows = part.columns.num_rows
    if num_rows * part.columns.share != pages.page_size or rows != num_rows * part.columns.num_parts:
        return (
            f"a page of {name} must fill its {rows} rows of {LANES} lanes, got {pages.page_size} slots of "
            f"{pages.head_dim} entries; use larger pages"
        )
    if num_rows % least:
        return (
            f"a page of {name} must be a multiple of {least} rows of {LANES} lanes, got {num_rows} for "
            f"{pages.page_size} slots of {pages.head_dim} entries; use larger pages"
        )
    if pages.scale is None or part.scaling != "token":
        return None
    if pages.page_size % LANES and LANES % pages.page_size:
        return f"page_size must divide {LANES} or be a multiple of it, got {pages.page_size}"
    scale_rows = math.prod(pages.scale.shape[2:-1])
    if scale_rows != max(1, pages.page_size // LANES):
        return (
            f"the scales of a page of {name} must fill their {scale_rows} rows of {LANES} lanes, got "
            f"{pages.page_size} slots; use a page_size that is a power of two"
        )
    return None
