"""How keys and values are stored: the codecs by name, and the arrays that a page of each takes.

Imports no JAX; the arithmetic on arrays is `jkv.cache.encoding`.
"""

import difflib
from dataclasses import dataclass
from math import prod
from typing import Literal

Entry = Literal["f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"]
Scaling = Literal["none", "token", "static", "channels"]
PoolLayout = Literal["plain", "tpu", "gpu"]

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
MAX_SPAN = 32
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
        return prod(self.shape) * ITEM_BYTES[self.dtype]

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
        tile = min(TILE_ROWS, max(self.packing, 1 << (rows - 1).bit_length()))
        padded = (*outer, _round_up(rows, tile), _round_up(lanes, TILE_LANES))
        return prod(padded) * ITEM_BYTES[self.dtype]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Codec:
    """How one of keys and values is stored.

    Attributes:
        entry: what one entry of a head becomes.
        scaling: which entries share a scale. `token`: those of a token and head. `static`: those of a head in
            a layer, measured beforehand. `channels`: runs of at most 32 channels of a token and head, with a
            zero point of their own.
        is_rotated: heads are multiplied by a Hadamard matrix first, which spreads outlying channels.
    """

    entry: Entry
    scaling: Scaling = "none"
    is_rotated: bool = False

    def span(self, head_dim: int) -> int:
        """Return the channels that share a scale: the most, up to 32, that divide half a head."""
        half = head_dim // 2
        return next(size for size in range(min(MAX_SPAN, half), 0, -1) if half % size == 0)

    def page_arrays(
        self, *, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int
    ) -> dict[str, ArraySpec]:
        """Return the arrays that hold `num_pages` pages, by their names in `Stored`."""
        rows = (num_pages, num_kv_heads, page_size)
        width = head_dim // 2 if self.entry == "int4" else head_dim
        arrays = {"data": ArraySpec((*rows, width), DTYPES[self.entry])}
        if self.scaling == "token":
            arrays["scale"] = ArraySpec(rows, "float32")
        elif self.scaling == "channels":
            runs = ArraySpec((*rows, head_dim // self.span(head_dim)), "bfloat16")
            arrays |= {"scale": runs, "zero": runs}
        return arrays


CODECS: dict[str, Codec] = {
    "f32": Codec("f32"),
    "bf16": Codec("bf16"),
    "int8": Codec("int8", "token", is_rotated=True),
    "fp8_e4m3": Codec("fp8_e4m3", "token", is_rotated=True),
    "fp8_e5m2": Codec("fp8_e5m2", "token", is_rotated=True),
    "int8_static": Codec("int8", "static", is_rotated=True),
    "fp8_e4m3_static": Codec("fp8_e4m3", "static", is_rotated=True),
    "fp8_e5m2_static": Codec("fp8_e5m2", "static", is_rotated=True),
    "int4": Codec("int4", "channels", is_rotated=True),
}


def find_codec(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {name!r}{hint}")
    return CODECS[name]
