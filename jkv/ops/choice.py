"""Which implementation of attention and of page writes runs: one by name, or the device's kernel if it can.

Knows kernels and their refusals; no cache.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax._src import config as jax_config  # whether Pallas interprets is private

from jkv.cache.codec import PoolLayout
from kernels_pallas import page_write
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.paged_attention import PagedArguments, Pages, Tiling

Chosen = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Implementation = Literal["auto", Chosen]

# What kernels are for.
_DEVICES = {"pallas_tpu": "TPUs", "pallas_gpu": "GPUs of compute capability 9.0"}
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
        device: that the program is for; None is this process's.

    Raises:
        ValueError: the name is unknown, or that of another device's kernel than `device`, and Pallas does not
            interpret.
    """
    check_name(implementation)
    device = jax.local_devices()[0] if device is None else device
    if implementation != "auto":
        is_foreign = implementation in _DEVICES and _kernel_of(device) != implementation
        if is_foreign and not _is_interpreted():
            raise ValueError(
                f"attention {implementation!r} runs on {_DEVICES[implementation]}, got {device.device_kind}; "
                "use 'auto'"
            )
        return implementation
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


def check_name(implementation: str) -> None:
    """Refuse a name that no implementation has.

    Raises:
        ValueError: lists those that there are.
    """
    if implementation not in (names := get_args(Implementation)):
        raise ValueError(
            f"attention implementation must be one of {', '.join(names)}, got {implementation!r}"
        )


def check_layout(
    chosen: Chosen, layout: PoolLayout, arguments: PagedArguments | LatentArguments, tiling: Tiling | None
) -> None:
    """Refuse pools by their layout's name where a GPU's kernel does not take them as they lie on TPUs.

    Raises:
        ValueError: says what the kernel takes.
    """
    if chosen != "pallas_gpu" or layout != "tpu":
        return
    if (reason := module_of(chosen, arguments).refusal(arguments, tiling)) is not None:
        raise ValueError(
            f"attention 'pallas_gpu' takes pools of layout 'plain' or 'gpu', got 'tpu': {reason}"
        )


class Writer(NamedTuple):
    """What writes a step's heads.

    Attributes:
        rows: writes what is encoded into an array, to be called as `page_write.xla`.
        encoding: returns what encodes heads and writes them into pools at once, to be called as
            `page_write.pallas_gpu.write_heads`; None where nothing does.
    """

    rows: Callable[..., Any]
    encoding: Callable[[tuple[Pages, ...], tuple[Any, ...]], Callable[..., Any] | None]


def choose_writer(implementation: Implementation, device: Any = None) -> Writer:
    """Return the page writes beside an implementation of attention.

    TPUs have a kernel that writes rows. GPUs have one that encodes, too; what it refuses goes to the scatter,
    which XLA makes with what it writes. What a kernel refuses is logged; one for TPUs that is named raises.

    Args:
        implementation: of attention.
        device: see `choose`.
    """
    chosen = choose(implementation, device=device)
    if chosen not in _DEVICES:
        return Writer(page_write.xla, lambda pools, heads: None)
    kernel = importlib.import_module(f"kernels_pallas.page_write.{chosen}")

    def write(pool: Any, rows: Any, slots: Any, **place: Any) -> Any:
        reason = kernel.refusal(pool, rows) if implementation == "auto" else None
        if reason is None:
            return kernel.write_pages(pool, rows, slots, **place)
        _LOGGER.info("page write: auto -> xla: %s", reason)
        return page_write.xla(pool, rows, slots, **place)

    def encoding(pools: tuple[Pages, ...], heads: tuple[Any, ...]) -> Callable[..., Any] | None:
        if (reason := kernel.refusal(pools, heads)) is None:
            return kernel.write_heads
        _LOGGER.info("page write: %s -> xla: %s", implementation, reason)
        return None

    if chosen == "pallas_tpu":
        return Writer(write, lambda pools, heads: None)
    return Writer(page_write.xla, encoding)


def module_of(name: Chosen, arguments: PagedArguments | LatentArguments) -> Any:
    """Return an implementation's module; a kernel's takes a second to import, so only who runs it does."""
    operation = "latent_attention" if isinstance(arguments, LatentArguments) else "paged_attention"
    return importlib.import_module(f"kernels_pallas.{operation}.{name}")


def _kernel_of(device: Any) -> Chosen | None:
    """Return the kernel for a device; None where there is none."""
    if device.platform == "tpu":
        return "pallas_tpu"
    # Products of a warp group are an instruction of compute capability 9.0 alone. A traced mesh does not say
    # its own: whose kernel is named for another machine is believed.
    if device.platform == "gpu" and getattr(device, "compute_capability", "9.0") == "9.0":
        return "pallas_gpu"
    return None


def _is_interpreted() -> bool:
    """Return whether Pallas interprets kernels, which then run on any device."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None
