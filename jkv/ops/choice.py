"""Which implementation of attention runs: one by name, or the platform's kernel where it takes the call.

Knows kernels and their refusals; no cache.
"""

import importlib
import logging
from typing import Any, Literal, get_args

import jax

from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.paged_attention import PagedArguments, Tiling

Chosen = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Implementation = Literal["auto", Chosen]

_LOGGER = logging.getLogger(__name__)


def choose(
    implementation: Implementation,
    arguments: PagedArguments | LatentArguments | None = None,
    tiling: Tiling | None = None,
    device: Any = None,
) -> Chosen:
    """Return the implementation that runs: a name is itself; `auto` is the device's kernel, or `xla`.

    What `auto` chooses for a call is logged, with the reason where it is not a kernel.

    Args:
        implementation: `auto`, or one by name.
        arguments: the call; None asks for the platform's choice, whatever is called.
        tiling: of the call.
        device: that the program is for; None is this process's. A program without a mesh that is for another
            device names its kernel.

    Raises:
        ValueError: the name is unknown.
    """
    names = get_args(Implementation)
    if implementation not in names:
        raise ValueError(
            f"attention implementation must be one of {', '.join(names)}, got {implementation!r}"
        )
    if implementation != "auto":
        return implementation
    device = jax.local_devices()[0] if device is None else device
    kernel = _kernel_of(device)
    if arguments is None:
        return kernel or "xla"
    if kernel is None:
        reason = f"{device.device_kind} has no kernel"
    else:
        reason = module_of(kernel, arguments).refusal(arguments, tiling)
    chosen = kernel if kernel is not None and reason is None else "xla"
    _LOGGER.info("attention: auto -> %s%s", chosen, "" if reason is None else f": {reason}")
    return chosen


def module_of(name: Chosen, arguments: PagedArguments | LatentArguments) -> Any:
    """Return an implementation's module; a kernel's takes a second to import, so only who runs it does."""
    operation = "latent_attention" if isinstance(arguments, LatentArguments) else "paged_attention"
    return importlib.import_module(f"kernels_pallas.{operation}.{name}")


def _kernel_of(device: Any) -> Chosen | None:
    """Return the kernel for a device; None where there is none."""
    if device.platform == "tpu":
        return "pallas_tpu"
    # Products of a warp group are an instruction of compute capability 9.0 alone.
    if device.platform == "gpu" and device.compute_capability == "9.0":
        return "pallas_gpu"
    return None
