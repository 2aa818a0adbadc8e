"""Keys that share scales over runs of slots: how a step meets runs that are not whole yet.

    positions   0 ......... 31 | 32 ........ 63 | 64 .. start .. end
    stored      encoded        | encoded        | as given (`Pool.recent`), encoded when slot 95 is filled

A query sees the keys of its own run as they were given, and those of earlier runs as they are encoded: what
it sees does not depend on how the tokens before it were cut into steps. Knows the arrays of one layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.batch import Pieces, TokenBatch
from jkv.cache.encoding import Stored, encode_run, to_bfloat16


class WholeRuns(NamedTuple):
    """The runs that a step's keys lie in.

    Attributes:
        stored: entries `[piece, run, kv_head, slot, width]`, and the runs' scales and zero points
            `[piece, run, kv_head, head_dim]`.
        places: of each run among the layer's pages, `page * runs_per_page + run`; -1 where it is not whole.
    """

    stored: Stored
    places: Int[Array, "piece run"]


def num_runs(time: int, span: int) -> int:
    """Return how many runs a step of `time` tokens may touch, wherever it begins."""
    return 1 if time == 1 else -(-time // span) + 1


def keys_as_given(
    recent: Float[Array, "seq kv_head recent head_dim"],
    key: Float[Array, "row time kv_head head_dim"] | None,
    batch: TokenBatch,
    pieces: Pieces,
) -> Float[Array, "piece kv_head slot head_dim"]:
    """Return the keys at the positions from each piece's first run on, for all runs that it may touch.

    Args:
        recent: each sequence's latest keys, position `p` at `p` modulo their number, two runs; from before
            the step with `key`, from after it without.
        key: the step's keys, `rounded`; None where `recent` has them.
        batch: the step.
        pieces: how it is cut, from `batch.pieces`.

    Raises:
        ValueError: without `key`, a step is wider than what `recent` holds of it.
    """
    _, num_heads, num_recent, head_dim = recent.shape
    span, time = num_recent // 2, batch.positions.shape[1]
    count = num_runs(pieces.size, span)
    if key is None and num_runs(time, span) > 2:
        raise ValueError(
            f"attention that only reads int4 keys takes steps of at most {span} tokens, got {time}; "
            "give keys and values, or cut the step"
        )
    halves = pieces.of_sequences(recent).reshape(-1, num_heads, 2, span, head_dim)
    is_second = (jax.lax.div(pieces.starts, jnp.int32(span)) % 2 == 1)[:, None, None, None]
    first, second = (halves[:, :, half] for half in (0, 1))
    past = [jnp.where(is_second, second, first), jnp.where(is_second, first, second)][:count]
    past = jnp.concatenate([*past, *[jnp.zeros_like(first)] * (count - 2)], axis=2)
    positions = (pieces.starts - pieces.starts % span)[:, None]
    positions += jnp.arange(count * span, dtype=jnp.int32)[None]
    if key is not None:
        starts = pieces.of_sequences(batch.starts)
        # Where the sequence's tokens begin among the step's.
        begins = pieces.tokens - (pieces.starts - starts)
        flat = key.reshape(-1, num_heads, head_dim)
        index = jnp.clip(begins[:, None] + positions - starts[:, None], 0, flat.shape[0] - 1)
        new = flat[index].swapaxes(1, 2).astype(recent.dtype)
        past = jnp.where((positions < starts[:, None])[:, None, :, None], past, new)
    is_held = positions < (pieces.starts + pieces.lens)[:, None]
    return jnp.where(is_held[:, None, :, None], past, jnp.zeros((), recent.dtype))


def whole_runs(
    keys: Float[Array, "piece kv_head slot head_dim"],
    page_table: Int[Array, "piece max_pages"],
    pieces: Pieces,
    *,
    page_size: int,
    span: int,
) -> WholeRuns:
    """Encode the runs of `keys_as_given`, and find the places of those that end within their piece."""
    starts, lens = pieces.starts, pieces.lens
    num_pieces, num_heads, num_slots, head_dim = keys.shape
    count = num_slots // span
    stored = encode_run(keys.reshape(num_pieces, num_heads, count, span, head_dim))
    stored = jax.tree.map(lambda array: array.swapaxes(1, 2), stored)
    begins = (starts - starts % span)[:, None] + span * jnp.arange(count, dtype=jnp.int32)[None]
    is_whole = (begins + span <= (starts + lens)[:, None]) & (lens > 0)[:, None]
    column = jax.lax.div(begins, jnp.int32(page_size)) % page_table.shape[1]
    pages = jnp.take_along_axis(page_table, column, axis=1)
    is_written = is_whole & (pages >= 0)
    within = jax.lax.div(begins % page_size, jnp.int32(span))
    return WholeRuns(stored, jnp.where(is_written, pages * (page_size // span) + within, -1))


def recent_slots(batch: TokenBatch, *, span: int) -> Int[Array, "row time"]:
    """Return the place of each new key among all sequences' recent ones; -1 where a later one is kept."""
    sequences = batch.sequences
    if sequences is None:
        sequences = jnp.arange(batch.lens.shape[0], dtype=jnp.int32)[:, None]
        ends = (batch.starts + batch.lens)[:, None]
    else:
        ends = (batch.starts + batch.lens)[sequences]
    is_kept = batch.is_valid & (batch.positions >= ends - 2 * span)
    return jnp.where(is_kept, sequences * 2 * span + batch.positions % (2 * span), -1)


def rounded(key: Float[Array, "*rows head_dim"]) -> Float[Array, "*rows head_dim"]:
    """Return keys as `Pool.recent` holds them."""
    return to_bfloat16(key.astype(jnp.float32)).astype(jnp.bfloat16)
