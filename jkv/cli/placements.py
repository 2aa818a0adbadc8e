"""Where a configuration's arrays lie on several devices, and what a step sends between them.

The devices are those of a CPU, as many as the mesh has: what is shown is what XLA makes of jkv's programs.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import jax

from jkv.config import DecodeConfig
from jkv.decode.configured import cache_options, configured_spec, make_sharding
from jkv.models.model_config import ModelConfig
from jkv.plan.depth import at_full_depth, costs_of, shallow_models
from jkv.plan.programs import Workload, cache_shapes, compile_phase, weight_shapes
from jkv.sharding import Sharding


def describe_placements(config: DecodeConfig, model: ModelConfig) -> str:
    """Return every array's shape, PartitionSpec and bytes of a device, and a decode step's collectives.

    Args:
        config: of a mesh of several devices.
        model: its sizes.

    Raises:
        ValueError: there are not as many devices, or the mesh does not divide the model or the cache.
    """
    sharding = make_sharding(config.mesh)
    assert sharding is not None, "a mesh of one device places nothing"
    workload = _workload(config, model, sharding)
    weights, cache = weight_shapes(workload), cache_shapes(workload)
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(cache)}
    one, deeper = shallow_models(model)
    costs, *more = (
        costs_of(compile_phase(workload.with_model(shallow), "decode")) for shallow in (one, *deeper.values())
    )
    found = at_full_depth(model, costs, dict(zip(deeper, more, strict=True))).collectives
    sent = [
        f"  {each.kind} of {each.num_devices}: {count} with {count * each.num_bytes:,} bytes"
        for each, count in found.items()
        if each.num_loops
    ]
    return "\n".join(
        [
            "weights on a device:",
            *_rows(weights),
            f"cache on a device, {workload.num_sequences} sequences of {workload.capacity} tokens:",
            *_rows({f"cache{name}": leaf for name, leaf in arrays.items()}),
            f"collectives of a decode step of {workload.num_sequences} sequences:",
            *(sent or ["  none"]),
            "",
        ]
    )


def _workload(config: DecodeConfig, model: ModelConfig, sharding: Sharding) -> Workload:
    configured_spec(config, model)  # refuses what the model does not have
    tokens = max(config.engine.prefill_buckets) + config.engine.sampling.max_new_tokens
    capacity = min(tokens, model.max_length) if config.cache.capacity == "auto" else config.cache.capacity
    weights = config.model.weights
    return Workload(
        model=model,
        sharding=sharding,
        num_sequences=config.engine.max_sequences,
        capacity=capacity,
        width=1,
        cache=cache_options(config),
        is_paged=config.cache.layout == "paged",
        num_pages=None if config.cache.num_pages == "auto" else config.cache.num_pages,
        dtype=config.model.dtype,
        param_dtype=weights,
    )


def _rows(arrays: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each array, one for those of all layers that are alike."""
    alike: dict[tuple[str, Any], list[Any]] = {}
    for name, array in arrays.items():
        form = (re.sub(r"\blayers\.\d+\.", "layers.*.", name), (array.shape, array.sharding.spec))
        alike.setdefault(form, []).append(array)
    for (name, (shape, spec)), found in alike.items():
        nbytes = sum(prod(one.sharding.shard_shape(shape)) * one.dtype.itemsize for one in found)
        times = f" x {len(found)}" if len(found) > 1 else ""
        placed = ", ".join(map(str, spec))
        yield f"  {name + times:44} {list(shape)!s:24} P({placed}): {nbytes:,} bytes"
