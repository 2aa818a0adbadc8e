"""Decode steps of models on TPUs, of paged and of latent attention: as shapes, and filled.

What `bench_kernel`, `tune_kernel` and `tpu_static` have in common; times and counts nothing.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.codec import CODECS
from kernels_pallas.latent_attention import pallas_tpu as latent_kernel
from kernels_pallas.latent_attention import xla as latent_xla
from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention import Pages, Tiling, pallas_tpu, xla
from kernels_pallas.paged_attention.shapes import MODELS, Shape
from kernels_pallas.tpu.sizes import Sizes
from tests.kernels_pallas.models import latent_arguments, model_arguments

ALL_MODELS: dict[str, Shape | LatentShape] = MODELS | LATENT_MODELS
DECODES = [name for name, shape in ALL_MODELS.items() if shape.time == 1]


class Step(NamedTuple):
    """A step.

    Attributes:
        shape: of the model.
        kernel: the module of the TPU kernel.
        functions: `pallas_tpu` and `xla`, of arguments, sinks and options.
        arguments: of the call, as shapes.
        pools: of them.
        num_pages: of a layer.
    """

    shape: Shape | LatentShape
    kernel: Any
    functions: dict[str, Callable[..., Any]]
    arguments: Any
    pools: tuple[Pages, Pages]
    num_pages: int

    @property
    def sinks(self) -> Any:
        """Sinks as a shape; None where there are none."""
        if not isinstance(self.shape, Shape) or not self.shape.has_sinks:
            return None
        return jax.ShapeDtypeStruct((self.shape.num_heads,), jnp.float32)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, scales of tokens included."""
        arrays = [array for array in jax.tree.leaves(self.pools) if array.ndim > 1]
        return sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays)

    @property
    def seen_bytes(self) -> int:
        """Bytes of the pages that the step sees."""
        shape, pages = self.shape, 0
        for total in shape.totals:
            unseen = 0 if shape.window is None else max(0, total - shape.time - shape.window + 1)
            pages += -(-total // shape.page_size) - unseen // shape.page_size
        return pages * self.page_bytes

    def call(self, name: str, tiling: Tiling | None = None) -> Callable[[Any, Any], jax.Array]:
        """Return an implementation as a function of arguments and sinks."""
        shape = self.shape
        options: dict[str, Any] = {"scale": 0.1, "window": shape.window, "tiling": tiling}
        if isinstance(shape, Shape):
            options["soft_cap"] = shape.soft_cap
        function = functools.partial(self.functions[name], num_pages=self.num_pages, **options)

        def call(arguments: Any, sinks: Any) -> jax.Array:
            return function(arguments, **({} if sinks is None else {"sinks": sinks}))[0]

        return call

    def tiling_for(self) -> Tiling:
        """Return the tiling that the kernel takes here."""
        return self.kernel.tiling_for(self.arguments, window=self.shape.window)

    def sizes_of(self, tiling: Tiling) -> Sizes:
        """Return how the kernel cuts the work."""
        return self.kernel.sizes_of(self.arguments, self.num_pages, window=self.shape.window, tiling=tiling)


def step_of(model: str, codec: str) -> Step:
    """Return a model's step with its cache in a codec, whose layer is the only one."""
    shape = ALL_MODELS[model]
    if isinstance(shape, Shape):
        arguments, num_pages = model_arguments(shape, codec, num_layers=1)
        functions = {"pallas_tpu": pallas_tpu.paged_attention, "xla": xla}
        return Step(shape, pallas_tpu, functions, arguments, arguments[1:3], num_pages)
    arguments, num_pages = latent_arguments(shape, codec, num_layers=1)
    functions = {"pallas_tpu": latent_kernel.latent_attention, "xla": latent_xla}
    return Step(shape, latent_kernel, functions, arguments, arguments[2:4], num_pages)


def filled(step: Step) -> Any:
    """Return arguments whose pages lie in a random order, with random entries and scales that suit them."""
    random, shape = np.random.default_rng(0), step.shape
    table = random.permutation(step.num_pages).reshape(step.arguments.page_table.shape)
    totals, lens = np.asarray(shape.totals), np.full(len(shape.totals), shape.time)
    arguments = jax.tree.map(_entries, step.arguments)
    rows = {"page_table": table, "starts": totals - lens, "lens": lens, "page_offset": np.zeros(())}
    return arguments._replace(**{name: jnp.asarray(array, jnp.int32) for name, array in rows.items()})


def _entries(array: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(0)
    if array.dtype == jnp.uint8:  # Bits of fp8, positive and finite.
        return jax.random.randint(key, array.shape, 0, 0x40).astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jax.random.randint(key, array.shape, -127, 128).astype(array.dtype)
    if array.dtype == jnp.float32:  # Scales.
        return jax.random.uniform(key, array.shape, minval=0.01, maxval=0.02)
    return jax.random.normal(key, array.shape, array.dtype)


def checked(what: str, names: str, known: Iterable[str]) -> list[str]:
    """Return the names of a list.

    Raises:
        SystemExit: one of them is unknown.
    """
    found, known = names.split(","), list(known)
    unknown = [name for name in found if name not in known]
    if unknown:
        raise SystemExit(f"{what} must be of {', '.join(known)}, got {unknown[0]!r}")
    return found


def checked_codecs(names: str) -> list[str]:
    """Return the codecs of a list, each of keys and, after a slash, of values.

    Raises:
        SystemExit: one of them is unknown.
    """
    checked("codecs", names.replace("/", ","), CODECS)
    for pair in names.split(","):
        if pair.count("/") > 1:
            raise SystemExit(f"codecs must be of keys and, after one slash, of values, got {pair!r}")
    return names.split(",")


def taken_step(model: str, codec: str) -> Step:
    """Return a model's step.

    Raises:
        SystemExit: the kernel does not take it.
    """
    step = step_of(model, codec)
    if (why := step.kernel.refusal(step.arguments)) is not None:
        raise SystemExit(f"{model} in {codec} is not taken: {why}")
    return step
