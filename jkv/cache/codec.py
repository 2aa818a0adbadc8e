"""How keys and values are stored: the codecs by name, and the arrays that a page of each takes.

Imports no JAX; the arithmetic on arrays is `jkv.cache.encoding`.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Literal

Entry = Literal["f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"]
Scaling = Literal["none", "token", "static", "channels", "slots"]
# How the slots of a page lie. `plain`: in an axis of their own, before that of their entries. `gpu`: the same
# arrays, with page sizes that a GPU's kernels take. `tpu`: in columns, in rows of 128 lanes, each as
# wide as its entries or padded, so that slots share a row evenly or take whole ones. Where the last axis is
# not 128 lanes wide, a TPU tiles an array by other axes, and copies it for each loop (docs/in-place.md).
PoolLayout = Literal["plain", "tpu", "gpu"]
PoolLayoutChoice = Literal["auto", PoolLayout]

# How entries lie in a pool: int4 two in a byte, fp8 as its bits. XLA's CPU backend writes to an array of fp8
# by way of a wider copy of all of it.
DTYPES: dict[Entry, str] = {
    "f32": "float32",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
    "int4": "uint8",
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}
# Entries of a run. Shorter ones than the least would cost as much in scales as in entries.
MIN_SPAN, MAX_SPAN = 8, 32
# A TPU lays the two minor dimensions of an array out in tiles of 8 rows of 128 lanes; a lane is a word.
TILE_ROWS, TILE_LANES, WORD_BYTES = 8, 128, 4


@dataclass(frozen=True)
class ArraySpec:
    """An array that is to be allocated.

    Attributes:
        shape: its sizes.
        dtype: name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes, without what a device pads."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def packing(self) -> int:
        """Entries of one column that a TPU keeps in a word."""
        return WORD_BYTES // ITEM_BYTES[self.dtype]

    def padded_bytes(self, layout: PoolLayout) -> int:
        """Return the bytes of the array on a device.

        A TPU pads the minor dimension to 128 and the one before it to 8, or to the power of two that holds
        fewer rows and fills a word: what libtpu 0.0.48 compiles for v5e, v6e and tpu7x where dimensions stay
        in their order, as a kernel needs them. Free to permute them, XLA may pad less.
        """
        if layout != "tpu":
            return self.nbytes
        *outer, rows, lanes = self.shape
        padded = (*outer, self.padded_rows(rows), _round_up(lanes, TILE_LANES))
        return math.prod(padded) * ITEM_BYTES[self.dtype]

    def padded_rows(self, rows: int) -> int:
        """Return the rows that a TPU keeps where the array needs so many."""
        tile = min(TILE_ROWS, max(self.packing, _power_of_two(rows)))
        return _round_up(rows, tile)


def _power_of_two(count: int) -> int:
    """Return the least that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Codec:
    """How one of keys and values is stored.

    Attributes:
        entry: what one entry of a head becomes.
        scaling: which entries share a scale. `token`: those of a token and head. `static`: those of a head in
            a layer, measured beforehand. `channels`: runs of at most 32 channels of a token and head, with a
            zero point of their own. `slots`: runs of at most 32 slots of a page and channel, with a zero
            point; a run is encoded when its last slot is filled (`jkv.cache.runs`).
        is_rotated: heads are multiplied by a Hadamard matrix first, which spreads outlying channels.
    """

    entry: Entry
    scaling: Scaling = "none"
    is_rotated: bool = False

    def span(self, size: int) -> int:
        """Return the entries of a run, at most 32.

        Args:
            size: head_dim for runs of channels, of which a run is the most that divide half a head; page_size
                for runs of slots: 32, 16 or 8, so that a token's share of a page's bytes is whole.
        """
        if self.scaling == "slots":
            return math.gcd(size, MAX_SPAN)
        half = size // 2
        return next(span for span in range(min(MAX_SPAN, half), 0, -1) if half % span == 0)

    def check(self, *, head_dim: int, page_size: int) -> None:
        """Raise ValueError where the sizes do not suit the codec."""
        if self.entry == "int4" and head_dim % 2:
            raise ValueError(f"head_dim must be even for int4, two entries a byte, got {head_dim}")
        if self.scaling == "slots" and (head_dim % MIN_SPAN or page_size % MIN_SPAN):
            remedy = "" if head_dim % MIN_SPAN else "change page_size, or "
            raise ValueError(
                f"int4 keys need a page_size and a head_dim that are multiples of {MIN_SPAN}, "
                f"got {page_size} and {head_dim}; {remedy}use int4_token"
            )

    def page_shapes(self, *, page_size: int, head_dim: int) -> dict[str, ArraySpec]:
        """Return what a page holds for a head, `[slot, *entry]`, by the names in `Stored`."""
        width = head_dim // 2 if self.entry == "int4" else head_dim
        arrays = {"data": ArraySpec((page_size, width), DTYPES[self.entry])}
        if self.scaling == "token":
            arrays["scale"] = ArraySpec((page_size,), "float32")
        elif self.scaling == "channels":
            runs = ArraySpec((page_size, head_dim // self.span(head_dim)), "bfloat16")
            arrays |= {"scale": runs, "zero": runs}
        elif self.scaling == "slots":
            runs = ArraySpec((page_size // self.span(page_size), head_dim), "bfloat16")
            arrays |= {"scale": runs, "zero": runs}
        return arrays

    def page_arrays(
        self,
        *,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        layout: PoolLayout = "plain",
    ) -> dict[str, ArraySpec]:
        """Return the arrays that hold `num_pages` pages, by their names in `Stored`."""
        return {
            name: ArraySpec((num_pages, num_kv_heads, *_laid_out(array, layout)), array.dtype)
            for name, array in self.page_shapes(page_size=page_size, head_dim=head_dim).items()
        }


def _laid_out(array: ArraySpec, layout: PoolLayout) -> tuple[int, ...]:
    """Return the shape of a page that holds the slots and entries of `array`."""
    if layout != "tpu":
        return array.shape
    num_slots, *entry = array.shape
    num_rows = -(-num_slots * _slot_lanes(math.prod(entry)) // TILE_LANES)
    # Rows that a TPU would add are there: else XLA puts other axes last to save them, and copies the pool.
    return array.padded_rows(num_rows), TILE_LANES


def _slot_lanes(num_entries: int) -> int:
    """Return the lanes that a slot takes in rows of 128, some shared evenly or some whole."""
    if num_entries > TILE_LANES:
        return _round_up(num_entries, TILE_LANES)
    return _power_of_two(num_entries)


def choose_layout(name: PoolLayoutChoice, platform: str) -> PoolLayout:
    """Return the layout that a pool gets: `auto` is `tpu` on TPUs and `plain` elsewhere; a name is itself.

    Args:
        name: what was asked for.
        platform: of the devices, here or compiled for, as JAX names it.
    """
    if name != "auto":
        return name
    return "tpu" if platform == "tpu" else "plain"


CODECS: dict[str, Codec] = {
    "f32": Codec("f32"),
    "bf16": Codec("bf16"),
    "int8": Codec("int8", "token", is_rotated=True),
    "fp8_e4m3": Codec("fp8_e4m3", "token", is_rotated=True),
    "fp8_e5m2": Codec("fp8_e5m2", "token", is_rotated=True),
    "int8_static": Codec("int8", "static", is_rotated=True),
    "fp8_e4m3_static": Codec("fp8_e4m3", "static", is_rotated=True),
    "fp8_e5m2_static": Codec("fp8_e5m2", "static", is_rotated=True),
    "int4": Codec("int4", "slots"),
    "int4_token": Codec("int4", "channels", is_rotated=True),
}
# Keys have channels that are large at every token; values do not, and are better off in runs of channels.
OF_VALUES = {"int4": "int4_token"}


def find_codecs(name: str, value_name: str | None = None) -> tuple[Codec, Codec]:
    """Return the codecs of keys and of values; without a name of their own, values go by that of keys.

    Raises:
        ValueError: a name is unknown.
    """
    value_name = name if value_name is None else value_name
    return _find(name), _find(OF_VALUES.get(value_name, value_name))


def _find(name: str) -> Codec:
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {name!r}{hint}")
    return CODECS[name]
