"""Set the whole suite up: eight CPU devices, strict promotion, checked signatures, examples of any length."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import jaxtyping

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jaxtyping.install_import_hook(["jkv", "kernels_pallas"], "beartype.beartype")
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
