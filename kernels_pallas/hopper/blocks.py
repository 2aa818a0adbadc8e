"""Blocks of a sequence's tokens, and where their slots lie in its pages.

An entry of the table that names no page is read as the layer's first page; its slots are dead. Where a table
is that of a stripe, pages, slots and blocks are counted in the stripe; positions are those of the sequence.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.contract import Stripe

# Keys of a block: the M of one wgmma.
BLOCK_TOKENS = 64
NO_POSITION = jnp.iinfo(jnp.int32).max


class Piece(NamedTuple):
    """Slots of a block that lie in one page.

    Attributes:
        page: of the pool.
        slot: the first, in the page.
        place: the first, in the block.
    """

    page: jax.Array
    slot: jax.Array | int
    place: int


class Walk(NamedTuple):
    """Static sizes of what is walked over.

    Attributes:
        page_size: slots of a page.
        num_pages: pages of a layer.
        table_width: pages that the table names for a sequence.
    """

    page_size: int
    num_pages: int
    table_width: int

    @property
    def block_pages(self) -> int:
        """Pages that a block's tokens lie in."""
        return max(1, BLOCK_TOKENS // self.page_size)

    def read_table(self, table_ref: Any, seq: jax.Array, block: jax.Array) -> tuple[jax.Array, ...]:
        """Return the table's entries for a block of a sequence; of whatever page where it has none."""
        first_page = lax.div(block * BLOCK_TOKENS, jnp.int32(self.page_size))
        columns = (lax.rem(first_page + i, jnp.int32(self.table_width)) for i in range(self.block_pages))
        return tuple(table_ref[seq, column] for column in columns)

    def is_page(self, entry: jax.Array) -> jax.Array:
        """Return whether an entry names a page."""
        return (entry >= 0) & (entry < self.num_pages)

    def named(self, entries: tuple[jax.Array, ...]) -> jax.Array:
        """Return a bit for each entry that names a page."""
        bits = jnp.int32(0)
        for i, entry in enumerate(entries):
            bits |= jnp.where(self.is_page(entry), jnp.int32(1 << i), jnp.int32(0))
        return bits

    def pieces(
        self, block: jax.Array, entries: tuple[jax.Array, ...], page_offset: jax.Array, num_slots: int
    ) -> Iterator[Piece]:
        """Cut a block into pieces of `num_slots`, a divisor of 64, that each lie in one page."""
        for place in range(0, BLOCK_TOKENS, num_slots):
            entry = entries[place // self.page_size]
            page = page_offset + jnp.where(self.is_page(entry), entry, 0)
            slot = place % self.page_size
            if self.page_size > BLOCK_TOKENS:
                slot = lax.rem(block * BLOCK_TOKENS, jnp.int32(self.page_size)) + place
            yield Piece(page, slot, place)

    def position(self, slot: jax.Array, stripe: Stripe | None) -> jax.Array:
        """Return the position of a slot of the sequence's pages, or of those of the stripe."""
        if stripe is None:
            return slot
        page = lax.div(slot, jnp.int32(self.page_size))
        return slot + (page * (stripe.stride - 1) + stripe.offset) * self.page_size

    def live_positions(
        self,
        slots: jax.Array,
        block: jax.Array,
        named: jax.Array,
        first_seen: jax.Array,
        end: jax.Array,
        stripe: Stripe | None = None,
    ) -> jax.Array:
        """Return the positions of a block's slots, `NO_POSITION` where none is held that a query sees."""
        positions = self.position(block * BLOCK_TOKENS + slots, stripe)
        is_live = (positions >= first_seen) & (positions < end)
        is_live &= ((named >> (slots // min(self.page_size, BLOCK_TOKENS))) & 1) == 1
        return jnp.where(is_live, positions, NO_POSITION)

    def is_whole(
        self,
        block: jax.Array,
        named: jax.Array,
        first_seen: jax.Array,
        end: jax.Array,
        stripe: Stripe | None = None,
    ) -> jax.Array:
        """Return whether all of a block's slots are live."""
        first, last = (self.position(block * BLOCK_TOKENS + i, stripe) for i in (0, BLOCK_TOKENS - 1))
        is_whole = named == (1 << self.block_pages) - 1
        return is_whole & (first >= first_seen) & (last < end)


def divide(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Return quotient and rest of numbers that are not negative."""
    return lax.div(number, jnp.int32(divisor)), lax.rem(number, jnp.int32(divisor))


def slots_of_block(num_slots: int, layout: Any) -> jax.Array:
    """Return 0, 1, ... in a layout."""
    return plgpu.broadcasted_iota(jnp.int32, (num_slots,), 0, layout=layout)


def refusal_of_page_size(page_size: int) -> str | None:
    """Return why pages are not taken; None where they are."""
    if page_size >= 8 and (BLOCK_TOKENS % page_size == 0 or page_size % BLOCK_TOKENS == 0):
        return None
    return f"the GPU kernel takes pages of 8, 16, 32 or a multiple of 64 tokens, got {page_size}; use 'xla'"
