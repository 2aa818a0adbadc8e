"""`jkv check`: a resolved configuration and what follows from it.

Knows sizes and names; reads headers of weights, and asks JAX for the platform alone.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import jax
import tyro

from jkv import ops
from jkv.axes import LOGICAL_ARRAYS
from jkv.cli.fits import check_divides, check_packs, declared_meshes, weight_sizes
from jkv.cli.inspect import describe_groups
from jkv.cli.options import parse
from jkv.cli.placements import describe_placements
from jkv.config import (
    DecodeConfig,
    MeshSection,
    SizesSection,
    config_yaml,
    load_config,
)
from jkv.decode.configured import configured_model, configured_scales, configured_spec
from jkv.models.model_config import ModelConfig, with_kv_copies
from jkv.models.sizes import config_of
from jkv.models.weights.locate import is_hub_id
from jkv.plan.decoder import Stored, parameters


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a resolved configuration and what follows from it.

    Flags after its name take a section from another file (--cache dense-bf16) or set a value
    (--cache.page-size 32).
    """

    config: tyro.conf.Positional[str]
    """Name or .yaml file."""
    devices: int | None = None
    """Devices of the mesh, simulated on this CPU: show where every array lies and what a step sends."""


def run(argv: Sequence[str]) -> None:
    """Check the configuration that the command line names, and print what follows from it."""
    arguments, overrides = parse(Arguments, argv, "check")
    config = load_config(arguments.config, overrides)
    model = stored_config(config)
    if not is_hub_id(config.model.path):
        configured_scales(config)
    if arguments.devices is not None:
        simulate_devices(config, arguments.devices, model)
        if model is None:
            raise ValueError(
                f"--devices needs a model on this machine or its sizes, got {config.model.path} of the hub; "
                "give model.sizes"
            )
    shown = check(arguments.config, overrides, model=model)
    if model is not None and arguments.devices is not None:
        shown += "\n" + describe_placements(config, model)
    print(shown, end="")


def simulate_devices(config: DecodeConfig, num_devices: int, model: ModelConfig | None) -> None:
    """Let JAX make as many devices of the CPU as the mesh has, unless it has started.

    Raises:
        ValueError: the mesh has another number, or one; names a mesh of that number that divides the model.
    """
    mesh = config.mesh
    if num_devices != mesh.num_devices or num_devices == 1:
        fitting = "" if model is None else next(_fitting_meshes(config, num_devices, model), "")
        raise ValueError(
            f"--devices must be those of a mesh of several, got {num_devices} for one of {mesh.num_devices}; "
            f"choose another mesh, as {fitting or '--mesh cpu-2x4'}"
        )
    # A backend that runs keeps its devices, and making the mesh says if they are too few.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_devices)


def _fitting_meshes(config: DecodeConfig, num_devices: int, model: ModelConfig) -> Iterator[str]:
    """Find flags of meshes of so many devices that divide the model and its batch."""
    meshes = [(f"--mesh {name}", mesh) for name, mesh in declared_meshes()]
    single = load_config("smollm2-cpu").mesh
    for ways in range(num_devices, 0, -1):
        axes = (("data", num_devices // ways), ("model", ways))
        flags = f"--mesh single --mesh.axes data {num_devices // ways} model {ways}"
        meshes.append((flags, replace(single, axes=axes)))
    for flags, mesh in meshes:
        if mesh.num_devices == num_devices > 1 and mesh.kv_copies == config.mesh.kv_copies:
            with contextlib.suppress(ValueError):
                rows = config.engine.max_sequences
                check_divides(weight_sizes(model), mesh, name="", num_sequences=rows)
                yield flags


def stored_config(config: DecodeConfig) -> ModelConfig | None:
    """Return the configured model, of one on the hub what its sizes say; None where it has none.

    Raises:
        ValueError: as `configured_model`.
    """
    if config.model.has_random_weights or not is_hub_id(config.model.path):
        return configured_model(config)
    sizes = config.model.sizes
    return None if sizes is None else with_kv_copies(config_of(sizes), config.mesh.kv_copies)


def check(config: str, overrides: Sequence[str] = (), *, model: ModelConfig | None = None) -> str:
    """Return the resolved configuration as YAML, and what follows from it.

    Args:
        config: see `jkv.config.load_config`.
        overrides: see `jkv.config.load_config`.
        model: sizes of the configured model; None leaves out what depends on them.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the model.
        ValueError: the model's weights do not pack as configured.
    """
    resolved = load_config(config, overrides)
    parts = [config_yaml(resolved), _devices(resolved), _specs(resolved.mesh)]
    if model is not None:
        sizes, rows = weight_sizes(model), resolved.engine.max_sequences
        check_divides(sizes, resolved.mesh, name=resolved.model.path, num_sequences=rows)
        check_packs(sizes, resolved.model.weights, resolved.mesh)
        parts += [_weights(resolved, sizes), _cache(resolved, model)]
    return "\n".join(parts)


def _devices(config: DecodeConfig) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in config.mesh.axes)
    asked = config.engine.attention
    # A kernel by name may be another machine's.
    chosen = ops.choose(asked) if asked == "auto" else asked
    return f"devices: {config.mesh.num_devices} ({axes})\nattention: {asked} -> {chosen}\n"


def _specs(mesh: MeshSection) -> str:
    lines = [
        f"  {array:24}{' '.join(map(_dimension, axes)):38}P({', '.join(map(_dimension, mesh.spec(axes)))})"
        for array, axes in LOGICAL_ARRAYS.items()
    ]
    return "\n".join(["partition specs:", *lines, ""])


def _dimension(axes: str | tuple[str, ...] | None) -> str:
    return f"({' '.join(axes)})" if isinstance(axes, tuple) else str(axes)


def _weights(config: DecodeConfig, sizes: SizesSection) -> str:
    mesh, lines = config.mesh, []
    parts = parameters(replace(sizes, num_kv_heads=sizes.num_kv_heads // mesh.kv_copies))
    for stored in get_args(Stored):
        try:
            check_packs(sizes, stored, mesh)
            shown = _bytes(sum(part.num_bytes(stored) for part in parts))
        except ValueError as error:
            shown = f"none: {error}"
        lines.append(f"  {stored:10}{shown}")
    stored = config.model.weights
    on_device = sum(part.num_bytes(stored, mesh) for part in parameters(sizes))
    lines.append(f"  on a device, {stored}: {_bytes(on_device)}")
    return "\n".join([f"parameters: {sum(part.num_parameters() for part in parts):,}", *lines, ""])


def _cache(config: DecodeConfig, model: ModelConfig) -> str:
    cache, mesh = config.cache, config.mesh
    spec = configured_spec(config, model)
    lines = [
        f"cache: {_bytes(spec.bytes_per_token)} a token, {_bytes(spec.bytes_per_page)} a page",
        f"  pool layout: {cache.pool_layout} -> {spec.layout}, {_bytes(spec.padded_bytes_per_page)} a page",
    ]
    if spec.num_stripes > 1:
        lines.append(f"  the pages of a sequence go round {spec.num_stripes} devices")
    if model.kv_copies > 1:
        heads = model.num_kv_heads // model.kv_copies
        lines.append(f"  each of {heads} KV heads is held by {model.kv_copies} devices of its axis")
    longest = max(config.engine.prefill_buckets)
    groups = describe_groups(model, spec, max_chunk=longest)
    lines += [_group(model, **group) for group in groups]
    sequences = config.engine.max_sequences
    shards = mesh.shards("page") * spec.num_stripes
    if cache.num_pages != "auto":
        # No group gets more pages than its tables can name.
        tokens = model.max_length if cache.capacity == "auto" else cache.capacity
        rows = sequences // mesh.shards("page")
        pools = [
            min(cache.num_pages, rows * spec.stripe_pages(tokens, index)) for index in range(len(groups))
        ]
        pages = " and ".join(f"{shards * pool:,}" for pool in pools)
        total = shards * spec.paged_bytes(rows, pools)
        lines.append(f"  a pool of {pages} pages: {_bytes(total)}")
        on_device = spec.split_heads(mesh.shards("kv_head")).paged_bytes(rows, pools)
        return "\n".join([*lines, f"  on a device: {_bytes(on_device)}", ""])
    if cache.capacity == "auto":
        return "\n".join([*lines, "  a sequence holds its prompt and new tokens", ""])
    total = spec.num_stripes * spec.dense_bytes(sequences, cache.capacity)
    on_device = spec.split_heads(mesh.shards("kv_head")).dense_bytes(
        sequences // mesh.shards("page"), cache.capacity
    )
    lines.append(f"  {sequences} sequences of {cache.capacity} tokens: {_bytes(total)}")
    lines.append(f"  on a device: {_bytes(on_device)}")
    return "\n".join([*lines, ""])


def _group(
    model: ModelConfig,
    *,
    layers: int,
    kind: str,
    window: int | None,
    bytes_per_token: int,
    bytes_at_max_length: dict[str, int],
) -> str:
    """Return a cache group in one line."""
    seen = " of latents" if kind == "latent" else ""
    seen += "" if window is None else f", window {window:,}"
    sizes = ", ".join(f"{layout} {_bytes(count)}" for layout, count in bytes_at_max_length.items())
    return (
        f"  {layers} layers{seen}: {_bytes(bytes_per_token)} a token; "
        f"a sequence of {model.max_length:,} tokens: {sizes}"
    )


def _bytes(count: int) -> str:
    """Return a number of bytes, with its megabytes where it has any."""
    return f"{count:,} bytes" + (f" ({count / 1e6:,.1f} MB)" if count >= 10**6 else "")
