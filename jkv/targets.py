"""Accelerators that programs are compiled for where there are none.

Knows compilers and their descriptions of devices; no cache and no model.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class _Compiler(NamedTuple):
    """Who compiles for a target, and what it asks for.

    Attributes:
        module: the Python module whose presence shows that the compiler is installed.
        arguments: of `topologies.get_topology_desc`.
    """

    module: str
    arguments: dict[str, str]


# XLA's description of the device: NVIDIA's data sheet, and what a driver of CUDA 13.0 reports.
_H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""

# NVIDIA's data sheet; the rest is as of an H200.
_H100 = (
    _H200.replace("H200", "H100")
    .replace("device_memory_size: 151397597184", "device_memory_size: 80000000000")
    .replace("memory_bandwidth: 4800000000000", "memory_bandwidth: 3350000000000")
)


def _tpu(name: str) -> _Compiler:
    return _Compiler("libtpu", {"platform": "tpu", "topology_name": name})


def _gpu(description: str, num_devices: int) -> _Compiler:
    shape = {"topology_name": "", "topology": f"1x1x{num_devices}"}
    return _Compiler("jax_cuda13_plugin", {"platform": "cuda", "target_config": description, **shape})


_COMPILERS = {
    "v5e": _tpu("v5e:2x2"),
    "v5p": _tpu("v5p:2x2x1"),
    "v6e": _tpu("v6e:2x2"),
    "tpu7x": _tpu("tpu7x:2x2x1"),
    "h200": _gpu(_H200, 1),
}

TARGETS = tuple(_COMPILERS)

# Without them only one process at a time may compile, and libtpu waits for a cloud's metadata server, then
# warns that it found neither workers nor their type. Any type will do: a topology says what to compile for.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}


def target(name: str) -> Mesh:
    """Return a mesh of one device of the machine, which need not be there.

    What is lowered for its shapes is compiled by the machine's own compiler and can be looked at, not run:

        cache = shapes_on(target("v6e"), jax.eval_shape(make_cache))
        program = jax.jit(step, donate_argnums=0).lower(cache).compile()

    Run with `JAX_PLATFORMS=cpu`, or JAX looks for the machine itself. For TPUs the environment variables of
    `_NO_TPU` are set unless they are. JAX's persistent compilation cache is turned off for the process: it
    cannot read such programs back, and warns of each.

    Args:
        name: one of `TARGETS`.

    Raises:
        ValueError: the name is unknown.
        ModuleNotFoundError: the compiler is not installed.
    """
    if name not in _COMPILERS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    topology = _topology(name, _COMPILERS[name])
    return Mesh(np.array(topology.devices[:1]), ("device",))


def target_mesh(
    machine: str, chips: Sequence[int], axes: Mapping[str, int], axis_type: AxisType = AxisType.Auto
) -> Mesh:
    """Return a mesh of linked devices of a machine, which need not be there; see `target`.

    Args:
        machine: a TPU by libtpu's name for it (`v5e`, `v5p`, `v6e`, `tpu7x`), `h100` or `h200`.
        chips: along each axis of a TPU's torus; of GPUs, how many one server has.
        axes: devices of each mesh axis, outermost first; those of a TPU are placed along its torus.
        axis_type: of all axes.

    Raises:
        ModuleNotFoundError: the compiler is not installed.
        ValueError: a mesh axis is not made of whole axes of the torus.
    """
    gpus = {"h100": _H100, "h200": _H200}
    shape = "x".join(map(str, chips))
    compiler = _gpu(gpus[machine], chips[0]) if machine in gpus else _tpu(f"{machine}:{shape}")
    topology = _topology(f"{machine}:{shape}", compiler)
    sizes, names = tuple(axes.values()), tuple(axes)
    try:
        return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(axes), devices=topology.devices)
    except NotImplementedError as error:
        raise ValueError(
            f"each mesh axis must be made of whole axes of the torus {shape}, got {dict(axes)}; choose sizes "
            "that are products of some of them"
        ) from error


def _topology(name: str, compiler: _Compiler) -> Any:
    module, arguments = compiler
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"to compile for {name}, its compiler must be installed; pip install 'jkv[aot]'", name=module
        )
    jax.config.update("jax_enable_compilation_cache", False)
    if module == "libtpu":
        for variable, value in _NO_TPU.items():
            os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(**arguments)


def shapes_on(mesh: Mesh, tree: Any) -> Any:
    """Return a tree's arrays as shapes that lie, each whole, on the devices of `mesh`."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)
