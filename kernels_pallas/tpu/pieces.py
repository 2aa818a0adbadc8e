"""What a walk takes beside pools: pieces of the step's rows, and their queries in the order of its rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.contract import Stripe
from kernels_pallas.tpu.parts import Part
from kernels_pallas.tpu.sizes import Sizes

# Larger than any position, and small enough that a window is added without overflow.
HIDDEN = 2**30


class Pieces(NamedTuple):
    """The pieces of a step and one past them, int32 `[piece + 1]` each, or their refs.

    Attributes:
        starts: tokens before a piece's.
        lens: its tokens.
        firsts: the first position that it sees.
        begins: of the pages of the stripe, the first that it sees; 0 where it sees none.
        ends: of the slots of the stripe, the end of those that it sees; the same.
        following: the next piece that sees any, which may be the piece itself.
    """

    starts: Any
    lens: Any
    firsts: Any
    begins: Any
    ends: Any
    following: Any


def pieces_of(
    starts: Int[Array, " seq"], lens: Int[Array, " seq"], stripe: Stripe, sizes: Sizes, window: int | None
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
    is_seen = (firsts < piece_ends) & (begins <= last)
    begins, ends = jnp.where(is_seen, begins, 0), jnp.where(is_seen, ends, 0)
    padding = (0, sizes.num_pieces + 1 - piece_lens.shape[0])
    index = jnp.arange(sizes.num_pieces + 1, dtype=jnp.int32)
    following = jnp.where(jnp.pad(is_seen, padding), index, sizes.num_pieces)
    arrays = (jnp.pad(array, padding) for array in (piece_starts, piece_lens, firsts, begins, ends))
    return Pieces(*arrays, following=jax.lax.cummin(following, reverse=True))


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


def to_rows(query: Float[Array, "seq time q_head head_dim"], sizes: Sizes, part: Part) -> Array:
    """Return queries as `[piece, kv_head, row, lane]`, padded with zeros.

    A query stands at every place that a slot has in a row of lanes; of 4-bit entries, each half of it does.
    """
    rows = _rows_of(query, sizes)
    padding = ((0, 0), (0, 0), (0, 0), (0, part.place_lanes - rows.shape[-1] // part.halves))
    halves = [jnp.pad(half, padding) for half in jnp.split(rows, part.halves, axis=-1)]
    return jnp.concatenate([half for half in halves for _ in range(part.columns.share)], axis=-1)


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


def sink_rows(sinks: Float[Array, " q_head"], sizes: Sizes) -> Float[Array, "kv_head row 1"]:
    """Return the sink of each row of queries."""
    per_head = sinks.astype(jnp.float32).reshape(-1, 1, sizes.shape.group)
    rows = jnp.tile(per_head, (1, sizes.query_tokens, 1)).reshape(sizes.shape.num_kv_heads, -1, 1)
    return jnp.pad(rows, ((0, 0), (0, sizes.rows - rows.shape[1]), (0, 0)))


def from_rows(x: Array, sizes: Sizes) -> Array:
    """Turn `[piece, kv_head, row, ...]` back into `[seq, time, q_head, ...]`."""
    shape = sizes.shape
    real = x[: shape.num_seqs * sizes.pieces_per_seq, :, : sizes.query_tokens * shape.group]
    split = real.reshape(*real.shape[:2], sizes.query_tokens, shape.group, *x.shape[3:]).swapaxes(1, 2)
    whole = split.reshape(shape.num_seqs, -1, shape.num_kv_heads * shape.group, *x.shape[3:])
    return whole[:, : shape.time]
