"""The identity of weights."""

import numpy as np

from jkv.models.weights.source import TensorSource, fingerprint

from .checkpoints import ArraySource, make_normal


def make_arrays() -> dict[str, np.ndarray]:
    return {"a": make_normal(9, 4), "b": make_normal(5), "c": np.float32(1.5).reshape(())}


def test_an_object_with_tensors_and_read_is_a_source():
    assert isinstance(ArraySource({}), TensorSource)


def test_the_fingerprint_is_short_and_does_not_depend_on_order():
    first = fingerprint(ArraySource(make_arrays()))
    assert len(first) == 32
    assert first == fingerprint(ArraySource(dict(reversed(make_arrays().items()))))


def test_another_value_name_shape_or_encoding_gives_another_fingerprint():
    arrays = make_arrays()
    changed = [
        arrays | {"a": arrays["a"] + np.float32(1)},
        {"A" if name == "a" else name: array for name, array in arrays.items()},
        arrays | {"a": arrays["a"].reshape(4, 9)},
        arrays | {"a": arrays["a"].astype(np.float16)},
        arrays | {"c": np.float32(2.5).reshape(())},
    ]
    prints = {fingerprint(ArraySource(other)) for other in [arrays, *changed]}
    assert len(prints) == 6


def test_the_fingerprint_reads_three_rows_of_a_tensor():
    source = ArraySource({"a": make_normal(1000, 4)})
    fingerprint(source)
    assert [index[0].start for _, index in source.reads] == [0, 500, 999]
