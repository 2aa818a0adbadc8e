"""What a cache refuses: meshes, sizes, scales and arrays that are not its own.

Knows specifications and shapes; no pool.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jkv.cache.spec import CacheSpec
from jkv.sharding import Sharding

# `[layer, kv_head]`, whose sizes may differ from group to group.
Scales = Sequence[tuple[Float[Array, "_ _"] | None, Float[Array, "_ _"] | None]]


def check_integers(
    what: str, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]], kind: type = np.integer
) -> None:
    """Refuse arrays of other shapes, which would be broadcast, or of other entries than integers.

    Raises:
        ValueError: says what `what` should have been, and what it is.
    """
    if lists := [type(array).__name__ for array in arrays if not hasattr(array, "dtype")]:
        raise ValueError(f"{what} must be arrays, got a {lists[0]}")
    got = [np.shape(array) for array in arrays]
    if got != list(shapes):
        raise ValueError(f"{what} must have the shapes {list(shapes)}, got {got}")
    if wrong := [dtype for array in arrays if not jnp.issubdtype(dtype := jnp.result_type(array), kind)]:
        entries = "integers" if kind is np.integer else "booleans"
        raise ValueError(f"{what} must be {entries}, got {wrong[0]}")


def check_mesh(spec: CacheSpec, num_sequences: int, sharding: Sharding | None) -> None:
    """Refuse a mesh that has other stripes, or does not divide the sequences and heads."""
    num_stripes = 1 if sharding is None else sharding.size("context")
    if spec.num_stripes != num_stripes:
        raise ValueError(
            f"the specification's num_stripes must be the devices of the rule 'context', {num_stripes}, "
            f"got {spec.num_stripes}"
        )
    if sharding is not None:
        sharding.check_divides("seq", num_sequences)
        for group in spec.groups:
            if group.head_axis is not None:
                sharding.check_divides(group.head_axis, group.num_kv_heads)


def check_counted(spec: CacheSpec, capacity: int, num_pages: Sequence[int]) -> None:
    """Refuse more tokens and pages than 32 bits count; lengths, slots and page ids are int32."""
    layers = [group.num_layers for group in spec.groups]
    slots = max(capacity, *(pages * spec.page_size for pages in num_pages))
    pages = max(count * pages for count, pages in zip(layers, num_pages, strict=True))
    if max(slots, pages) >= 2**31:
        raise ValueError(
            "a sequence, and a layer of a device, must have fewer than 2**31 tokens, and a group as many "
            f"pages, got {slots:,} tokens and {pages:,} pages; lower the capacity or the pages"
        )


def check_scales(spec: CacheSpec, scales: Scales | None) -> Scales:
    """Return the scales of each group, after a check that they are there where a codec needs them."""
    given = scales or [(None, None)] * len(spec.groups)
    if len(given) != len(spec.groups):
        raise ValueError(f"scales must have one entry a group, got {len(given)} for {len(spec.groups)}")
    for group, pair in zip(spec.groups, given, strict=True):
        for what, codec, scale in zip(("keys", "values"), group.codecs, pair, strict=True):
            shape = (group.num_layers, group.num_kv_heads) if codec.scaling == "static" else None
            got = None if scale is None else scale.shape
            if got != shape:
                wanted = f"have the shape {shape}" if shape else "be left out where their codec is not static"
                raise ValueError(f"calibrated scales of {what} must {wanted}, got {got}")
            # Traced ones are taken on trust.
            known = np.ones(1) if scale is None or isinstance(scale, Tracer) else np.asarray(scale)
            if not (np.isfinite(known) & (known > 0)).all():
                raise ValueError(f"calibrated scales of {what} must be finite and positive, got others")
    return given
