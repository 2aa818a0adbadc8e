"""Accelerators that programs are compiled for where there are none.

Knows compilers and their descriptions of devices; no cache and no model.
"""

import importlib.util
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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

_COMPILERS = {
    "v5e": _Compiler("libtpu", {"platform": "tpu", "topology_name": "v5e:2x2"}),
    "v6e": _Compiler("libtpu", {"platform": "tpu", "topology_name": "v6e:2x2"}),
    "h200": _Compiler(
        "jax_cuda13_plugin",
        {"platform": "cuda", "topology_name": "", "topology": "1x1x1", "target_config": _H200},
    ),
}

TARGETS = tuple(_COMPILERS)


def target(name: str) -> Mesh:
    """Return a mesh of one device of the machine, which need not be there.

    What is lowered for its shapes is compiled by the machine's own compiler and can be looked at, not run:

        cache = shapes_on(target("v6e"), jax.eval_shape(make_cache))
        program = jax.jit(step, donate_argnums=0).lower(cache).compile()

    Run with `JAX_PLATFORMS=cpu`, or JAX looks for the machine itself. For TPUs the environment variables
    ALLOW_MULTIPLE_LIBTPU_LOAD and TPU_SKIP_MDS_QUERY are set unless they are: without them only one process
    at a time may compile, and libtpu waits for the metadata server of a cloud.

    Args:
        name: one of `TARGETS`.

    Raises:
        ValueError: the name is unknown.
        ModuleNotFoundError: the compiler is not installed.
    """
    if name not in _COMPILERS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    module, arguments = _COMPILERS[name]
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"to compile for {name}, its compiler must be installed; pip install 'jkv[aot]'", name=module
        )
    if module == "libtpu":
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(**arguments)
    return Mesh(np.array(topology.devices[:1]), ("device",))


def shapes_on(mesh: Mesh, tree: Any) -> Any:
    """Return a tree's arrays as shapes that lie, each whole, on the devices of `mesh`."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)
