"""How a pool's entries are stored, and in which dtype tensor cores multiply them.

Knows pages; no kernel.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.contract import Pages

# Bits of fp8 numbers, and what the numbers are.
_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


class Form(NamedTuple):
    """How entries are stored, and multiplied.

    Attributes:
        entry: see `Pages`.
        stored: dtype of the pool.
        dtype: what entries are converted to, and what they are multiplied with.
        scaling: whether a token and head, or a head, has a scale.
    """

    entry: str
    stored: jnp.dtype
    dtype: jnp.dtype
    scaling: Literal["none", "token", "head"]

    @property
    def is_converted(self) -> bool:
        """Whether tensor cores do not take entries as they are stored."""
        return self.stored != self.dtype

    def converted(self, entries: jax.Array) -> jax.Array:
        """Return stored entries as numbers that tensor cores take."""
        if self.entry in _FP8:
            entries = lax.bitcast_convert_type(entries, _FP8[self.entry])
        return entries.astype(self.dtype)


def form_of(pages: Pages) -> Form | None:
    """Return how pages are stored and multiplied; None where they cannot be."""
    bfloat16, float16, stored = jnp.dtype("bfloat16"), jnp.dtype("float16"), pages.data.dtype
    is_float = pages.entry == "number" and stored in (bfloat16, float16)
    if is_float and pages.scale is None:
        return Form(pages.entry, stored, stored, "none")
    is_narrow = pages.entry in _FP8 or (pages.entry == "number" and stored == jnp.int8)
    if not is_narrow or pages.scale is None or pages.zero is not None:
        return None
    if pages.scale.shape not in (pages.data.shape[:3], pages.data.shape[1:2]):
        return None
    # To which Hopper converts fast.
    dtype = float16 if pages.entry in _FP8 else bfloat16
    return Form(pages.entry, stored, dtype, "head" if pages.scale.ndim == 1 else "token")


def refusal_of_form(pages: Pages) -> str | None:
    """Return why entries are not taken; None where they are."""
    if form_of(pages) is not None:
        return None
    scales = "no scale" if pages.scale is None else f"scales {pages.scale.shape}"
    return (
        "the GPU kernel takes bfloat16 and float16 without scales, int8 and fp8 with those of tokens "
        f"or heads, got entries of {pages.entry} in {pages.data.dtype} with {scales}; use 'xla'"
    )
