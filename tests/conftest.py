"""Set JAX up for the whole suite: eight CPU devices, strict promotion, checked signatures."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jaxtyping

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jaxtyping.install_import_hook(["jkv", "kernels_pallas"], "beartype.beartype")
