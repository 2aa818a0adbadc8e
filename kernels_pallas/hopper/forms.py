"""How a pool's entries are stored, and in which dtype tensor cores multiply them.

Knows pages; no kernel.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.hopper.accumulators import dealt, gathered
from kernels_pallas.paged_attention.contract import Pages

# Channels of a run, or what is converted at once where runs are of slots; and slots of a run.
RUN_CHANNELS, _RUN_SLOTS = 32, (16, 32)
# What an entry of 1 becomes where the bits of entries are taken for the least numbers there are: neither what
# they are multiplied with, nor what comes of it, may leave the range of a bfloat16.
_UNIT = 2.0**-64
# Bits of fp8 numbers, and what the numbers are.
FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


class Form(NamedTuple):
    """How entries are stored, and multiplied.

    Attributes:
        entry: see `Pages`.
        stored: dtype of the pool.
        dtype: what entries are converted to, and what they are multiplied with.
        scaling: what has a scale: a token and head, a head, or, with zero points, runs of channels or slots.
        run_slots: slots that share scales.
        run_scales: scales that such slots have.
    """

    entry: str
    stored: jnp.dtype
    dtype: jnp.dtype
    scaling: Literal["none", "token", "head", "channels", "slots"]
    run_slots: int = 1
    run_scales: int = 1

    @property
    def has_runs(self) -> bool:
        """Whether runs have scales and zero points."""
        return self.scaling in ("channels", "slots")

    def scales_of(self, num_slots: Any) -> Any:
        """Return how many scales so many slots have, whole runs; traced where they are."""
        if isinstance(num_slots, int):
            return num_slots // self.run_slots * self.run_scales
        return lax.div(num_slots, jnp.int32(self.run_slots)) * self.run_scales

    @property
    def tile(self) -> int | None:
        """Entries of a tile's row in shared memory; None is as many as there may be."""
        return RUN_CHANNELS if self.has_runs else None

    @property
    def is_narrow(self) -> bool:
        """Whether numbers have the range of a float16: products of weights and scales may leave it."""
        return self.dtype == jnp.float16

    @property
    def is_dealt(self) -> bool:
        """Whether bits of entries are taken for numbers, whose order is then that of `accumulators.dealt`."""
        return self.is_converted and not self.is_narrow

    @property
    def unit(self) -> float:
        """What an entry of 1 becomes."""
        return _UNIT if self.is_dealt else 1.0

    def multiplied(self, query: jax.Array) -> jax.Array:
        """Return a query, its last axis channels, as what numbers are multiplied with.

        Entries that become infinite in float16, as those past 65,504 do, are NaN, and so is what their query
        gives: infinite ones could hide all that it sees.
        """
        query = query.astype(self.dtype)
        if self.is_narrow:
            query = jnp.where(jnp.isinf(query), jnp.nan, query)
        return dealt(query) / self.unit if self.is_dealt else query

    def summed(self, numbers: jax.Array) -> jax.Array:
        """Return float32 sums of numbers, their last axis channels, as those of entries."""
        return self.ordered(numbers) / self.unit

    def ordered(self, numbers: jax.Array) -> jax.Array:
        """Return sums of numbers, their last axis channels, in the order of those of entries."""
        return gathered(numbers) if self.is_dealt else numbers

    @property
    def is_converted(self) -> bool:
        """Whether tensor cores do not take entries as they are stored."""
        return self.stored != self.dtype

    def converted(self, entries: jax.Array) -> jax.Array:
        """Return stored entries as numbers that tensor cores take."""
        if self.entry in FP8:
            entries = lax.bitcast_convert_type(entries, FP8[self.entry])
        return entries.astype(self.dtype)


def form_of(pages: Pages) -> Form | None:
    """Return how pages are stored and multiplied; None where they cannot be."""
    bfloat16, float16, stored = jnp.dtype("bfloat16"), jnp.dtype("float16"), pages.data.dtype
    is_float = pages.entry == "number" and stored in (bfloat16, float16)
    if pages.entry == "int4":
        return _form_of_int4(pages)
    if is_float and pages.scale is None:
        return Form(pages.entry, stored, stored, "none")
    is_narrow = pages.entry in FP8 or (pages.entry == "number" and stored == jnp.int8)
    if not is_narrow or pages.scale is None or pages.zero is not None:
        return None
    if pages.scale.shape not in (pages.data.shape[:3], pages.data.shape[1:2]):
        return None
    # To which Hopper converts fast.
    dtype = float16 if pages.entry in FP8 else bfloat16
    return Form(pages.entry, stored, dtype, "head" if pages.scale.ndim == 1 else "token")


def _form_of_int4(pages: Pages) -> Form | None:
    """Return the form of 4-bit entries in runs that a block's products can be cut into."""
    if pages.scale is None or pages.zero is None:
        return None
    dtypes = {array.dtype for array in (pages.scale, pages.zero)}
    if pages.head_dim % (2 * RUN_CHANNELS) or dtypes != {jnp.dtype("bfloat16")}:
        return None
    form = functools.partial(Form, pages.entry, pages.data.dtype, jnp.dtype("bfloat16"))
    page_size, head_dim = pages.page_size, pages.head_dim
    if pages.run_slots in _RUN_SLOTS and pages.scale.shape[2:] == (page_size // pages.run_slots, head_dim):
        return form("slots", pages.run_slots, head_dim)
    if pages.scale.shape[2:] == (page_size, head_dim // RUN_CHANNELS):
        return form("channels", 1, head_dim // RUN_CHANNELS)
    return None


def refusal_of_form(pages: Pages) -> str | None:
    """Return why entries are not taken; None where they are."""
    if form_of(pages) is not None:
        return None
    width, slots = 2 * RUN_CHANNELS, " or ".join(map(str, _RUN_SLOTS))
    runs = f"int4 in heads of a multiple of {width} in runs of {RUN_CHANNELS} channels or {slots} slots"
    scales = "no scale" if pages.scale is None else f"scales {pages.scale.shape}"
    return (
        "the GPU kernel takes bfloat16 and float16 without scales, int8 and fp8 with those of tokens "
        f"or heads, {runs}, got entries of {pages.entry} in {pages.data.dtype} with {scales}; use 'xla'"
    )
