"""The one decorator for state: a frozen dataclass that JAX sees as a tree of arrays.

Knows nothing of caches, samplers or batches: it reads a class's fields and nothing else.
"""

import dataclasses
from typing import Any, dataclass_transform

import jax


def static(**options: Any) -> Any:
    """Declare a field as structure: it is hashed into the jit key and never becomes an array.

    Takes the options of `dataclasses.field`; its values must be hashable.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    eq_default=False, kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, static)
)
def pytree[T](cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass, built by keyword, whose fields are children of a JAX tree.

    A field is an array, a tree of arrays or None, unless `static()` declares it structure. Two values are
    equal only when they are the same object: compare their leaves.

        @pytree
        class Counter(State):
            count: Int[Array, "seq"]
            limit: int = static(default=8)

        counter = counter.replace(count=counter.count + 1)

    JAX rebuilds values with tracers, shapes or None in the fields, so validation belongs in a named
    constructor, not in `__post_init__`; for the same reason the fields are kept from runtime type checks.
    """
    frozen = dataclasses.dataclass(frozen=True, eq=False, kw_only=True)(cls)
    # What `typing.no_type_check` sets, on the class alone: methods keep their runtime checks.
    frozen.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(frozen)


class State:
    """Base of a `@pytree` class: adds `replace`, which a type checker would not see from a decorator."""

    # `Self` in place of `S` would be refused by beartype, which the test runner puts on each method.
    def replace[S](self: S, **changes: Any) -> S:
        """Return a copy with the named fields changed; an unknown name is a TypeError."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
