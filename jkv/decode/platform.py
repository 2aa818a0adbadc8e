"""`jax.jit` with the compiler options that a platform needs.

Knows platforms; no model and no loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILER_OPTIONS: dict[str, dict[str, str]] = {
    # XLA's CPU backend hands sums to a library that cannot fuse the unpacking of int8 and 4-bit weights, and
    # writes each term to memory. Products still go to the library.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
}


class PlatformJit:
    """A function under `jax.jit`, its options chosen by the default backend when it is first used.

    Importing a module must not start a backend, so the choice waits.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options

    @functools.cached_property
    def _jitted(self) -> Any:
        return self.jitted_for(jax.default_backend())

    def jitted_for(self, platform: str) -> Any:
        """Return the jitted function with the options of a platform, whose devices need not be here."""
        return jax.jit(self._function, compiler_options=COMPILER_OPTIONS.get(platform), **self._options)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the jitted function."""
        return self._jitted(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Return the jitted function's own attribute: `lower`, `clear_cache`."""
        if name.startswith("__") or name in ("_function", "_options"):
            raise AttributeError(name)
        return getattr(self._jitted, name)
