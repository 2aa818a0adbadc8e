"""The product of rows with their groups' weights, and what of the weights it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.layers.grouped import grouped_dense
from jkv.targets import shapes_on

from ..compare import assert_close
from ..machines import find_target


def make_product(sizes: list[int], *, spare: int = 0, features: int = 12, outputs: int = 20) -> tuple:
    """Return rows, weights and sizes; rows of no group and weights without rows are poisoned."""
    num_rows = sum(sizes)
    x = np.full((num_rows + spare, features), np.nan, np.float32)
    x[:num_rows] = np.random.default_rng(0).normal(size=(num_rows, features))
    weight = np.random.default_rng(1).normal(size=(len(sizes), features, outputs)).astype(np.float32)
    weight[np.array(sizes) == 0] = np.nan
    return jnp.asarray(x), jnp.asarray(weight), jnp.asarray(sizes, jnp.int32)


def expected(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> np.ndarray:
    groups = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    return np.einsum("ri,rio->ro", np.asarray(x, np.float64)[: len(groups)], np.asarray(weight)[groups])


@pytest.mark.parametrize(
    ("sizes", "spare"),
    [
        ([0, 0, 1, 0], 0),
        ([0, 1, 0, 1, 0, 0, 0, 0], 0),
        ([3, 0, 8, 1, 0], 0),
        ([0, 2, 0, 3], 4),
        ([130, 1, 0, 70], 5),
    ],
)
def test_each_row_meets_its_groups_weight_and_no_other_is_read(sizes: list[int], spare: int):
    arguments = make_product(sizes, spare=spare)
    assert_close(jax.jit(grouped_dense)(*arguments)[: sum(sizes)], expected(*arguments))


def test_without_rows_nothing_is_computed():
    assert grouped_dense(*make_product([0, 0], spare=3)).shape == (3, 20)


def test_the_ragged_dot_of_the_cpu_reads_every_weight():
    assert jnp.isnan(jax.lax.ragged_dot(*make_product([0, 0, 1, 0]))).any()


def test_the_gradient_is_that_of_each_groups_product():
    x, weight, sizes = make_product([3, 0, 2])
    weight = jnp.nan_to_num(weight)
    pull = jax.random.normal(jax.random.key(2), (5, 20))
    of_x, of_weight = jax.grad(lambda x, w: (grouped_dense(x, w, sizes) * pull).sum(), (0, 1))(x, weight)
    groups = np.repeat(np.arange(3), np.asarray(sizes))
    assert_close(of_x, np.einsum("ro,rio->ri", pull, np.asarray(weight)[groups]))
    by_group = [np.asarray(x)[groups == group].T @ np.asarray(pull)[groups == group] for group in range(3)]
    assert_close(of_weight, np.stack(by_group))


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param("v6e", marks=pytest.mark.tpu_aot),
        pytest.param("h200", marks=pytest.mark.gpu_aot),
    ],
)
@pytest.mark.parametrize("num_rows", [2, 12, 512])
def test_an_accelerator_computes_no_product_with_every_weight(machine: str, num_rows: int):
    shapes = [((num_rows, 512), jnp.bfloat16), ((64, 512, 1024), jnp.bfloat16), ((64,), jnp.int32)]
    arguments = shapes_on(find_target(machine), [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    program = jax.jit(grouped_dense).lower(*arguments).compile()
    text = program.as_text()
    if machine != "h200":
        # A kernel, whose grid is the tiles of groups that have rows; the other form is a convolution.
        assert "ragged-dot-none" in text
        assert "convolution(" not in text
    # XLA's GPU form of a ragged dot holds a copy of all the weights, a block's loop that of one.
    assert program.memory_analysis().temp_size_in_bytes < arguments[1].size * 2 / 16
