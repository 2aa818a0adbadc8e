"""A walk over the pages that each sequence holds, in tiles, with an online softmax in float32.

Each piece, a few new tokens of one sequence, attends to its tiles all KV heads at once. Logits are the sum
over the pools that keys are made of, in the order of `tiles`, so that rows of pools are multiplied as they
lie. Tiles come in by a queue.

Grid: steps of `pieces_per_step` pieces, in order. VMEM: a step's queries and outputs, `num_buffers` tiles,
and the sums of one piece. SMEM: pieces, two parts of the page table, the queue's cursor. Limits:
`sizes.refusal`.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.paged_attention.contract import Pages, Stripe
from kernels_pallas.tpu.logits import logits_of
from kernels_pallas.tpu.parts import LANES, SUBLANES, Part, Stored, stored_of
from kernels_pallas.tpu.pieces import (
    HIDDEN,
    Own,
    Pieces,
    Query,
    from_rows,
    own_of,
    pieces_of,
    query_of,
    sink_rows,
)
from kernels_pallas.tpu.queue import CURSOR, Queue
from kernels_pallas.tpu.runs import Spread, spread_of
from kernels_pallas.tpu.sizes import VMEM_BYTES, Sizes, tile_shapes
from kernels_pallas.tpu.slot_runs import own_logits
from kernels_pallas.tpu.sums import weighted_sum
from kernels_pallas.tpu.tiles import Tiles

# Below every logit of finite keys; finite, so that differences of two are numbers.
_LOWEST = -(2.0**127)
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is computed; see `paged_attention.reference`.

    Attributes:
        name: of the operation, by which profiles know it.
    """

    name: str
    scale: float
    window: int | None = None
    soft_cap: float | None = None


def walk(
    queries: tuple[Float[Array, "seq time q_head _"], ...],
    pools: tuple[Pages, ...],
    rows: tuple[Array, Array, Array, Any],
    stripe: Stripe | None,
    sinks: Float[Array, " q_head"] | None,
    sizes: Sizes,
    options: Options,
    recent: Float[Array, "seq kv_head recent head_dim"] | None = None,
) -> tuple[Float[Array, "seq time q_head value_dim"], Float[Array, "seq time q_head"]]:
    """Attend to all pieces.

    Args:
        queries: one for each pool that keys are made of.
        pools: as `sizes.shape.parts`.
        rows: page table, starts, lens and page offset, as `PagedArguments`.
        stripe: as `PagedArguments`.
        sinks: see `paged_attention.reference`.
        sizes: of the call.
        options: of the call.
        recent: as `PagedArguments`.
    """
    table, starts, lens, offset = rows
    shape, stripe = sizes.shape, stripe or Stripe(1, 0)
    if options.window is not None:
        # A longer one is as none, and places are numbers of 32 bits.
        options = dataclasses.replace(options, window=min(options.window, (HIDDEN - 1) // shape.group))
    pieces = pieces_of(table, starts, lens, stripe, sizes, options.window)
    table = jnp.pad(table, ((0, sizes.num_parts * sizes.part_seqs - table.shape[0]), (0, 0)))
    operands = tuple(
        query_of(query.astype(shape.operand_dtype), sizes, part)
        for query, part in zip(queries, shape.keys, strict=True)
    )
    out, log_sum = _call(sizes, options, has_sinks=sinks is not None)(
        pieces,
        *jax.tree.map(lambda scalar: jnp.asarray(scalar, jnp.int32)[None], (offset, stripe)),
        table.reshape(sizes.num_parts, -1),
        operands,
        None if recent is None else own_of(queries[0].astype(shape.operand_dtype), recent, starts, sizes),
        None if sinks is None else sink_rows(sinks * _LOG2_E - math.log2(LANES), sizes),
        spread_of(shape),
        tuple(_in_hbm(part, stored_of(pages)) for part, pages in zip(shape.parts, pools, strict=True)),
    )
    log_sum = log_sum.reshape(sizes.num_pieces, -1)[:, : shape.num_kv_heads * sizes.rows]
    log_sum = log_sum.reshape(sizes.num_pieces, shape.num_kv_heads, sizes.rows)
    halves = jnp.split(out, shape.values.halves, axis=-1)
    width = pools[shape.value].head_dim // len(halves)
    out = jnp.concatenate([half[..., :width] for half in halves], axis=-1)
    return from_rows(out, sizes), from_rows(log_sum, sizes)


def _in_hbm(part: Part, stored: Stored) -> Stored:
    """Keep a pool from being copied whole to VMEM before each call, as XLA does where there is room."""

    def keep(array):
        return None if array is None else pltpu.with_memory_space_constraint(array, pltpu.HBM)

    scale = stored.scale if part.scaling == "head" else keep(stored.scale)
    return Stored(keep(stored.data), scale, keep(stored.zero))


def _call(sizes: Sizes, options: Options, *, has_sinks: bool) -> Any:
    """Return the call of the kernel on scalars, queries, sinks and pools."""
    shape = sizes.shape
    of_pieces = (sizes.pieces_per_step, shape.num_kv_heads)
    sum_rows = -(-shape.num_kv_heads * sizes.rows // LANES)

    def of_step(rows: int, lanes: int = LANES) -> pl.BlockSpec:
        return pl.BlockSpec((*of_pieces, rows, lanes), lambda step, *_: (step, 0, 0, 0))

    def of_call(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec(dims, lambda step, *_: (0,) * len(dims))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    of_scales = {"head": of_call(shape.num_kv_heads, 1, LANES), None: None}
    pools = tuple(
        Stored(in_hbm, of_scales.get(part.scaling, in_hbm), None if part.runs is None else in_hbm)
        for part in shape.parts
    )
    spread = jax.tree.map(lambda array: of_call(*array.shape), spread_of(shape))
    queries = tuple(
        Query(
            of_step(sizes.query_rows(part), part.lanes),
            of_step(sizes.rows, 1) if sizes.has_int8_product(part) else None,
        )
        for part in shape.keys
    )
    own = Own(of_step(sizes.rows, sizes.own_lanes), of_step(sizes.own_keys, sizes.own_lanes))
    members = sizes.pieces_at_once
    own_sums = pltpu.VMEM((members, sizes.batch_heads, sizes.rows, sizes.block), jnp.float32)
    has_own = shape.run_slots is not None
    sink_spec = of_call(shape.num_kv_heads, sizes.rows, LANES) if has_sinks else None
    sums = pltpu.VMEM((shape.num_kv_heads, sizes.rows, LANES), jnp.float32)
    value_lanes = shape.values.lanes
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sizes.num_pieces // sizes.pieces_per_step,),
            in_specs=[
                in_hbm,
                queries,
                own if has_own else None,
                sink_spec,
                spread,
                pools,
            ],
            out_specs=[
                of_step(sizes.rows, value_lanes),
                pl.BlockSpec((sizes.pieces_per_step, sum_rows, LANES), lambda step, *_: (step, 0, 0)),
            ],
            scratch_shapes=[
                tuple(_tiles(sizes, part) for part in shape.parts),
                pltpu.VMEM((members, 1, sizes.block), jnp.int32),
                own_sums if has_own else None,
                sums,
                sums,
                pltpu.VMEM((shape.num_kv_heads, sizes.rows, value_lanes), jnp.float32),
                pltpu.SMEM((sizes.num_slots * sizes.part_pages,), jnp.int32),
                pltpu.SMEM((CURSOR,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers,), jnp.int32),
                pltpu.SMEM((sizes.num_buffers, sizes.tile_pages), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.num_buffers,)),
                pltpu.SemaphoreType.DMA((sizes.num_slots,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (sizes.num_pieces, *of_pieces[1:], sizes.rows, value_lanes), shape.query_dtype
            ),
            jax.ShapeDtypeStruct((sizes.num_pieces, sum_rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=f"jkv_{options.name}",
    )


def _tiles(sizes: Sizes, part: Part) -> Stored:
    """Return the scratch that holds tiles, and the scales of their tokens."""
    return Stored(*(None if array is None else pltpu.VMEM(*array) for array in tile_shapes(sizes, part)))


def _kernel(
    pieces: Pieces,  # int32 [piece + member] each             SMEM, prefetched
    offset_ref,  # int32 [1]                                   SMEM, prefetched
    stripe: tuple[Any, Any],  # int32 [1] each                 SMEM, prefetched
    table_ref,  # int32 [part, seq * max_pages]                HBM
    query_refs,  # of each pool of keys: `Query` of pieces of the step        VMEM
    own_refs: Any,  # `Own` where keys have runs of slots, else None          VMEM
    sink_ref,  # float32 [kv_head, row, 128], to be added, or None            VMEM
    spread: Spread | None,  # of runs of channels              VMEM
    pools: tuple[Any, ...],  # of each: entries and scales of tokens   HBM; scales of heads VMEM
    out_ref,  # [step_piece, kv_head, row, lane]               VMEM
    log_sum_ref,  # float32 [step_piece, n, 128]: of heads' rows              VMEM
    tile_refs: tuple[Any, ...],  # of each pool: see `Queue`  VMEM
    tokens_ref,  # int32 [member, 1, token]: see `tokens`      VMEM
    own_ref,  # float32 [member, head, row, token]: logits of own runs, or None       VMEM
    peak_ref,  # float32 [kv_head, row, 128], equal lanes      VMEM
    total_ref,  # float32 [kv_head, row, 128], to be added     VMEM
    sum_ref,  # float32 [kv_head, row, lane]                   VMEM
    rows_ref,  # int32 [slot * seq * max_pages]               SMEM
    cursor_ref,  # int32 [6]                                   SMEM
    copies_ref,  # int32 [buffer]: pages on their way          SMEM
    holes_ref,  # int32 [buffer]: pages that are none          SMEM
    places_ref,  # int32 [buffer, page]: where these are       SMEM
    semaphores_ref,  # DMA [buffer]
    row_semaphores_ref,  # DMA [slot]
    *,
    sizes: Sizes,
    options: Options,
):
    shape, block_pages, page_size, span = (
        sizes.shape,
        sizes.block_pages,
        sizes.shape.page_size,
        sizes.shape.run_slots or 1,
    )
    stride_ref, first_page_ref = stripe
    tiles = Tiles(sizes, tile_refs, pools, spread)
    chunk_tokens = tiles.chunk_tokens
    queue = Queue(
        sizes,
        pieces,
        offset_ref,
        table_ref,
        pools,
        tile_refs,
        rows_ref,
        cursor_ref,
        copies_ref,
        holes_ref,
        places_ref,
        semaphores_ref,
        row_semaphores_ref,
    )

    def first_page(piece, tile):
        """Return the first page of a piece in a tile, of those of the stripe."""
        return pieces.begins[piece] + tile * block_pages

    def tokens():
        """Return how many tokens after a piece's first in a tile its slots are: not all are of the stripe."""
        slot = tiles.slots()
        return slot + jax.lax.div(slot, page_size) * ((stride_ref[0] - 1) * page_size)

    def hide(buffer):
        """Have the tokens of a tile whose pages are none before all that is seen."""

        def hide_page(hole, carry):
            member, page = (op(places_ref[buffer, hole], block_pages) for op in (jax.lax.div, jax.lax.rem))
            slot = tiles.slots() - page * page_size
            is_hidden = (slot >= 0) & (slot < page_size)
            tokens_ref[member] = jnp.where(is_hidden, -HIDDEN, tokens_ref[member])
            return carry

        jax.lax.fori_loop(0, holes_ref[buffer], hide_page, 0)

    def show_all():
        tokens_ref[...] = jnp.broadcast_to(tokens()[None], tokens_ref.shape)

    batch, is_grouped = sizes.batch_heads, sizes.pieces_at_once > 1

    def attend(at, buffer, starts):
        """Attend to a part of a tile, heads after heads, chunk after chunk: of some heads a generator.

        Products go in the order of the program: those of the next keys come before what waits for the last.
        After the first products of some heads there is a pause.
        """
        member, index, piece, tile = at
        first_chunk = member * (block_pages // sizes.chunk_pages)

        def lanes_of(chunk):
            return pl.ds(chunk * chunk_tokens, chunk_tokens)

        def positions(lanes):
            page = first_page(piece, tile) * stride_ref[0] + first_page_ref[0]
            return page * page_size + tokens_ref[member, :, lanes]

        def places(chunk):
            """Return where tokens are among rows, `token * group + head`, which see what is up to them."""
            position = positions(lanes_of(chunk))
            past = (position - pieces.starts[piece]) * shape.group
            return jnp.where(position < pieces.firsts[piece], HIDDEN, past)

        def logits_of_chunk(chunk, heads, own):
            """Return the logits of some heads, the sum over the pools of keys, for powers of two."""
            dims = sizes.rows, chunk_tokens
            past, row = jnp.broadcast_to(places(chunk), dims), jax.lax.broadcasted_iota(jnp.int32, dims, 0)
            # A single token's rows see the same, of a window what is not before `firsts`.
            is_seen = past <= (0 if sizes.query_tokens == 1 else row)
            if options.window is not None and sizes.query_tokens > 1:
                is_seen &= past + options.window * shape.group > row
            parts = [logits_of_part(part, chunk, heads, own) for part in range(shape.num_keys)]
            if own_refs is not None:
                # A query sees a run that ends before its token by its scales, and its own as it was given.
                run_end = positions(lanes_of(chunk)) | (span - 1)
                is_own = (run_end - pieces.starts[piece] + 1) * shape.group > row
                parts = [jnp.where(is_own[None], own_ref[member, :, :, lanes_of(chunk)], *parts)]
            logits = functools.reduce(jnp.add, parts)
            if options.soft_cap is None:
                logits *= options.scale * _LOG2_E
            else:
                logits = jnp.tanh(logits * (options.scale / options.soft_cap)) * (options.soft_cap * _LOG2_E)
            return jnp.where(is_seen[None], logits, -jnp.inf)

        def logits_of_part(index_of_part, chunk, heads, own):
            """Return the logits of some heads by one pool."""
            part = shape.parts[index_of_part]
            query = jax.tree.map(lambda ref: ref[index, heads], query_refs[index_of_part])
            entries = tiles.numbers(
                index_of_part, buffer, heads, first_chunk + chunk, sizes.operand_dtype(part)
            )
            factors = tiles.scales(index_of_part, buffer, first_chunk + chunk)
            return logits_of(part, query, entries, *jax.tree.map(lambda factor: factor[own], factors))

        def take_own(heads):
            """Put the logits of own runs where their slots are in the tile, if any is."""
            begin = pieces.starts[piece] - jax.lax.rem(pieces.starts[piece], span)
            last_page = (first_page(piece, tile) + block_pages - 1) * stride_ref[0] + first_page_ref[0]

            @pl.when((last_page + 1) * page_size > begin)
            def _():
                end = pieces.starts[piece] + pieces.lens[piece]
                query, keys = own_refs.query[index, heads], own_refs.keys[index, heads]
                own_ref[member] = own_logits(query, keys, begin, end, positions(slice(None)))

        def value_factors(chunk, own):
            """Return scales and shifts of values, 0 where no query sees them: there they may be NaN."""
            if shape.values.scaling is None:
                return [None], []
            past = places(chunk)
            is_live = past < pieces.lens[piece] * shape.group
            if options.window is not None:
                is_live &= past + options.window * shape.group > 0
            factors = tiles.scales(shape.value, buffer, first_chunk + chunk)
            return jax.tree.map(lambda factor: jnp.where(is_live, factor, 0.0)[own], factors)

        def take_heads(first):
            heads, own = pl.ds(first, batch), slice(first, first + batch)
            if own_refs is not None:
                take_own(heads)
            last: Any = None if is_grouped else (peak_ref[heads], total_ref[heads], sum_ref[heads])
            ahead = [logits_of_chunk(chunk, heads, own) for chunk in sizes.turns[0]]
            yield
            for chunks, following in itertools.pairwise([*sizes.turns, []]):
                logits = ahead
                ahead = [logits_of_chunk(chunk, heads, own) for chunk in following]
                highest = functools.reduce(jnp.maximum, _rows_of_lanes(logits))
                top = jnp.max(highest, axis=-1, keepdims=True)
                before = jnp.broadcast_to(lowest(heads), highest.shape) if last is None else last[0]
                peak = jnp.maximum(before, top)
                weights = [jnp.exp2(of_chunk - _repeated(peak, chunk_tokens)) for of_chunk in logits]
                total, sums = functools.reduce(jnp.add, _rows_of_lanes(weights)), []
                for chunk, of_chunk in zip(chunks, weights, strict=True):
                    factors, shifts = value_factors(chunk, own)
                    scaled = [of_chunk if factor is None else of_chunk * factor for factor in factors]
                    shifts = [jnp.sum(of_chunk * shift, axis=-1, keepdims=True) for shift in shifts]
                    values = tiles.numbers(
                        shape.value, buffer, heads, first_chunk + chunk, shape.operand_dtype, starts.reach
                    )
                    sums.append(weighted_sum(shape.values, scaled, values, shifts))
                if last is None:
                    total += sink_total(heads, peak)
                else:
                    keep = jnp.exp2(last[0] - peak)
                    total += last[1] * keep
                    sums.insert(0, last[2] * _repeated(keep, last[2].shape[-1]))
                last = peak, total, functools.reduce(jnp.add, sums)
            if not is_grouped:
                peak_ref[heads], total_ref[heads], sum_ref[heads] = last
            yield last

        return [take_heads(first) for first in range(0, shape.num_kv_heads, batch)]

    def lowest(heads):
        """Return the peak before any key: that of a sink."""
        return _LOWEST if sink_ref is None else jnp.maximum(sink_ref[heads], _LOWEST)

    def sink_total(heads, peak):
        """Return the total before any key: that of a sink, a part of it in each lane."""
        return 0.0 if sink_ref is None else jnp.exp2(sink_ref[heads] - peak)

    def begin_piece():
        peak_ref[...] = jnp.broadcast_to(lowest(...), peak_ref.shape)
        total_ref[...] = jnp.broadcast_to(sink_total(..., peak_ref[...]), total_ref.shape)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def end_piece(index, piece, sums):
        """Write what a piece attended to, of some heads after others."""
        dims, columns = (sizes.rows, LANES), shape.values.columns
        row, num_rows = jax.lax.broadcasted_iota(jnp.int32, dims, 0), pieces.lens[piece] * shape.group
        peaks, totals = [], []
        for head in range(shape.num_kv_heads):
            peak, total, own = (array[head % batch] for array in sums[head // batch])
            # Of equal lanes, as all that is computed here.
            total, heads = jnp.broadcast_to(jnp.sum(total, axis=-1, keepdims=True), dims), own
            for i in range(1, columns.share):
                heads += pltpu.roll(own, own.shape[-1] - i * columns.width, 1)
            # Not `total > 0`: a NaN that a query sees is to be seen.
            is_written = (row < num_rows) & (total != 0)
            share = 1.0 / jnp.where(is_written, total, 1.0)
            own = [jnp.where(is_written, part * share, 0.0) for part in _rows_of_lanes([heads])]
            out_ref[index, head] = jnp.concatenate(own, axis=-1).astype(out_ref.dtype)
            peaks.append(peak)
            totals.append(total)
        for i in range(log_sum_ref.shape[1]):
            place, lane = (jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1))
            row = jax.lax.rem(i * LANES + lane - lane % SUBLANES + place, sizes.rows)
            peak, total = (_in_lanes(of_heads, i) for of_heads in (peaks, totals))
            is_written = (row < num_rows) & (total != 0)
            log_sum = jnp.where(is_written, peak / _LOG2_E + jnp.log(total), -jnp.inf)
            own_lane = jnp.where(place == lane % SUBLANES, log_sum, 0.0)
            log_sum_ref[index, pl.ds(i, 1)] = jnp.sum(own_lane, axis=0, keepdims=True)

    def take(ats, end):
        """Attend to a tile from pieces, while copies of another begin, and end what ends with it."""
        buffer = queue.take()
        has_holes = holes_ref[buffer] > 0
        for member, _, piece, tile in ats:
            tiles.clear_from(buffer, member, pieces.ends[piece] - first_page(piece, tile) * page_size)
        pl.when(has_holes)(functools.partial(hide, buffer))
        starts = queue.fetch()
        walks = [attend(at, buffer, starts) for at in ats]
        for of_heads in walks:
            next(of_heads[0])
        end([[[*of_heads][-1] for of_heads in of_piece] for of_piece in walks])
        has_next_holes, leave_out = starts.end()

        @pl.when(has_holes | has_next_holes)
        def _():
            pl.when(has_holes)(show_all)
            pl.when(has_next_holes)(leave_out)

    def walk_pieces(group, carry):
        """Attend from pieces that share a tile."""
        first = group * sizes.pieces_at_once
        pairs = [
            (first + i, pl.program_id(0) * sizes.pieces_per_step + first + i)
            for i in range(sizes.pieces_at_once)
        ]

        def end(sums):
            for pair, own in zip(pairs, sums, strict=True):
                end_piece(*pair, own)

        take([(member, *pair, 0) for member, pair in enumerate(pairs)], end)
        return carry

    def walk_piece(index, carry):
        """Attend from one piece."""
        piece = pl.program_id(0) * sizes.pieces_per_step + index
        begin_piece()

        def take_tile(tile, carry):
            take([(0, index, piece, tile)], lambda _: None)
            return carry

        jax.lax.fori_loop(0, queue.num_tiles(piece), take_tile, 0)
        heads = [pl.ds(first, batch) for first in range(0, shape.num_kv_heads, batch)]
        end_piece(index, piece, [[ref.at[own] for ref in (peak_ref, total_ref, sum_ref)] for own in heads])
        return carry

    @pl.when(pl.program_id(0) == 0)
    def _():
        show_all()
        queue.begin()

    num_groups = sizes.pieces_per_step // sizes.pieces_at_once
    jax.lax.fori_loop(0, num_groups, walk_pieces if is_grouped else walk_piece, 0)


def _rows_of_lanes(arrays: list[Array]) -> list[Array]:
    """Return arrays 128 lanes by 128."""
    return [
        array[..., begin : begin + LANES] for array in arrays for begin in range(0, array.shape[-1], LANES)
    ]


def _repeated(lanes: Array, count: int) -> Array:
    """Return 128 equal lanes as `count`."""
    return jnp.concatenate([lanes] * (count // LANES), axis=-1)


def _in_lanes(of_heads: list[Array], row_of_lanes: int) -> Array:
    """Return 128 rows of heads, of equal lanes, eight rows in eight lanes beside the next eight."""
    num_rows, joined = of_heads[0].shape[0], of_heads[0][:SUBLANES]
    lane = jax.lax.broadcasted_iota(jnp.int32, joined.shape, 1)
    for begin in range(0, LANES, SUBLANES):
        head, row = divmod(row_of_lanes * LANES + begin, num_rows)
        if head < len(of_heads):
            joined = jnp.where(lane < begin, joined, of_heads[head][row : row + SUBLANES])
    return joined
