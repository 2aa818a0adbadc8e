"""Shows that a compiled program updates its cache in place, for tests of loops, layers and caches.

Looks at programs only: nothing is run or allocated.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.stages import Compiled

# What an instruction makes, and how; an asynchronous copy makes a tuple. A reshape or a bitcast-convert that
# optimization has left moves data too.
_MADE = re.compile(r"= (\S+|\(.*?\)) (?:copy|copy-start|convert|transpose|reshape|bitcast-convert)\(")
_SIZES = re.compile(r"\w+\[([\d,]+)\]")
# A TPU's fusion that copies its operand onto itself gives its tiles another name, and moves nothing.
_COPIES = re.compile(r"^(%\S+) \(.*\n +%\S+ = \S+ parameter\(0\)\n +(ROOT .* copy\(.*)\n\}", re.MULTILINE)
_ALIASED = re.compile(r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}, calls=(%[\w.-]+)")


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
            than for a real cache. Shapes that carry shardings are compiled for their devices.
        large: the same with a larger cache.
        max_growth: see `assert_programs_update_in_place`.
        compiler_options: as `jax.jit`.

    Raises:
        AssertionError: as `assert_programs_update_in_place`.
    """
    jitted = jax.jit(function, donate_argnums=0, compiler_options=compiler_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        programs = [jitted.lower(*arguments).compile() for arguments in (small, large)]
    assert_programs_update_in_place(programs[0], programs[1], max_growth=max_growth)


def assert_programs_update_in_place(small: Compiled, large: Compiled, *, max_growth: float = 0.01) -> None:
    """Assert that a program aliases what is donated to it and makes no copy of it.

    Args:
        small: the program as compiled for one size of its cache.
        large: the same for a larger cache.
        max_growth: see `added_temporaries`.

    Raises:
        AssertionError: says what is not in place: the bytes that are not aliased, the growth of temporaries,
            or the instructions that make an array of the cache's size anew (`made_anew`).
        ValueError: the larger program is donated no more bytes than the smaller one.
    """
    nbytes = sum(map(_nbytes, _donated(large)))
    aliased = _memory(large).alias_size_in_bytes
    if aliased < nbytes:
        raise AssertionError(f"all that is donated must be aliased, {nbytes:,} bytes, got {aliased:,}")
    growth = added_temporaries(small, large)
    if growth > max_growth:
        raise AssertionError(
            f"temporaries must grow by at most {max_growth} bytes for each added byte, got {growth:.4f}"
        )
    found = made_anew(small, large)
    if found:
        raise AssertionError("nothing as large as the cache may be made anew, got\n" + "\n".join(found))


def added_temporaries(small: Compiled, large: Compiled) -> float:
    """Return the bytes of temporaries, and of outputs that alias nothing, for each added donated byte.

    Raises:
        ValueError: the larger program is donated no more bytes than the smaller one.
    """
    before, after = (sum(map(_nbytes, _donated(program))) for program in (small, large))
    if after <= before:
        raise ValueError(
            "the larger program must be donated more bytes than the smaller one, "
            f"got {after:,} and {before:,}"
        )
    return (_beyond_arguments(large) - _beyond_arguments(small)) / (after - before)


def made_anew(small: Compiled, large: Compiled) -> list[str]:
    """Return the instructions of the larger program that copy, convert, transpose or reshape its cache.

    That is: that make, inside fusions too, an array of as many entries, whatever their dtype, as the smallest
    donated one that takes at least 1 % of the growth.
    """
    pairs = list(zip(_donated(large), _donated(small), strict=True))
    growth = [_nbytes(after) - _nbytes(before) for after, before in pairs]
    entries = min(
        math.prod(array.shape)
        for (array, _), added in zip(pairs, growth, strict=True)
        if added >= 0.01 * sum(growth)
    )
    return _makers(large.as_text() or "", entries)


def _makers(program: str, entries: int) -> list[str]:
    aliased = set(_ALIASED.findall(program))
    renamed = {copy for name, copy in _COPIES.findall(program) if name in aliased}
    lines = map(str.strip, program.splitlines())
    return [
        line
        for line in lines
        if (made := _MADE.search(line)) and _most_entries(made[1]) >= entries and line not in renamed
    ]


def _most_entries(shapes: str) -> int:
    return max((math.prod(map(int, sizes.split(","))) for sizes in _SIZES.findall(shapes)), default=0)


def _donated(program: Compiled) -> list[jax.ShapeDtypeStruct]:
    """Return what a device holds of each donated argument."""

    def held(argument: Any, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct | None:
        if not argument.donated:
            return None
        # What the program does not read has no sharding.
        shape = sharding.shard_shape(argument.shape) if sharding else argument.shape
        return jax.ShapeDtypeStruct(shape, argument.dtype)

    return jax.tree.leaves(jax.tree.map(held, program.args_info, program.input_shardings))


def _beyond_arguments(program: Compiled) -> int:
    memory = _memory(program)
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _memory(program: Compiled) -> Any:
    return program.memory_analysis()


def _nbytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
