"""Paged attention on TPUs: the walk of `kernels_pallas.tpu` over a pool of keys and one of values."""

from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.paged_attention.contract import PagedArguments, Tiling, check_rows
from kernels_pallas.tpu import sizes, tuned
from kernels_pallas.tpu.parts import part_of, refused_pages
from kernels_pallas.tpu.sizes import Shape, Sizes
from kernels_pallas.tpu.walk import Options, walk

TUNED = Path(__file__).with_name("tuned.yaml")


def refusal(arguments: PagedArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does.

    Args:
        arguments: the call.
        tiling: None is that of `tiling_for` without a window, which makes no tile larger.
    """
    for name, pages in (("keys", arguments.keys), ("values", arguments.values)):
        if (why := refused_pages(name, pages)) is not None:
            return why
    return sizes.refusal(shape_of(arguments), tiling or tiling_for(arguments, window=None))


def tiling_for(arguments: PagedArguments, *, window: int | None) -> Tiling:
    """Return the tiling that a call gets where none is given."""
    return tuned.tiling_for(shape_of(arguments), window=window, file=TUNED)


def sizes_of(
    arguments: PagedArguments, num_pages: int, *, window: int | None, tiling: Tiling | None = None
) -> Sizes:
    """Return how the work of a call is cut."""
    tiling = tiling or tiling_for(arguments, window=window)
    return sizes.sizes_of(shape_of(arguments), num_pages, tiling, window=window)


def paged_attention(
    arguments: PagedArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_head"] | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "seq time q_head head_dim"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.paged_attention` defines; logits, softmax and sums are float32.

    Raises:
        ValueError: the kernel does not take the call, see `refusal`, or rows are not its sequences'.
    """
    check_rows(arguments)
    if (why := refusal(arguments, tiling)) is not None:
        raise ValueError(f"paged attention on TPUs cannot run: {why}")
    query, keys, values = arguments[:3]
    return walk(
        (query,),
        (keys, values),
        arguments[3:7],
        arguments.stripe,
        sinks,
        sizes_of(arguments, num_pages, window=window, tiling=tiling),
        Options("paged_attention", scale, window, soft_cap),
        arguments.recent,
    )


def shape_of(arguments: PagedArguments) -> Shape:
    """Return the sizes of a call."""
    _, time, num_heads, _ = arguments.query.shape
    num_seqs, max_pages = arguments.page_table.shape
    num_kv_heads = arguments.keys.data.shape[1]
    return Shape(
        num_seqs=num_seqs,
        max_pages=max_pages,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        time=time,
        page_size=arguments.keys.page_size,
        parts=(part_of(arguments.keys), part_of(arguments.values)),
        num_keys=1,
        value=1,
        query_dtype=jnp.dtype(arguments.query.dtype),
        multiplies_int8=tuned.multiplies_int8(),
    )
