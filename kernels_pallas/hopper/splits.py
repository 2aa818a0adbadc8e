"""Pieces of steps and splits of sequences, which programs attend to by themselves, and what merges them.

What there is to do is worked out on the device beside the kernel, so cost follows the tokens held. Splits
begin at multiples of their size: no result depends on the rest of the batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas.hopper.accumulators import LOG2_E, OF_COLUMNS, OF_ROWS, full, log_sum_of, tall, wide
from kernels_pallas.hopper.blocks import BLOCK_TOKENS, divide
from kernels_pallas.paged_attention.contract import Stripe

# New tokens that are attended from together: of more, the first need not walk to where the last is.
PIECE_TOKENS = 16
# Partial sums are merged one after another: more splits would take longer to merge than to attend.
_MAX_SPLITS = 128
# More than any sequence holds.
_WHOLE = 2**30
# Of partial results: they are held beside the cache, as many for each sequence as its table is long.
_MAX_PARTIAL_BYTES = 2**30
# Partial results whose loads are in flight at once while a sequence is merged, and entries of one.
_MERGED_AT_ONCE, _MERGED_ENTRIES = 8, 2048


class Cut(NamedTuple):
    """How sequences are cut.

    Attributes:
        split: tokens of a split.
        max_splits: splits of a sequence at most.
        capacity: tokens that a sequence's table names.
        page_size: slots of a page.
    """

    split: int
    max_splits: int
    capacity: int
    page_size: int


class Splits(NamedTuple):
    """What there is to do, worked out on the device.

    Attributes:
        work: of each split its sequence, first block, blocks, first token that a query sees, and tokens held;
            past the last split zero.
        counts: the number of splits, the pool's page that is page 0 of the layer, and the stripe's stride and
            offset where there is one.
        of_sequences: of each sequence its first split, and how many it has.
        limits: the first position that a query row does not see; 0 for padding.
    """

    work: Int[Array, "split 5"]
    counts: Int[Array, " count"]
    of_sequences: Int[Array, "seq 2"]
    limits: Int[Array, "seq row"]


def in_pieces(arguments: Any, *queries: str) -> Any:
    """Cut the steps of sequences into pieces, which are sequences of their own.

    Args:
        arguments: `PagedArguments`, or what has the same names.
        queries: names of the new tokens' arrays.
    """
    starts, lens = arguments.starts, arguments.lens
    num_seqs, time = arguments.query.shape[:2]
    size = min(time, PIECE_TOKENS)
    num_pieces = -(-time // size)
    past = jnp.arange(num_pieces, dtype=jnp.int32)[None] * size

    def cut_steps(query: jax.Array) -> jax.Array:
        query = jnp.pad(query, ((0, 0), (0, num_pieces * size - time), (0, 0), (0, 0)))
        return query.reshape(num_seqs * num_pieces, size, *query.shape[2:])

    return arguments._replace(
        **{name: cut_steps(getattr(arguments, name)) for name in queries},
        page_table=jnp.repeat(arguments.page_table, num_pieces, axis=0),
        starts=(starts[:, None] + past).reshape(-1),
        lens=jnp.clip(lens[:, None] - past, 0, size).reshape(-1),
    )


def held_of_pieces(arguments: Any) -> Int[Array, " piece"]:
    """Return for each piece of `in_pieces` what its sequence holds after the step."""
    return jnp.repeat(arguments.starts + arguments.lens, -(-arguments.query.shape[1] // PIECE_TOKENS))


def joined(out: Shaped[Array, "piece token ..."], time: int) -> Shaped[Array, "seq time ..."]:
    """Put the results of pieces together again."""
    num_pieces = -(-time // PIECE_TOKENS)
    return out.reshape(out.shape[0] // num_pieces, -1, *out.shape[2:])[:, :time]


def cut(max_pages: int, page_size: int, split_tokens: int, time: int) -> Cut:
    """Return splits of `split_tokens`, or of more where all that a table names would make too many.

    Where steps are cut into pieces, these are enough to share the work: one split holds all of a sequence.
    """
    capacity = max_pages * page_size
    if time > PIECE_TOKENS:
        return Cut(_WHOLE, 1, capacity, page_size)
    split = max(split_tokens, -(-capacity // _MAX_SPLITS))
    # Whole pages, which are those of a stripe.
    whole = max(BLOCK_TOKENS, page_size)
    split = -(-split // whole) * whole
    # What is seen may begin within a split.
    return Cut(split, -(-capacity // split) + 1, capacity, page_size)


def refusal_of_partial_results(sizes: Cut, num_seqs: int, numbers: int) -> str | None:
    """Return why partial results, of so many float32 for a sequence's split, are not taken."""
    num_bytes = 4 * num_seqs * sizes.max_splits * numbers
    if num_bytes <= _MAX_PARTIAL_BYTES:
        return None
    return (
        f"the GPU kernel takes partial results of at most {_MAX_PARTIAL_BYTES} bytes, got {num_bytes} of "
        f"{num_seqs} sequences, or pieces of them, in {sizes.max_splits} splits; use 'xla'"
    )


def plan(
    starts: Int[Array, " seq"],
    lens: Int[Array, " seq"],
    page_offset: Int[Array, ""] | int,
    sizes: Cut,
    stripe: Stripe | None = None,
    *,
    time: int,
    group: int,
    padding: int,
    window: int | None,
    held: Int[Array, " seq"] | None = None,
) -> Splits:
    """Return what there is to do for rows of `group` heads for each of `time` tokens, and some padding.

    Of pieces of a sequence, `held` is what the sequence holds after all of them; None is what each ends with.
    """
    num_seqs = starts.shape[0]
    ends = starts + lens
    # A table names the latest pages: those before are written over.
    stride = 1 if stripe is None else stripe.stride
    first_seen = jnp.maximum((ends if held is None else held) - sizes.capacity * stride, 0)
    if window is not None:
        first_seen = jnp.maximum(first_seen, starts - window + 1)
    first_slot, end_slot = slots_between(first_seen, ends, sizes.page_size, stripe)
    first_split = first_slot // sizes.split
    counts = jnp.where(lens > 0, jnp.maximum(-(-end_slot // sizes.split) - first_split, 0), 0)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    first = last - counts

    # Scattered, since what each sequence has is known, and a search is a loop of kernels on a GPU.
    split = jnp.arange(sizes.max_splits, dtype=jnp.int32)[None]
    begin = (first_split[:, None] + split) * sizes.split
    first_block = jnp.maximum(begin, first_slot[:, None]) // BLOCK_TOKENS
    end_block = -(-jnp.minimum(begin + sizes.split, end_slot[:, None]) // BLOCK_TOKENS)
    seq = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    columns = seq, first_block, end_block - first_block, first_seen[:, None], ends[:, None]
    rows = jnp.stack(jnp.broadcast_arrays(*columns), axis=-1).astype(jnp.int32)
    num_splits = num_seqs * sizes.max_splits
    nowhere = num_splits + seq * sizes.max_splits + split
    place = jnp.where(split < counts[:, None], first[:, None] + split, nowhere)
    work = jnp.zeros((num_splits, len(columns)), jnp.int32)
    work = work.at[place].set(rows, mode="drop", unique_indices=True)

    return Splits(
        work=work,
        counts=jnp.stack([jnp.asarray(x, jnp.int32) for x in (last[-1], page_offset, *(stripe or ()))]),
        of_sequences=jnp.stack([first, counts], axis=1).astype(jnp.int32),
        limits=limits(starts, lens, time=time, group=group, padding=padding),
    )


def slots_between(
    first: Int[Array, "..."], end: Int[Array, "..."], page_size: int, stripe: Stripe | None
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Return the first slot that holds a position from `first` to `end`, and that after the last."""
    if stripe is None:
        return first, end
    # Counted in the stripe, whole pages: what they hold besides is masked.
    pages = first // page_size, -(-end // page_size)
    first, end = (stripe.pages_before(page) * page_size for page in pages)
    return first, end


def limits(
    starts: Int[Array, " seq"], lens: Int[Array, " seq"], *, time: int, group: int, padding: int
) -> Int[Array, "seq row"]:
    """Return for rows as in `plan` the first position that each does not see; 0 where it is no query."""
    steps = jnp.arange(time, dtype=jnp.int32)[None]
    of_tokens = jnp.where(steps < lens[:, None], starts[:, None] + steps + 1, 0)
    return jnp.pad(jnp.repeat(of_tokens, group, axis=1), ((0, 0), (0, padding))).astype(jnp.int32)


def merge(
    out: Float[Array, "split part row column"],
    log_sum: Float[Array, "split part query"],
    of_sequences: Int[Array, "seq 2"],
    *,
    query_axis: int,
    name: str,
) -> tuple[Float[Array, "seq part row column"], Float[Array, "seq part query"]]:
    """Return each sequence's attended values and log-sum-exp; zero and -inf where it has no split.

    Args:
        out: of each split, values of a part's queries.
        log_sum: of each split and query; what lies past the last split is not read.
        of_sequences: see `Splits`.
        query_axis: whether rows, 0, or columns, 1, are queries; the others are channels.
        name: of the kernel.
    """
    num_seqs, (_, num_parts, *matrix) = of_sequences.shape[0], out.shape
    # Rows are a multiple of 64, as wgmma left them.
    block = min(64, _MERGED_ENTRIES // matrix[query_axis])
    merged, merged_log_sum = plgpu.kernel(
        functools.partial(_merge_kernel, block, query_axis),
        out_type=[
            jax.ShapeDtypeStruct((num_seqs, *out.shape[1:]), jnp.float32),
            jax.ShapeDtypeStruct((num_seqs, *log_sum.shape[1:]), jnp.float32),
        ],
        grid=(num_seqs, num_parts, matrix[1 - query_axis] // block),
        grid_names=("seq", "part", "channels"),
        kernel_name=name,
    )(out, log_sum, of_sequences)
    return merged, merged_log_sum


def _merge_kernel(
    block: int,
    query_axis: int,
    out_ref,  # float32 [split, part, row, column]   GMEM
    log_sum_ref,  # float32 [split, part, query]     GMEM
    of_sequences_ref,  # int32 [seq, 2]              GMEM
    merged_ref,  # float32 [seq, part, row, column]  GMEM
    merged_log_sum_ref,  # float32 [seq, part, query] GMEM
):
    seq, part, step = (lax.axis_index(name) for name in ("seq", "part", "channels"))
    channels = pl.ds(step * block, block)
    place = (channels, slice(None)) if query_axis else (slice(None), channels)
    num_queries = log_sum_ref.shape[-1]
    of_queries, spread = ((OF_ROWS, wide), (OF_COLUMNS, tall))[query_axis]
    first, count = of_sequences_ref[seq, 0], of_sequences_ref[seq, 1]

    def add(index: jax.Array, carry: Any) -> Any:
        peak, total, sums = carry
        loaded = []
        for i in range(_MERGED_AT_ONCE):
            split = first + jnp.minimum(index * _MERGED_AT_ONCE + i, count - 1)
            log_sum = plgpu.load(log_sum_ref.at[split, part], layout=of_queries, optimized=False)
            log_sum += jnp.where(index * _MERGED_AT_ONCE + i < count, 0.0, -jnp.inf)
            out = plgpu.load(out_ref.at[split, part, *place], layout=plgpu.Layout.WGMMA, optimized=False)
            loaded.append((log_sum * LOG2_E, out))
        new_peak = functools.reduce(jnp.maximum, (log_sum for log_sum, _ in loaded), peak)
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        keep = jnp.exp2(peak - shift)
        total, sums = total * keep, sums * spread(keep, block)
        for log_sum, out in loaded:
            weight = jnp.exp2(log_sum - shift)
            total, sums = total + weight, sums + out * spread(weight, block)
        return new_peak, total, sums

    shape = (block, num_queries) if query_axis else (num_queries, block)
    empty = (
        full((num_queries,), -jnp.inf, of_queries),
        full((num_queries,), 0.0, of_queries),
        full(shape, 0.0, plgpu.Layout.WGMMA),
    )
    steps, _ = divide(count + _MERGED_AT_ONCE - 1, _MERGED_AT_ONCE)
    peak, total, sums = lax.fori_loop(0, steps, add, empty)
    merged_ref.at[seq, part, *place][...] = sums / spread(jnp.where(total == 0, 1.0, total), block)

    @pl.when(step == 0)
    def _write_log_sum() -> None:
        merged_log_sum_ref.at[seq, part][...] = log_sum_of(peak, total)
