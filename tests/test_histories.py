"""Every layout, codec, page size, head size and group through one history, beside the dense model of it."""

import itertools

import numpy as np
import pytest

from .compare import assert_close
from .histories import Form, History

AXES = {
    "layout": ["dense", "paged", "window", "paged_window"],
    "codec": [
        "f32",
        "bf16",
        "int8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int4",
        "int4_token",
        "int8/int4",
        "bf16/int8",
        "int8_static",
    ],
    "page_size": [8, 16, 64, 256],
    "head_dim": [64, 80, 128, 256],
    "heads": [(2, 2), (8, 2), (8, 1), (4, 1)],
}

# One of each way to scale; the gate has all.
CODECS = ["f32", "bf16", "fp8_e4m3", "int4"]


def pairs(values: dict) -> set:
    """Return every two of the named values, with their names."""
    return set(itertools.combinations(sorted(values.items()), 2))


def pairwise(axes: dict[str, list]) -> list[Form]:
    """Return forms in which every two values of two axes meet."""
    products = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    missing = set().union(*map(pairs, products))
    chosen = []
    while missing:
        gains = [len(pairs(values) & missing) for values in products]
        best = products[gains.index(max(gains))]
        missing -= pairs(best)
        chosen.append(Form(**best))
    return chosen


def name(form: Form) -> str:
    sizes = (form.page_size, form.head_dim, *form.heads)
    return "-".join([form.layout, form.codec, *map(str, sizes)])


def run_history(form: Form) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fill a page, cross its border in a chunk and in steps, fork, diverge, roll back, empty a row, go on."""
    page = form.page_size
    history = History(form)
    results = [history.append([page - 3, page, 2], page), history.append([5, 0, 1], page)]
    results += [history.append([1, 1, 1]) for _ in range(2)]
    history.fork([0, 0, 2])
    results += [history.append([1, 1, 1]), history.append([5, 2, 4], page)]
    history.truncate([page + 1, page - 1, 1])
    results += [history.append([3, 4, page], page), history.append([1, 0, 1])]
    history.clear(2)
    history.fork([1, 0, 0])
    results += [history.append([1, 1, 1]), history.append([page, 3, 7], page)]
    return results


def assert_history_holds(form: Form) -> None:
    for got, expected in run_history(form):
        assert_close(got, expected, form.tolerance)


@pytest.mark.parametrize("form", pairwise(AXES | {"codec": CODECS}), ids=name)
def test_a_history_gives_what_dense_attention_gives(form: Form):
    assert_history_holds(form)


@pytest.mark.gate
@pytest.mark.parametrize("form", pairwise(AXES), ids=name)
def test_a_history_gives_what_dense_attention_gives_in_every_codec(form: Form):
    assert_history_holds(form)
