"""What a walk takes beside pools: pieces of the step's rows, and their queries in the order of its rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import Stripe
from kernels_pallas.tpu.parts import LANES, Part
from kernels_pallas.tpu.sizes import DIGITS, Sizes

# Larger than any position, and small enough that a window is added without overflow.
HIDDEN = 2**30
_UNPADDED = ((0, 0),) * 3


class Pieces(NamedTuple):
    """The pieces of a step, int32 each, or their refs; past them as many of nothing as share a tile.

    Attributes:
        starts: tokens before a piece's.
        lens: its tokens.
        firsts: the first position that it sees.
        begins: of the pages of the stripe, the first that it sees; 0 where it sees none.
        ends: of the slots of the stripe, the end of those that it sees; the same.
        following: the next piece that has a tile, which may be the piece itself.
        holed: 1 where its sequence sees entries of the table that name no page.
    """

    starts: Any
    lens: Any
    firsts: Any
    begins: Any
    ends: Any
    following: Any
    holed: Any


def pieces_of(
    table: Int[Array, "seq max_pages"],
    starts: Int[Array, " seq"],
    lens: Int[Array, " seq"],
    stripe: Stripe,
    sizes: Sizes,
    window: int | None,
) -> Pieces:
    """Return the pieces of a step."""
    page_size = sizes.shape.page_size
    past = jnp.arange(sizes.pieces_per_seq, dtype=jnp.int32)[None] * sizes.query_tokens
    piece_lens = jnp.clip(lens[:, None] - past, 0, sizes.query_tokens).reshape(-1)
    piece_starts = (starts[:, None] + past).reshape(-1)
    # What is further back than the table is wide has been written over.
    kept = jnp.maximum(starts + lens - sizes.shape.max_pages * stripe.stride * page_size, 0)
    firsts = jnp.repeat(kept, sizes.pieces_per_seq)
    if window is not None:
        firsts = jnp.maximum(firsts, piece_starts - window + 1)
    piece_ends = piece_starts + piece_lens
    begins = stripe.pages_before(jax.lax.div(firsts, jnp.int32(page_size)))
    last = stripe.pages_before(jax.lax.div(piece_ends + (page_size - 1), jnp.int32(page_size))) - 1
    filled = piece_ends - (last * stripe.stride + stripe.offset) * page_size
    ends = last * page_size + jnp.minimum(filled, page_size)
    is_seen = (piece_lens > 0) & (firsts < piece_ends) & (begins <= last)
    begins, ends = jnp.where(is_seen, begins, 0), jnp.where(is_seen, ends, 0)
    holed = jnp.repeat(_has_holes(table, begins, last, is_seen, sizes), sizes.pieces_per_seq)
    padding = (0, sizes.num_pieces + sizes.pieces_at_once - piece_lens.shape[0])
    index = jnp.arange(sizes.num_pieces + sizes.pieces_at_once, dtype=jnp.int32)
    has_tiles = index < sizes.num_pieces if sizes.pieces_at_once > 1 else jnp.pad(is_seen, padding)
    following = jnp.where(has_tiles, index, sizes.num_pieces)
    given = (piece_starts, piece_lens, firsts, begins, ends)
    arrays = (jnp.pad(array, padding) for array in given)
    following = jax.lax.cummin(following, reverse=True)
    return Pieces(*arrays, following=following, holed=jnp.pad(holed, padding))


def _has_holes(table: Array, begins: Array, last: Array, is_seen: Array, sizes: Sizes) -> Int[Array, " seq"]:
    """Return 1 for each sequence whose pieces see an entry of its row that names no page."""
    of_seqs = (-1, sizes.pieces_per_seq)
    begin = jnp.min(jnp.where(is_seen, begins, HIDDEN).reshape(of_seqs), axis=1, keepdims=True)
    end = jnp.max(jnp.where(is_seen, last + 1, 0).reshape(of_seqs), axis=1, keepdims=True)
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    # The first page from `begin` on that has this column.
    page = begin + jnp.remainder(column - begin, table.shape[1])
    is_page = (table >= 0) & (table < sizes.num_pages)
    return jnp.any((page < end) & ~is_page, axis=1).astype(jnp.int32)


class Own(NamedTuple):
    """What the runs that a piece's queries lie in are attended to by, or its refs.

    Attributes:
        query: `[piece, kv_head, row, lane]`.
        keys: as they were given, from the first position on of the run that the piece begins in,
            `[piece, kv_head, key, lane]`.
    """

    query: Any
    keys: Any


def own_of(
    query: Float[Array, "seq time q_head head_dim"],
    recent: Float[Array, "seq kv_head recent head_dim"],
    starts: Int[Array, " seq"],
    sizes: Sizes,
) -> Own:
    """Return what pieces see of their own runs."""
    span, shape = sizes.shape.run_slots, sizes.shape
    assert span is not None
    runs = recent.reshape(*recent.shape[:2], -1, span, recent.shape[3]).swapaxes(1, 2)
    if sizes.pieces_per_seq > 1:
        past = jnp.arange(sizes.pieces_per_seq, dtype=jnp.int32)[None] * sizes.query_tokens
        # Of the runs that `recent` has.
        first = jax.lax.div(jax.lax.rem(starts, jnp.int32(span))[:, None] + past, jnp.int32(span))
        index = first[:, :, None] + jnp.arange(sizes.own_keys // span, dtype=jnp.int32)[None, None]
        index = jnp.minimum(index, runs.shape[1] - 1).reshape(index.shape[0], -1, 1, 1, 1)
        runs = jnp.take_along_axis(runs, index, axis=1)
    keys = runs.reshape(shape.num_seqs * sizes.pieces_per_seq, -1, *runs.shape[2:]).swapaxes(1, 2)
    keys = keys.reshape(*keys.shape[:2], sizes.own_keys, -1).astype(query.dtype)
    rows = _rows_of(query, sizes)
    padding = sizes.own_lanes - rows.shape[-1]
    pieces = sizes.num_pieces - keys.shape[0]
    return Own(
        jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, padding))),
        jnp.pad(keys, ((0, pieces), (0, 0), (0, 0), (0, padding))),
    )


class Query(NamedTuple):
    """The queries that are multiplied with a pool's entries, or their refs.

    Attributes:
        rows: `[piece, kv_head, row, lane]`, those of `Sizes.query_rows`; int8 where entries are multiplied as
            integers.
        unit: float32 `[piece, kv_head, row, 1]`, what 1 of the integers is; None where they are numbers.
    """

    rows: Any
    unit: Any = None


def query_of(query: Float[Array, "seq time q_head head_dim"], sizes: Sizes, part: Part) -> Query:
    """Return queries as a pool's entries take them; of 4-bit entries, each half takes one of theirs.

    The places that a slot may have in a row of lanes are told apart by rows for each, which have zeros at
    all others; but where channels have runs, which the kernel tells apart, a query stands at every place.
    """
    rows, unit = _rows_of(query, sizes), None
    if sizes.has_int8_product(part):
        rows, unit = in_integers(rows)
    halves, share, width = jnp.split(rows, part.halves, axis=-1), part.columns.share, part.place_lanes
    lanes = part.lanes // part.halves
    if part.scaling == "channels":
        halves = [jnp.pad(half, (*_UNPADDED, (0, width - half.shape[-1]))) for half in halves]
        return Query(jnp.concatenate([half for half in halves for _ in range(share)], axis=-1))
    places = [
        [jnp.pad(half, (*_UNPADDED, (begin, lanes - begin - half.shape[-1]))) for half in halves]
        for begin in range(0, share * width, width)
    ]
    return Query(jnp.concatenate([jnp.concatenate(place, axis=-1) for place in places], axis=2), unit)


def in_integers(rows: Float[Array, "piece kv_head row lane"]) -> Query:
    """Return queries as integers of 24 bits, digit by digit, each of which counts 256 of the one before it.

    The unit is a power of two: bfloat16 entries that are not below 2**-14 of the largest stay what they are.
    Where one is not finite, so are no logits.
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    most = sum(127 * 256**place for place in range(DIGITS))
    _, exponent = jnp.frexp(largest / most)
    unit = jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.ones_like(largest), exponent), jnp.nan)
    rest, digits = jnp.round(wide / unit).astype(jnp.int32), []
    for _ in range(DIGITS):
        digits.append(((rest + 128) & 255) - 128)
        rest = (rest - digits[-1]) >> 8
    return Query(jnp.concatenate(digits, axis=2).astype(jnp.int8), unit)


def _rows_of(query: Float[Array, "seq time q_head head_dim"], sizes: Sizes) -> Array:
    """Return queries as `[piece, kv_head, row, head_dim]`."""
    num_seqs, time, _, head_dim = query.shape
    time_padding = sizes.pieces_per_seq * sizes.query_tokens - time
    query = jnp.pad(query, ((0, 0), (0, time_padding), (0, 0), (0, 0)))
    shape = sizes.shape
    split = query.reshape(-1, sizes.query_tokens, shape.num_kv_heads, shape.group, head_dim).swapaxes(1, 2)
    rows = split.reshape(*split.shape[:2], -1, head_dim)
    piece_padding = sizes.num_pieces - num_seqs * sizes.pieces_per_seq
    return jnp.pad(rows, ((0, piece_padding), (0, 0), (0, sizes.rows - rows.shape[2]), (0, 0)))


def sink_rows(sinks: Float[Array, " q_head"], sizes: Sizes) -> Float[Array, "kv_head row 128"]:
    """Return the sink of each row of queries, in equal lanes."""
    per_head = sinks.astype(jnp.float32).reshape(-1, 1, sizes.shape.group)
    rows = jnp.tile(per_head, (1, sizes.query_tokens, 1)).reshape(sizes.shape.num_kv_heads, -1, 1)
    rows = jnp.pad(rows, ((0, 0), (0, sizes.rows - rows.shape[1]), (0, 0)))
    return jnp.broadcast_to(rows, (*rows.shape[:2], LANES))


def from_rows(x: Array, sizes: Sizes) -> Array:
    """Turn `[piece, kv_head, row, ...]` back into `[seq, time, q_head, ...]`."""
    shape = sizes.shape
    real = x[: shape.num_seqs * sizes.pieces_per_seq, :, : sizes.query_tokens * shape.group]
    split = real.reshape(*real.shape[:2], sizes.query_tokens, shape.group, *x.shape[3:]).swapaxes(1, 2)
    whole = split.reshape(shape.num_seqs, -1, shape.num_kv_heads * shape.group, *x.shape[3:])
    return whole[:, : shape.time]
