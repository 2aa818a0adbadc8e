"""State containers under the transformations of JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Array, Float, Int, jaxtyped

from jkv.pytree import State, pytree, static


# The outer decorator is what jaxtyping's import hook puts on every class.
@jaxtyped(typechecker=beartype)
@pytree
class Counter(State):
    count: Int[Array, "seq"]
    weight: Float[Array, "seq"] | None = None
    limit: int = static(default=8)


def make_counter(*, has_weight: bool = True, limit: int = 8) -> Counter:
    return Counter(count=jnp.arange(3), weight=jnp.ones(3) if has_weight else None, limit=limit)


def test_static_fields_are_structure_and_the_others_are_leaves():
    leaves, structure = jax.tree.flatten(make_counter())
    assert len(leaves) == 2
    assert structure != jax.tree.structure(make_counter(limit=9))


def test_a_field_of_none_has_no_leaves():
    assert len(jax.tree.leaves(make_counter(has_weight=False))) == 1


def test_fields_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_counter().limit = 9  # pyright: ignore[reportAttributeAccessIssue]


def test_fields_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        Counter(jnp.arange(3))  # pyright: ignore[reportCallIssue]


def test_replace_changes_the_named_field_alone():
    counter = make_counter()
    changed = counter.replace(limit=9)
    assert changed.limit == 9
    assert changed.count is counter.count
    assert counter.limit == 8


def test_replace_refuses_an_unknown_field():
    with pytest.raises(TypeError, match="size"):
        make_counter().replace(size=1)


def test_tree_map_may_leave_anything_in_the_fields():
    assert jax.tree.map(lambda leaf: None, make_counter()).count is None
    assert jax.tree.map(lambda leaf: "int32", make_counter()).count == "int32"


def test_eval_shape_returns_shapes_in_the_same_class():
    shapes = jax.eval_shape(lambda counter: counter.replace(count=counter.count + 1), make_counter())
    assert isinstance(shapes, Counter)
    assert shapes.count.shape == (3,)


def test_jit_compiles_once_for_each_static_value():
    num_traces = 0

    @jax.jit
    def step(counter: Counter) -> Counter:
        nonlocal num_traces
        num_traces += 1
        return counter.replace(count=counter.count + counter.limit)

    np.testing.assert_array_equal(step(step(make_counter())).count, [16, 17, 18])
    assert num_traces == 1
    np.testing.assert_array_equal(step(make_counter(limit=1)).count, [1, 2, 3])
    assert num_traces == 2


def test_scan_and_vmap_carry_the_value():
    counters = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), make_counter())
    step = jax.vmap(lambda counter: counter.replace(count=counter.count + 1))
    counters, _ = jax.lax.scan(lambda carry, _: (step(carry), None), counters, length=4)
    np.testing.assert_array_equal(counters.count, [[4, 5, 6], [4, 5, 6]])


def test_a_donated_value_is_consumed():
    step = jax.jit(lambda counter: counter.replace(count=counter.count + 1), donate_argnums=0)
    counter = make_counter(has_weight=False)
    np.testing.assert_array_equal(step(counter).count, [1, 2, 3])
    assert counter.count.is_deleted()


def test_tree_paths_name_the_fields():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(make_counter())]
    assert paths == [".count", ".weight"]


def test_methods_are_still_checked_under_the_import_hook():
    @jaxtyped(typechecker=beartype)
    @pytree
    class Table(State):
        size: int = static()

        @jaxtyped(typechecker=beartype)
        def pick(self, index: int) -> int:
            return index % self.size

    assert Table(size=4).pick(5) == 1
    with pytest.raises(TypeError, match="index"):
        Table(size=4).pick("5")  # pyright: ignore[reportArgumentType]
