"""jax's own attention kernels for TPUs, called at the sizes of this library's shapes, where they take them.

Knows what they are given; times and counts nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils import QuantizedTensor
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged

from kernels_pallas.paged_attention.shapes import Shape

# Tokens of a block, and queries: of a step of decodes all but one of them are another sequence's.
_BLOCK_TOKENS, _BLOCK_QUERIES = 512, 8


class Call(NamedTuple):
    """A kernel of jax's at a shape.

    Attributes:
        function: takes queries, `[seq, time, q_head, head_dim]`, and operands.
        make_operands: makes pools of zeros, and tables whose pages lie in a random order.
        block_bytes: of keys and values that come in at once.
    """

    function: Callable[[jax.Array, Any], jax.Array]
    make_operands: Callable[[], Any]
    block_bytes: int


def of_decodes(shape: Shape, codec: str) -> Call | None:
    """Return the call of `paged_attention`; None where it does not take the shape.

    8-bit entries have a scale of a token and head, which it repeats for each entry, in float32.
    """
    is_plain = shape.window is None and not shape.has_sinks and shape.head_dim % 128 == 0
    if shape.time > 1 or not is_plain or codec not in ("bf16", "int8"):
        return None
    call = functools.partial(
        paged_attention,
        attn_logits_soft_cap=shape.soft_cap,
        pages_per_compute_block=_BLOCK_TOKENS // shape.page_size,
    )

    def make_operands() -> Any:
        table = _table(shape)
        dims = (shape.num_kv_heads, table.size, shape.page_size, shape.head_dim)
        pools: list[Any] = [jnp.zeros(dims, jnp.bfloat16 if codec == "bf16" else jnp.int8) for _ in range(2)]
        if codec == "int8":
            pools = [QuantizedTensor(pool, jnp.ones((*dims[:-1], 1))) for pool in pools]
        return *pools, jnp.asarray(shape.totals, jnp.int32), table

    def function(query: jax.Array, operands: Any) -> jax.Array:
        return call(query[:, 0], *operands)[:, None]

    entry_bytes = {"bf16": 2, "int8": 1 + 4}[codec]
    return Call(function, make_operands, 2 * _BLOCK_TOKENS * shape.head_dim * entry_bytes)


def of_ragged(shape: Shape, codec: str) -> Call | None:
    """Return the call of `ragged_paged_attention`; None where it does not take the shape.

    8-bit entries have one scale, of all.
    """
    dtypes = {"bf16": jnp.bfloat16, "int8": jnp.int8}
    if shape.has_sinks or shape.head_dim % 128 or codec not in dtypes:
        return None
    dtype, combined = jnp.dtype(dtypes[codec]), 2 * shape.num_kv_heads
    try:
        _, block_heads = ragged.get_min_heads_per_blk(shape.num_heads, combined, jnp.bfloat16, dtype)
    except ValueError:  # Heads that do not fill its tiles.
        return None
    scale = 1.0 if codec == "int8" else None
    call = functools.partial(
        ragged.ragged_paged_attention,
        sm_scale=shape.head_dim**-0.5,
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
        k_scale=scale,
        v_scale=scale,
        num_kv_pages_per_block=_BLOCK_TOKENS // shape.page_size,
        num_queries_per_block=_BLOCK_QUERIES,
    )

    def make_operands() -> Any:
        table, num_seqs = _table(shape), len(shape.totals)
        pages = jnp.zeros((table.size, shape.page_size, combined, shape.head_dim), dtype)
        ends = jnp.arange(num_seqs + 1, dtype=jnp.int32) * shape.time
        totals = jnp.asarray(shape.totals, jnp.int32)
        return pages, totals, table, ends, jnp.asarray([num_seqs], jnp.int32)

    def function(query: jax.Array, operands: Any) -> jax.Array:
        return call(query.reshape(-1, *query.shape[2:]), *operands).reshape(query.shape)

    return Call(
        function, make_operands, math.prod((_BLOCK_TOKENS, block_heads, shape.head_dim, dtype.itemsize))
    )


def _table(shape: Shape) -> jax.Array:
    width = -(-max(shape.totals) // shape.page_size)
    num_pages = len(shape.totals) * width
    pages = np.random.default_rng(0).permutation(num_pages)
    return jnp.asarray(pages.reshape(-1, width), jnp.int32)
