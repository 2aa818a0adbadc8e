"""Page writes on GPUs: one kernel rotates, encodes and writes a step's heads of all pools, in place.

A block is the heads of a few tokens, 64 rows of a product. Tensor cores rotate them, their largest entries
give their scales, and from shared memory a copy for each token puts the entries of all its heads into its
page. No page is read, and no two copies touch the same bytes.

Grid: pools, blocks of tokens. Shared memory: a block's heads, the signs that rotate them, and what they
become. Limits: `refusal`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.hopper.accumulators import matrices, product, wide
from kernels_pallas.hopper.blocks import divide
from kernels_pallas.hopper.forms import FP8, Form, form_of
from kernels_pallas.paged_attention.contract import Pages

# Of a block: those of a product of a warp group.
_ROWS = 64
# What a thread has of more would leave no room for its registers.
_MAX_HEAD_DIM = 256
# Copies take entries by 16, from shared memory by 128 bytes.
_ENTRIES, _SMEM_BYTES = 16, 128
# Tokens whose slots are read before one is written.
_TOKENS_AT_ONCE = 8


class _Sizes(NamedTuple):
    """The sizes of a pool's write.

    Attributes:
        form: of its entries.
        page_size: slots of a page.
        num_heads: KV heads.
        num_tokens: of the step.
        head_dim: entries of a head.
        factor: of the rotation.
    """

    form: Form
    page_size: int
    num_heads: int
    num_tokens: int
    head_dim: int
    factor: float

    @property
    def token_rows(self) -> int:
        """Rows of a token; see `rows_of_token`."""
        return rows_of_token(self.num_heads, self.head_dim)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return _ROWS // self.token_rows

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens."""
        return -(-self.num_tokens // self.block_tokens)

    @property
    def largest_entry(self) -> float:
        """The number at which entries saturate."""
        return float(jnp.finfo(FP8[self.form.entry]).max) if self.form.entry in FP8 else 127.0


def rows_of_token(num_heads: int, head_dim: int) -> int:
    """Return the rows of a token: its heads, and as many of nothing as let a copy begin with the next."""
    multiple = _SMEM_BYTES // math.gcd(head_dim, _SMEM_BYTES)
    return -(-num_heads // multiple) * multiple


class _Scratch(NamedTuple):
    """A block in shared memory.

    Attributes:
        heads: bfloat16 `[row, head_dim]`.
        signs: bfloat16 `[head_dim, head_dim]`.
        entries: as they are stored, `[row, head_dim]`.
        scale: float32 `[row]`.
        barrier: passed when heads and signs are there.
    """

    heads: Any
    signs: Any
    entries: Any
    scale: Any
    barrier: Any


class _Pool(NamedTuple):
    """What a kernel is given of a pool, arrays or their refs.

    Attributes:
        rows: heads of all tokens, `[row, head_dim]`.
        signs: bfloat16 `[head_dim, head_dim]`.
        data: see `Pages`.
        scale: see `Pages`.
    """

    rows: Any
    signs: Any
    data: Any
    scale: Any


def refusal(pools: tuple[Pages, ...], heads: tuple[Any, ...]) -> str | None:
    """Return why the kernel does not write heads into pools, in one sentence; None where it does."""
    for pages, each in zip(pools, heads, strict=True):
        form, num_heads, head_dim = form_of(pages), pages.data.shape[1], pages.head_dim
        if (rows := pages.data.shape[2:]) != pages.data_shape:
            return f"the GPU kernel writes pools of layout 'plain', got pages in rows {rows}"
        if form is None or form.scaling != "token":
            scales = "no scale" if pages.scale is None else f"scales {pages.scale.shape}"
            return (
                "the GPU kernel writes int8 and fp8 with scales of tokens, got entries of "
                f"{pages.entry} in {pages.data.dtype} with {scales}"
            )
        if each.dtype != jnp.bfloat16:
            return f"the GPU kernel writes heads in bfloat16, got {each.dtype}"
        if head_dim > _MAX_HEAD_DIM or head_dim % _ENTRIES:
            return f"head_dim must be a multiple of {_ENTRIES} up to {_MAX_HEAD_DIM}, got {head_dim}"
        if (needed := rows_of_token(num_heads, head_dim)) > _ROWS:
            return f"a token must take at most {_ROWS} rows, got {needed} for {num_heads} heads of {head_dim}"
    return None


def write_heads(
    pools: tuple[Pages, ...],
    heads: tuple[Float[Array, "seq time kv_head _"], ...],
    rotations: tuple[tuple[np.ndarray, Any], ...],
    slots: Int[Array, "seq time"],
    *,
    page_offset: Int[Array, ""] | int,
) -> tuple[tuple[Array, Array], ...]:
    """Rotate and encode heads, write them into their slots, and return entries and scales of each pool.

    Args:
        pools: pages of all layers; consumed where the caller donates them.
        heads: what each slot is to hold, of each pool.
        rotations: an orthogonal matrix for each pool, by which heads are multiplied: signs
            `[head_dim, head_dim]`, which may be 0, and the factor of all.
        slots: see `xla.write_pages`.
        page_offset: see `xla.write_pages`.

    Raises:
        ValueError: the kernel does not take the call; see `refusal`.
    """
    if (why := refusal(pools, heads)) is not None:
        raise ValueError(f"page writes on GPUs cannot run: {why}; use 'xla'")
    factors = [float(factor) for _, factor in rotations]
    sizes = [_sizes_of(*each) for each in zip(pools, heads, factors, strict=True)]
    given = [
        _Pool(_in_blocks(own, each), jnp.asarray(signs, own.dtype), pages.data, pages.scale)
        for each, pages, own, (signs, _) in zip(sizes, pools, heads, rotations, strict=True)
    ]
    # One call after another where it is mapped: refs cannot be.
    call = jax.custom_batching.sequential_vmap(functools.partial(_call, sizes))
    return call(given, slots.reshape(-1), jnp.asarray(page_offset, jnp.int32)[None])


def _call(
    sizes: list[_Sizes], given: list[_Pool], slots: Array, page_offset: Array
) -> tuple[tuple[Array, Array], ...]:
    """Run the kernel; return entries and scales of each pool."""
    refs = [each._replace(data=jax.new_ref(each.data), scale=jax.new_ref(each.scale)) for each in given]
    leaves, structure = jax.tree.flatten((slots, page_offset, refs))

    def kernel(*leaves: Any) -> None:
        slots_ref, offset_ref, refs = jax.tree.unflatten(structure, leaves)
        for index, (each, of_pool) in enumerate(zip(sizes, refs, strict=True)):
            _write_block(index, each, slots_ref, offset_ref, of_pool)

    grid = len(sizes), max(each.num_blocks for each in sizes)
    pl.kernel(
        kernel,
        out_type=(),
        mesh=plgpu.Mesh(grid=grid, grid_names=("pool", "block"), kernel_name="jkv_page_write"),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*leaves)
    return tuple((jax.freeze(each.data), jax.freeze(each.scale)) for each in refs)


def _sizes_of(pages: Pages, heads: Any, factor: float) -> _Sizes:
    form, (*tokens, num_heads, head_dim) = form_of(pages), heads.shape
    assert form is not None
    return _Sizes(form, pages.page_size, num_heads, math.prod(tokens), head_dim, factor)


def _in_blocks(heads: Array, sizes: _Sizes) -> Float[Array, "row head_dim"]:
    """Return the rows of all tokens, as many as whole blocks read."""
    rows = heads.reshape(sizes.num_tokens, sizes.num_heads, sizes.head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, sizes.token_rows - sizes.num_heads), (0, 0)))
    rows = rows.reshape(-1, sizes.head_dim)
    num_rows = (sizes.num_blocks - 1) * sizes.block_tokens * sizes.token_rows + _ROWS
    return jnp.pad(rows, ((0, num_rows - rows.shape[0]), (0, 0)))


def _write_block(pool: int, sizes: _Sizes, slots_ref: Any, offset_ref: Any, refs: _Pool) -> None:
    """Write a block of a pool, where the program is one of it."""
    block = lax.axis_index("block")
    types = _Scratch(
        heads=matrices((_ROWS, sizes.head_dim), jnp.dtype(jnp.bfloat16)),
        signs=matrices((sizes.head_dim, sizes.head_dim), jnp.dtype(jnp.bfloat16)),
        entries=plgpu.SMEM((_ROWS, sizes.head_dim), sizes.form.stored),
        scale=plgpu.SMEM((_ROWS,), jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=2),
    )

    def write(scratch: _Scratch) -> None:
        _encode(sizes, refs, block, scratch)
        _put(sizes, slots_ref, offset_ref, refs, block, scratch)

    @pl.when((lax.axis_index("pool") == pool) & (block < sizes.num_blocks))
    def _() -> None:
        pl.run_scoped(write, types)


def _encode(sizes: _Sizes, refs: _Pool, block: jax.Array, scratch: _Scratch) -> None:
    """Put a block's entries and scales into shared memory, as `jkv.cache.encoding`, but for rounding."""
    first, form = block * sizes.block_tokens * sizes.token_rows, sizes.form
    plgpu.copy_gmem_to_smem(refs.rows.at[pl.ds(first, _ROWS)], scratch.heads, scratch.barrier)
    plgpu.copy_gmem_to_smem(refs.signs, scratch.signs, scratch.barrier)
    plgpu.barrier_wait(scratch.barrier)
    heads = product((scratch.heads, scratch.signs)) * sizes.factor
    scale = jnp.abs(heads).max(axis=1) / sizes.largest_entry
    scratch.scale[...] = scale
    entries = heads / wide(jnp.where(scale == 0, 1.0, scale), sizes.head_dim)
    entries = entries if form.entry in FP8 else jnp.round(entries)
    entries = jnp.clip(entries, -sizes.largest_entry, sizes.largest_entry)
    if form.entry in FP8:
        entries = lax.bitcast_convert_type(entries.astype(FP8[form.entry]), form.stored)
    scratch.entries[...] = entries.astype(form.stored)
    plgpu.commit_smem()


def _put(
    sizes: _Sizes, slots_ref: Any, offset_ref: Any, refs: _Pool, block: jax.Array, scratch: _Scratch
) -> None:
    """Copy a block's entries and scales into the slots of its tokens, where there are any."""
    at_once, page_offset = math.gcd(sizes.block_tokens, _TOKENS_AT_ONCE), offset_ref[0]

    def put(first: jax.Array, slot: jax.Array) -> None:
        page, within = divide(jnp.maximum(slot, 0), sizes.page_size)
        page += page_offset

        @pl.when((slot >= 0) & (page < refs.data.shape[0]))
        def _() -> None:
            entries_ref = scratch.entries.at[pl.ds(first, sizes.num_heads)]
            plgpu.copy_smem_to_gmem(entries_ref, refs.data.at[page, :, within])
            for head in range(sizes.num_heads):
                refs.scale[page, head, within] = scratch.scale[first + head]

    def put_some(step: jax.Array, carry: None) -> None:
        places = [step * at_once + i for i in range(at_once)]
        tokens = [block * sizes.block_tokens + place for place in places]
        slots = [slots_ref[jnp.minimum(token, sizes.num_tokens - 1)] for token in tokens]
        for place, token, slot in zip(places, tokens, slots, strict=True):
            put(place * sizes.token_rows, jnp.where(token < sizes.num_tokens, slot, -1))

    lax.fori_loop(0, sizes.block_tokens // at_once, put_some, None)
    plgpu.wait_smem_to_gmem(0)
