"""Loading onto devices: every place once, each shard from its own piece, nothing unsaid."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jkv.models.weights.load import check_finite, load_parameters
from jkv.models.weights.rules import TensorRule
from jkv.models.weights.source import TensorInfo

from .checkpoints import ArraySource, interleave_rows, make_normal, make_targets

A = TensorRule("file.a", "a", (8, 4))
B = TensorRule("file.b", "b", (6,))


def make_source(**arrays: np.ndarray) -> ArraySource:
    defaults = {"file.a": make_normal(8, 4), "file.b": make_normal(6)}
    return ArraySource(defaults | {f"file.{name}": array for name, array in arrays.items()})


def make_mesh(data: int, model: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_values_arrive_unchanged():
    source = make_source()
    parameters = load_parameters(source, [A, B], make_targets([A, B]))
    assert list(parameters) == ["a", "b"]
    np.testing.assert_array_equal(parameters["a"], source.arrays["file.a"], strict=True)
    np.testing.assert_array_equal(parameters["b"], source.arrays["file.b"], strict=True)


def test_values_are_cast_to_the_targets_dtype():
    source = make_source(a=make_normal(8, 4).astype(ml_dtypes.bfloat16))
    parameters = load_parameters(source, [A, B], make_targets([A, B], jnp.bfloat16))
    assert parameters["a"].dtype == parameters["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(parameters["a"]), source.arrays["file.a"])
    np.testing.assert_array_equal(
        np.asarray(parameters["b"]), source.arrays["file.b"].astype(ml_dtypes.bfloat16)
    )


@pytest.mark.parametrize(
    "spec", [(None, None), ("data", None), (None, "model"), ("model", "data"), (("data", "model"),)]
)
def test_each_shard_reads_its_own_piece_once(spec: tuple):
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(*spec))
    rule = TensorRule("file.a", "a", (16, 8))
    source = ArraySource({"file.a": make_normal(16, 8)})
    target = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding)
    array = load_parameters(source, [rule], {"a": target})["a"]
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, source.arrays["file.a"])
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, source.arrays["file.a"][shard.index])
    pieces = {str(index) for index in sharding.devices_indices_map((16, 8)).values()}
    assert len(source.reads) == len(pieces)
    rows, columns = sharding.shard_shape((16, 8))
    assert all(source.arrays["file.a"][index].shape == (rows, columns) for _, index in source.reads)


def test_a_parameter_may_be_filled_by_several_tensors():
    mesh = make_mesh(4, 2)
    rules = [
        TensorRule("file.q", "qkv", (6, 4), index=((0, 6), (0, 4))),
        TensorRule("file.k", "qkv", (2, 4), index=((6, 8), (0, 4))),
    ]
    source = ArraySource({"file.q": make_normal(6, 4), "file.k": make_normal(2, 4, seed=1)})
    whole = np.concatenate([source.arrays["file.q"], source.arrays["file.k"]])
    for spec in [PartitionSpec(), PartitionSpec("data"), PartitionSpec("model", "data")]:
        target = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        np.testing.assert_array_equal(load_parameters(source, rules, {"qkv": target})["qkv"], whole)


@pytest.mark.parametrize("spec", [(), ("data", "model"), (None, "model", "data")])
def test_a_stack_is_filled_by_transposed_tensors_of_one_each(spec: tuple):
    rules = [
        TensorRule(f"file.{i}", "stack", (8, 4), index=((i, i + 1), (0, 4), (0, 8)), is_transposed=True)
        for i in range(4)
    ]
    source = ArraySource({f"file.{i}": make_normal(8, 4, seed=i) for i in range(4)})
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(*spec))
    target = jax.ShapeDtypeStruct((4, 4, 8), jnp.float32, sharding=sharding)
    expected = np.stack([source.arrays[f"file.{i}"].T for i in range(4)])
    np.testing.assert_array_equal(load_parameters(source, rules, {"stack": target})["stack"], expected)


@pytest.mark.parametrize("spec", [(), ("data",), ("model", "data")])
def test_a_tensor_may_fill_several_parameters_with_rows_or_every_second_column(spec: tuple):
    rules = [
        TensorRule("file.qk", "q", (12, 8), part=(0, 0, 8, 1)),
        TensorRule("file.qk", "k", (12, 8), part=(0, 8, 12, 1)),
        TensorRule("file.gu", "gate", (4, 16), part=(1, 0, 16, 2)),
        TensorRule("file.gu", "up", (4, 16), part=(1, 1, 16, 2), offset=1.0),
    ]
    qk, gate_up = make_normal(12, 8), make_normal(4, 16, seed=1)
    expected = {"q": qk[:8], "k": qk[8:], "gate": gate_up[:, ::2], "up": gate_up[:, 1::2] + 1}
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(*spec))
    targets = {
        name: jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=sharding)
        for name, array in expected.items()
    }
    found = load_parameters(ArraySource({"file.qk": qk, "file.gu": gate_up}), rules, targets)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(("end", "start"), [(4, 5), (5, 4)])
def test_parts_that_leave_entries_out_or_take_them_twice_are_named(end: int, start: int):
    rules = [
        TensorRule("file.a", "a", (8, 4), part=(0, 0, end, 1)),
        TensorRule("file.a", "b", (8, 4), part=(0, start, 8, 1)),
    ]
    with pytest.raises(ValueError, match=r"one rule, got several or none for \['file.a'\]"):
        load_parameters(ArraySource({"file.a": make_normal(8, 4)}), rules, make_targets(rules))


@pytest.mark.parametrize("head_dim", [4, 8, 16])
@pytest.mark.parametrize("columns", [(), (8,)])
@pytest.mark.parametrize("spec", [(), ("data",), (("data", "model"),)])
def test_interleaved_rows_come_back_in_halves(head_dim: int, columns: tuple, spec: tuple):
    plain = make_normal(4 * head_dim, *columns)
    source = ArraySource({"q": interleave_rows(plain, 4)})
    assert not np.array_equal(source.arrays["q"], plain)
    rule = TensorRule("q", "q", plain.shape, permuted_heads=4)
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(*spec))
    target = jax.ShapeDtypeStruct(plain.shape, jnp.float32, sharding=sharding)
    np.testing.assert_array_equal(load_parameters(source, [rule], {"q": target})["q"], plain)


@pytest.mark.parametrize("columns", [(), (8,)])
@pytest.mark.parametrize("spec", [(), ("data",), (("data", "model"),)])
def test_heads_are_copied_side_by_side(columns: tuple, spec: tuple):
    plain = make_normal(4 * 6, *columns)
    source = ArraySource({"k": interleave_rows(plain, 4)})
    rule = TensorRule("k", "k", plain.shape, permuted_heads=4, head_copies=(4, 3))
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec(*spec))
    expected = plain.reshape(4, 6, *columns).repeat(3, axis=0).reshape(72, *columns)
    target = jax.ShapeDtypeStruct(expected.shape, jnp.float32, sharding=sharding)
    np.testing.assert_array_equal(load_parameters(source, [rule], {"k": target})["k"], expected)


def test_a_missing_tensor_is_named():
    with pytest.raises(ValueError, match=r"lacks tensors: \['file.c'\]"):
        load_parameters(make_source(), [A, B, TensorRule("file.c", "c", (2,))], make_targets([A, B]))


def test_an_unknown_tensor_is_named():
    with pytest.raises(ValueError, match=r"does not use: \['file.lora_a', 'file.lora_b'\]"):
        load_parameters(
            make_source(lora_a=make_normal(2), lora_b=make_normal(2)), [A, B], make_targets([A, B])
        )


def test_derived_tables_are_passed_over():
    source = make_source()
    source.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = make_normal(4)
    assert set(load_parameters(source, [A, B], make_targets([A, B]))) == {"a", "b"}


def test_a_parameter_without_a_tensor_and_a_tensor_without_one_are_named():
    with pytest.raises(ValueError, match=r"no tensor fills the parameters \['b'\]"):
        load_parameters(ArraySource({"file.a": make_normal(8, 4)}), [A], make_targets([A, B]))
    with pytest.raises(ValueError, match=r"lacks parameters that the checkpoint fills: \['b'\]"):
        load_parameters(make_source(), [A, B], make_targets([A]))


def test_a_tensor_with_two_rules_is_named():
    with pytest.raises(ValueError, match=r"one rule, got several or none for \['file.a'\]"):
        load_parameters(make_source(), [A, A, B], make_targets([A, B]))


def test_another_shape_is_named():
    with pytest.raises(ValueError, match=r"file.a \(4, 8\) for \(8, 4\)"):
        load_parameters(make_source(a=make_normal(4, 8)), [A, B], make_targets([A, B]))


@pytest.mark.parametrize(("source", "target"), [("int8", "float32"), ("float32", "int8"), ("int32", "int8")])
def test_integers_never_become_other_numbers(source: str, target: str):
    with pytest.raises(ValueError, match=f"file.a {source} for {target}"):
        load_parameters(make_source(a=np.ones((8, 4), source)), [A, B], make_targets([A, B], target))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 6), (0, 4)), ((4, 8), (0, 4))],
        [((0, 3), (0, 4)), ((5, 8), (0, 4))],
        [((0, 4), (0, 4)), ((0, 4), (0, 4))],
        [((0, 6), (0, 4)), ((5, 7), (0, 4))],
    ],
)
def test_a_place_filled_twice_or_never_is_refused(boxes: list):
    shapes = [tuple(stop - start for start, stop in box) for box in boxes]
    rules = [TensorRule(f"{i}", "a", shapes[i], index=boxes[i]) for i in range(2)]
    source = ArraySource({f"{i}": make_normal(*shapes[i]) for i in range(2)})
    with pytest.raises(ValueError, match=r"parameter a .* must fill each place once"):
        load_parameters(source, rules, {"a": jax.ShapeDtypeStruct((8, 4), jnp.float32)})


@pytest.mark.parametrize("index", [((2, 10), (0, 4)), ((0, 4), (0, 4)), ((0, 8),)])
def test_a_piece_that_does_not_fit_is_refused(index: tuple):
    rule = TensorRule("file.a", "a", (8, 4), index=index)
    with pytest.raises(ValueError, match=r"must fit inside it, got .*file.a"):
        load_parameters(make_source(), [rule, B], make_targets([A, B]))


def test_a_copy_may_be_missing_and_must_be_equal():
    copy = TensorRule("file.copy", "a", (8, 4), is_copy=True)
    source = make_source()
    targets = make_targets([A, B])
    load_parameters(source, [A, B, copy], targets)
    source.arrays["file.copy"] = source.arrays["file.a"].copy()
    load_parameters(source, [A, B, copy], targets)
    source.arrays["file.copy"][7, 3] += 1
    with pytest.raises(ValueError, match=r"must equal the first, got another \['file.copy \(of file.a\)'\]"):
        load_parameters(source, [A, B, copy], targets)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(bad: float):
    array = make_normal(8, 4)
    array[5, 2] = bad
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in \['a'\]"):
        load_parameters(make_source(a=array), [A, B], make_targets([A, B]))


def test_a_weight_that_overflows_its_dtype_is_named():
    with pytest.raises(ValueError, match=r"NaN or infinity in \['a'\]"):
        load_parameters(
            make_source(a=np.full((8, 4), 1e6, np.float32)), [A, B], make_targets([A, B], jnp.float16)
        )


def test_many_bad_names_are_cut_short():
    parameters = {f"p{i:02}": jnp.full(2, jnp.nan) for i in range(11)}
    with pytest.raises(ValueError, match=r"'p07'\] and 3 more"):
        check_finite(parameters)


def test_integers_and_sound_parameters_are_finite():
    check_finite({"a": jnp.ones(3), "b": jnp.ones(3, jnp.int32)})


class LazySource:
    """Makes each piece when it is read, so that only the loader's own memory counts."""

    def __init__(self, infos: dict[str, TensorInfo]):
        self.tensors = infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        rows, columns = (range(n)[s] for s, n in zip(index, self.tensors[name].shape, strict=True))
        return np.full((len(rows), len(columns)), 0.5, np.float32)


def test_host_memory_stays_near_the_largest_tensor():
    largest, num_tensors = (512, 512), 24
    rules = [TensorRule(f"{i}", f"{i}", largest) for i in range(num_tensors)]
    sharding = NamedSharding(make_mesh(4, 2), PartitionSpec("data", "model"))
    targets = {r.target: jax.ShapeDtypeStruct(r.shape, jnp.bfloat16, sharding=sharding) for r in rules}
    info = TensorInfo(largest, np.dtype(np.float32), "F32")
    source = LazySource({rule.source: info for rule in rules})
    tracemalloc.start()
    parameters = load_parameters(source, rules, targets)
    # CPU devices may keep the host's blocks as their own memory: what is left at the end is the parameters.
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensor_bytes = 4 * 512 * 512
    assert len(parameters) == num_tensors
    assert peak - left < 2 * tensor_bytes
    assert left < num_tensors * tensor_bytes / 2 + tensor_bytes
