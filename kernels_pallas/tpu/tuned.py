"""Tilings that were found better than the formula's, by chip and sizes: `tuned.yaml` beside a kernel.

Knows the file, which `scripts/tune_kernel.py` writes, and sizes; no array.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Literal, get_args

import yaml
from jax.experimental.pallas import tpu as pltpu
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kernels_pallas.paged_attention.contract import Tiling
from kernels_pallas.tpu import sizes
from kernels_pallas.tpu.parts import Part
from kernels_pallas.tpu.sizes import Shape

Chip = Literal["v4", "v5e", "v5p", "v6e", "7x"]
_Count = Annotated[int, Field(gt=0)]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Calls:
    """The calls that a tiling is for, of however many sequences and pages.

    Attributes:
        chip: by JAX's name for it.
        pools: codec and lanes of a slot of each, as `int8/token x 128 + int8/token x 128`.
        num_kv_heads: heads of the pools.
        group: query heads of a KV head.
        page_size: slots of a page.
        window: see `paged_attention.reference`.
        step: whether rows have one new token or more.
    """

    chip: Chip
    pools: str
    num_kv_heads: _Count
    group: _Count
    page_size: _Count
    window: _Count | None
    step: Literal["decode", "chunk"]


@dataclass(frozen=True, config=_STRICT)
class Tuned:
    """A tiling.

    Attributes:
        block_tokens: see `Tiling`, as the next two.
        query_tokens: see there.
        num_buffers: see there.
        evidence: what showed that it is better than the formula's.
    """

    block_tokens: _Count
    query_tokens: _Count
    num_buffers: Annotated[int, Field(ge=2)]
    evidence: str


@dataclass(frozen=True, config=_STRICT)
class Entry:
    """A tiling and what it is for."""

    calls: Calls
    tiling: Tuned


ENTRIES = TypeAdapter(list[Entry])


def tiling_for(shape: Shape, *, window: int | None, file: Path) -> Tiling:
    """Return the tiling that a call gets where none is given: the file's, or the formula's.

    Raises:
        ValueError: the file is wrong, or its tiling takes more memory than there is.
    """
    chip = chip_here()
    tuned = None if chip is None else read(file).get(calls_of(shape, chip, window=window))
    if tuned is None:
        return sizes.tiling_for(shape, window=window)
    block = min(tuned.block_tokens, sizes.longest_seen(shape, window=window))
    tiling = Tiling(block, tuned.query_tokens, num_buffers=tuned.num_buffers)
    if (why := sizes.vmem_refusal(shape, tiling)) is not None:
        raise ValueError(f"{_name(file)}: the tiling of {tuned.block_tokens} tokens for {chip}: {why}")
    return tiling


def chip_here() -> Chip | None:
    """Return the chip that a program is traced for; None where it is no TPU that files may name."""
    if not pltpu.is_tpu_device():
        return None
    name = str(pltpu.get_tpu_info().chip_version)
    return next((chip for chip in get_args(Chip) if chip == name), None)


def multiplies_int8() -> bool:
    """Return whether the chip that a program is traced for multiplies 8-bit integers, as a v7x does not."""
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().int8_ops_per_second > 0


def calls_of(shape: Shape, chip: Chip, *, window: int | None) -> Calls:
    """Return what a file knows a call by."""
    return Calls(
        chip=chip,
        pools=" + ".join(map(_pool, shape.parts)),
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        page_size=shape.page_size,
        window=window,
        step="decode" if shape.time == 1 else "chunk",
    )


@functools.cache  # A file of the package, which the attention of every layer asks for.
def read(file: Path) -> dict[Calls, Tuned]:
    """Return the tilings of a file.

    Raises:
        ValueError: a key or value is wrong, or calls have two tilings; of what is wrong the first is named.
    """
    # As JSON, whose mappings pydantic takes for dataclasses however strict it is.
    text = json.dumps(yaml.safe_load(file.read_text()))
    try:
        entries = ENTRIES.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{_name(file)}: {where}: {problem['msg']}, got {problem['input']!r}") from error
    tilings = {entry.calls: entry.tiling for entry in entries}
    if len(tilings) < len(entries):
        raise ValueError(f"{_name(file)}: calls must have one tiling, got {len(entries)} of {len(tilings)}")
    return tilings


def _pool(part: Part) -> str:
    codec = part.dtype.name if part.entry == "number" else part.entry
    scaling = "" if part.scaling is None else f"/{part.scaling}"
    return f"{codec}{scaling} x {part.columns.num_parts * part.columns.width}"


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"
