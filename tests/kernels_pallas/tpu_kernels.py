"""TPU kernels interpreted, with pools as they lie on a TPU, and with faults in their source."""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # its races are private
from jax.experimental.pallas import tpu as pltpu
from jax.stages import Compiled

from jkv.cache.codec import Codec
from jkv.cache.encoding import encode, encode_run, largest_entry
from kernels_pallas.paged_attention import Pages, PageSizes
from kernels_pallas.tpu import queue, walk

from ..machines import recording
from ..rows import in_rows
from .faults import Fault


def interpreted(call: Callable[[], Any]) -> Any:
    """Run in the interpreter, where what was never written is NaN; races are looked for."""
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(recording(pltpu.InterpretParams)):
        return jax.block_until_ready(call())


def has_races() -> bool:
    """Return whether the latest run had races."""
    assert interpreter.races is not None
    return interpreter.races.races_found


def encoded_pages(codec: Codec, raw: Pages) -> Pages:
    """Return float32 pages as they lie on a TPU, NaN in whatever may hold it."""
    num_heads, page_size, head_dim = raw.data.shape[1:]
    scale = None
    if codec.scaling == "static":
        scale = jnp.linspace(0.01, 0.04, num_heads) * (127 / largest_entry(codec))
    if codec.scaling == "slots":
        stored = encode_run(raw.data.reshape(*raw.data.shape[:2], -1, codec.span(page_size), head_dim))
        stored = stored.replace(data=stored.data.reshape(*raw.data.shape[:3], -1))
        stored = jax.tree.map(lambda array: array.swapaxes(1, 2), stored)
    else:
        stored = encode(codec, raw.data.swapaxes(1, 2), scale)
    shapes = codec.page_shapes(page_size=page_size, head_dim=head_dim)
    data, own_scale = _laid_out(stored.data), _laid_out(stored.scale)
    assert data is not None
    return Pages(
        data,
        scale if own_scale is None else own_scale,
        _laid_out(stored.zero),
        entry=codec.entry if codec.entry in ("fp8_e4m3", "fp8_e5m2", "int4") else "number",
        stated=PageSizes(page_size, head_dim, shapes["scale"].shape if "scale" in shapes else None),
    )


def _laid_out(array: jax.Array | None) -> jax.Array | None:
    if array is None:
        return None
    # Of the poison, entries of a live slot's padding are left out: they are written with its entries.
    rows = np.asarray(array.astype(jnp.float32)).swapaxes(1, 2)
    fill = np.nan if rows.ndim == 3 else 0
    return jnp.asarray(in_rows(rows, 128, fill)).astype(array.dtype)


# In an order in which large float32 pools are not those of a v5e, whose memory they do not fit.
AOT_MACHINES = ("v6e", "tpu7x", "v5e", "v5p")
CODECS_IN_TURNS = "f32", "fp8_e4m3", "fp8_e5m2", "int8_static", "fp8_e4m3_static"


def aot_cases(models: Iterable[str], codecs: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return each model in bfloat16 and int8 for every machine, and in the codecs for machines in turns."""
    whole = list(itertools.product(models, ("bf16", "int8"), AOT_MACHINES))
    pairs = itertools.product(enumerate(models), enumerate(codecs))
    return whole + [(name, codec, AOT_MACHINES[(i + j) % 4]) for (i, name), (j, codec) in pairs]


# An instruction of a compiled program: the type of its result, and its name.
_MADE = re.compile(r"^\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
_DIMS = re.compile(r"\w+\[([\d,]+)\]")


def assert_nothing_is_as_a_pool(program: Compiled, pages: Pages) -> None:
    """Assert that a compiled call makes no array of all pages, in any memory."""
    num_pages, num_heads = pages.data.shape[:2]
    found = [
        f"{made} {name}"
        for made, name in _MADE.findall(str(program.as_text()))
        if name not in ("parameter", "bitcast")
        for dims in _DIMS.findall(made)
        if dims.startswith((f"{num_pages},", f"{num_pages * num_heads},"))
    ]
    assert not found, f"nothing may be made of a pool, got {sorted(set(found))}"


FAULTS: dict[str, Fault] = {
    "a copy that is not waited for": (queue, "pltpu.make_async_copy(tile, tile, semaphore).wait()", "pass"),
    "a copy into a tile that is in use": (
        queue,
        "self.sizes.num_buffers - 1, fetch",
        "self.sizes.num_buffers + 1, fetch",
    ),
    "a copy into another tile": (
        queue,
        "tiles.data.at[buffer, place]",
        "tiles.data.at[self._next(buffer), place]",
    ),
    "a mask that is off by one": (walk, "is_seen = past <= (", "is_seen = past < ("),
    "a last page that is left out": (queue, "ends[piece] + page_size - 1", "ends[piece]"),
    "a scale that is wrong by 2 %": (walk, "logits *= options.scale", "logits *= 1.02 * options.scale"),
    "a sum that is not rescaled": (
        walk,
        "last[2] * _repeated(keep, last[2].shape[-1])",
        "last[2]",
    ),
}
