"""Shows that a compiled program updates its cache in place, for tests of loops, layers and caches.

Looks at programs only: nothing is run or allocated.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

# An instruction that makes an array anew: dtype, sizes, operation.
_MADE = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|convert|transpose)\(")


def assert_updates_in_place(
    function: Callable[..., Any],
    small: Sequence[Any],
    large: Sequence[Any],
    *,
    max_growth: float = 0.01,
    compiler_options: dict[str, Any] | None = None,
) -> None:
    """Assert that `function` aliases its first argument and makes no copy of it.

    Args:
        function: takes a cache, or any tree that holds one, first, and returns its successor; compiled here
            with that argument donated.
        small: its arguments, as shapes or arrays. Below 256 MB an array, compilers may plan memory otherwise
            than for a real cache.
        large: the same with a larger cache.
        max_growth: bytes of temporaries that each added byte of the first argument may cost.
        compiler_options: as `jax.jit`.

    Raises:
        AssertionError: says what is not in place: the bytes that are not aliased, the growth of temporaries,
            or the instructions that copy, convert or transpose an array as large as one that takes 1 % of
            what the first argument grows by.
    """
    jitted = jax.jit(function, donate_argnums=0, compiler_options=compiler_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        programs: list[Any] = [jitted.lower(*arguments).compile() for arguments in (small, large)]
    nbytes = [sum(map(_nbytes, jax.tree.leaves(arguments[0]))) for arguments in (small, large)]
    memory = [program.memory_analysis() for program in programs]
    if memory[1].alias_size_in_bytes < nbytes[1]:
        raise AssertionError(
            f"all of the first argument must be aliased, {nbytes[1]:,} bytes, "
            f"got {memory[1].alias_size_in_bytes:,}"
        )
    growth = (memory[1].temp_size_in_bytes - memory[0].temp_size_in_bytes) / (nbytes[1] - nbytes[0])
    if growth > max_growth:
        raise AssertionError(
            f"temporaries must grow by at most {max_growth} bytes for each added byte, got {growth:.4f}"
        )
    found = _remade(programs[1].as_text(), _smallest_growing(small[0], large[0]))
    if found:
        raise AssertionError("nothing as large as the cache may be made anew, got\n" + "\n".join(found))


def _smallest_growing(small: Any, large: Any) -> int:
    """Return the entries of the smallest array that takes at least 1 % of the growth."""
    pairs = list(zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True))
    growth = sum(_nbytes(after) - _nbytes(before) for before, after in pairs)
    return min(
        math.prod(after.shape) for before, after in pairs if _nbytes(after) - _nbytes(before) >= 0.01 * growth
    )


def _remade(program: str, entries: int) -> list[str]:
    lines = [(line, _MADE.search(line)) for line in program.splitlines()]
    return [
        line.strip() for line, made in lines if made and math.prod(map(int, made[1].split(","))) >= entries
    ]


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
