"""Latent attention on TPUs, absorbed: the walk of `kernels_pallas.tpu` over latents and their rotated parts.

All query heads are rows of one KV head. A tile of latents comes in once, as keys and as values.
"""

from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.latent_attention.contract import LatentArguments
from kernels_pallas.paged_attention import Tiling
from kernels_pallas.paged_attention.contract import check_rows
from kernels_pallas.tpu import sizes, tuned
from kernels_pallas.tpu.parts import part_of, refused_pages
from kernels_pallas.tpu.sizes import Shape, Sizes
from kernels_pallas.tpu.walk import Options, walk

TUNED = Path(__file__).with_name("tuned.yaml")


def refusal(arguments: LatentArguments, tiling: Tiling | None = None) -> str | None:
    """Return why the kernel does not take a call, in one sentence; None where it does.

    Args:
        arguments: the call.
        tiling: None is that of `tiling_for` without a window, which makes no tile larger.
    """
    if arguments.up is not None:
        return "latents must be attended to as they are, got up-projections of every head"
    for name, pages in (("latents", arguments.latents), ("rotated parts", arguments.ropes)):
        if (why := refused_pages(name, pages, is_latent=True)) is not None:
            return why
    return sizes.refusal(shape_of(arguments), tiling or tiling_for(arguments, window=None))


def tiling_for(arguments: LatentArguments, *, window: int | None) -> Tiling:
    """Return the tiling that a call gets where none is given."""
    return tuned.tiling_for(shape_of(arguments), window=window, file=TUNED)


def sizes_of(
    arguments: LatentArguments, num_pages: int, *, window: int | None, tiling: Tiling | None = None
) -> Sizes:
    """Return how the work of a call is cut."""
    tiling = tiling or tiling_for(arguments, window=window)
    return sizes.sizes_of(shape_of(arguments), num_pages, tiling, window=window)


def latent_attention(
    arguments: LatentArguments,
    *,
    num_pages: int,
    scale: float,
    window: int | None = None,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "seq time q_head latent"], Float[Array, "seq time q_head"]]:
    """Compute what `reference.latent_attention` defines; logits, softmax and sums are float32.

    Raises:
        ValueError: the kernel does not take the call, see `refusal`, or rows are not its sequences'.
    """
    check_rows(arguments)
    if (why := refusal(arguments, tiling)) is not None:
        raise ValueError(f"latent attention on TPUs cannot run: {why}")
    return walk(
        (arguments.query, arguments.rope_query),
        (arguments.latents, arguments.ropes),
        arguments[4:8],
        arguments.stripe,
        None,
        sizes_of(arguments, num_pages, window=window, tiling=tiling),
        Options("latent_attention", scale, window),
    )


def shape_of(arguments: LatentArguments) -> Shape:
    """Return the sizes of a call."""
    _, time, num_heads, _ = arguments.query.shape
    num_seqs, max_pages = arguments.page_table.shape
    return Shape(
        num_seqs=num_seqs,
        max_pages=max_pages,
        num_kv_heads=1,
        group=num_heads,
        time=time,
        page_size=arguments.latents.page_size,
        parts=(part_of(arguments.latents), part_of(arguments.ropes)),
        num_keys=2,
        value=0,
        query_dtype=jnp.dtype(arguments.query.dtype),
        multiplies_int8=tuned.multiplies_int8(),
    )
