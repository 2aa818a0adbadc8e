"""Every layout, codec, page size, head size and group through one history, beside the dense model of it."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from .compare import assert_close, relative_errors
from .histories import Form, History

# In the order in which a greedy cover is small.
AXES: dict[str, list] = {
    "layout": ["dense", "paged", "window", "paged_window"],
    "pool_layout": ["plain", "tpu"],
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

# Those of them that share no parts: the others are made of these, and meet all in twos.
UNLIKE = [*AXES["codec"][:4], "int4", "int4_token"]
# Of these every form, with slots in an axis of their own; all others meet them in threes.
WHOLE = {"layout": AXES["layout"][:3], "codec": [*AXES["codec"][:6], "int8/int4"]}


def cover(axes: dict[str, list], strength: int) -> list[Form]:
    """Return forms in which every so many values, each of another axis, meet."""
    products = list(itertools.product(*axes.values()))
    bits: dict[tuple, int] = {}
    masks = [
        sum(
            1 << bits.setdefault(met, len(bits))
            for met in itertools.combinations(enumerate(values), strength)
        )
        for values in products
    ]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(products)), key=lambda index: (masks[index] & missing).bit_count())
        missing &= ~masks[best]
        chosen.append(Form(**dict(zip(axes, products[best], strict=True))))
    return chosen


def is_whole(form: Form) -> bool:
    """Whether the form is one of every form of `WHOLE`."""
    return form.pool_layout == "plain" and all(getattr(form, axis) in WHOLE[axis] for axis in WHOLE)


def name(form: Form) -> str:
    sizes = (form.page_size, form.head_dim, *form.heads)
    return "-".join([form.layout, form.codec, *map(str, sizes), form.pool_layout])


def run_history(form: Form, known: Sequence[np.ndarray] = ()) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fill a page, cross its border in a chunk and in steps, fork, diverge, roll back, empty a row, go on."""
    page, chunk = form.page_size, min(form.page_size, 64)
    history = History(form, known=known)
    results = [history.append([page - 3, page, 2], page), history.append([5, 0, 1], chunk)]
    results += [history.append([1, 1, 1]) for _ in range(2)]
    history.fork([0, 0, 2])
    results += [history.append([1, 1, 1]), history.append([5, 2, 4], chunk)]
    history.truncate([page + 1, page - 1, 1])
    results += [history.append([3, 4, chunk], chunk), history.append([1, 0, 1])]
    history.clear(2)
    history.fork([1, 0, 0])
    results += [history.append([1, 1, 1]), history.append([chunk, 3, 7], chunk)]
    return results


def assert_history_holds(form: Form) -> None:
    for got, expected in run_history(form):
        assert_close(got, expected, form.tolerance)


@pytest.mark.parametrize("form", cover(AXES, 2), ids=name)
def test_a_history_gives_what_dense_attention_gives(form: Form):
    assert_history_holds(form)


@pytest.mark.histories
@pytest.mark.parametrize(
    "form",
    [form for form in cover(AXES | {"codec": UNLIKE}, 3) if not is_whole(form)],
    ids=name,
)
def test_a_history_gives_what_dense_attention_gives_in_every_three_values(form: Form):
    assert_history_holds(form)


@pytest.mark.product
@pytest.mark.parametrize("head_dim", AXES["head_dim"])
@pytest.mark.parametrize("page_size", AXES["page_size"])
@pytest.mark.parametrize("codec", WHOLE["codec"])
def test_a_history_gives_what_dense_attention_gives_in_every_form(codec: str, page_size: int, head_dim: int):
    for heads in AXES["heads"]:
        known: list[np.ndarray] = []
        for layout in WHOLE["layout"]:
            form = Form(layout, codec, page_size, head_dim, heads)
            results = run_history(form, known if layout == "paged" else ())
            for got, expected in results:
                whole, row = relative_errors(got, expected)
                assert max(whole, row) <= form.tolerance, (
                    f"{name(form)}: relative error {whole:.2e}, worst row {row:.2e}"
                )
            known = [expected for _, expected in results]
    jax.clear_caches()


@pytest.mark.parametrize(
    "form",
    [
        Form("paged", "f32", heads=(4, 1), kind="latent"),
        Form("window", "int8/int8", heads=(4, 1), kind="latent"),
        Form("paged_window", "int4/f32", page_size=16, heads=(8, 1), kind="latent"),
        Form("dense", "fp8_e4m3_static/int8_static", head_dim=80, heads=(4, 1), kind="latent"),
    ],
    ids=name,
)
def test_a_history_of_latents_gives_what_their_attention_gives(form: Form):
    assert_history_holds(form)


def assert_rows_change_no_bit(form: Form) -> None:
    in_rows = dataclasses.replace(form, pool_layout="tpu")
    for (got, _), (expected, _) in zip(run_history(in_rows), run_history(form), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_history_in_rows_of_128_lanes_gives_the_same_bits():
    assert_rows_change_no_bit(Form("paged_window", "fp8_e4m3", page_size=16, head_dim=80))


@pytest.mark.histories
@pytest.mark.parametrize("codec", AXES["codec"])
def test_a_history_in_rows_of_128_lanes_gives_the_same_bits_in_every_codec(codec: str):
    index = AXES["codec"].index(codec)
    layout, head_dim = AXES["layout"][index % 4], AXES["head_dim"][index % 3]
    assert_rows_change_no_bit(Form(layout, codec, page_size=16, head_dim=head_dim))


NUM_ROWS = 3
LENS = st.lists(st.integers(0, 8), min_size=NUM_ROWS, max_size=NUM_ROWS)
CUTS = st.lists(st.integers(0, 40), min_size=NUM_ROWS, max_size=NUM_ROWS)
ROWS = st.lists(st.integers(0, NUM_ROWS - 1), min_size=NUM_ROWS, max_size=NUM_ROWS)


class Histories(RuleBasedStateMachine):
    """Appends, truncations, forks and clears in any order; all appends of a form are one program."""

    form = Form("dense", head_dim=16, heads=(2, 1))
    make: type[History] = History

    def __init__(self):
        super().__init__()
        self.history = self.make(self.form)
        # The most tokens that each row has held: a window has overwritten what lies too far behind.
        self.peaks = [0] * NUM_ROWS
        self.append([8, 5, 2])

    def lengths(self) -> list[int]:
        return [heads.shape[1] for heads in self.history.heads]

    @rule(lens=LENS)
    def append(self, lens: list[int]):
        capacity = self.form.pages_per_row * self.form.page_size
        lens = [min(new, capacity - length) for new, length in zip(lens, self.lengths(), strict=True)]
        if any(lens):
            assert_close(*self.history.append(lens, self.form.page_size), self.form.tolerance)
            self.peaks = list(map(max, self.peaks, self.lengths()))

    @rule(cuts=CUTS)
    def truncate(self, cuts: list[int]):
        cuts = [max(pair) for pair in zip(cuts, self.least_cuts(), strict=True)]
        self.history.truncate(list(map(self.openable, cuts, self.lengths(), self.peaks)))
        self.peaks = [peak if length else 0 for peak, length in zip(self.peaks, self.lengths(), strict=True)]

    def least_cuts(self) -> list[int]:
        """Return the shortest lengths at which a next token still finds its window."""
        if self.form.window is None:
            return [0] * NUM_ROWS
        num_kept = self.history.width * self.form.page_size
        return [peak - num_kept + self.form.window - 1 if peak > num_kept else 0 for peak in self.peaks]

    def openable(self, cut: int, length: int, peak: int) -> int:
        """Return the cut, or the border before it where its run's keys are kept as they are encoded alone."""
        codec, _ = self.form.spec.groups[0].codecs
        span = codec.span(self.form.page_size) if codec.scaling == "slots" else 1
        is_kept = cut - cut % span >= peak - 2 * span
        return cut if is_kept or cut >= length else cut - cut % span

    @rule(rows=ROWS)
    def fork(self, rows: list[int]):
        self.history.fork(rows)
        self.peaks = [self.peaks[row] for row in rows]

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def clear(self, row: int):
        self.history.clear(row)
        self.peaks[row] = 0


SEARCH = settings(max_examples=25, stateful_step_count=15, derandomize=True, database=None)


@pytest.mark.parametrize(
    "form",
    [
        Form("paged", "int4", head_dim=16, heads=(2, 1)),
        Form("paged_window", "f32", head_dim=16, heads=(2, 1), pages_per_row=8),
        Form("window", "int8", head_dim=16, heads=(2, 1), pages_per_row=8, pool_layout="tpu"),
    ],
    ids=name,
)
def test_any_history_gives_what_dense_attention_gives(form: Form):
    run_state_machine_as_test(type("Any", (Histories,), {"form": form}), settings=SEARCH)


class MovesLengthsAlone(History):
    def fork(self, rows: list[int]) -> None:
        self.cache = self.cache.replace(lengths=self.cache.lengths[jnp.array(rows)])
        self.heads = [self.heads[row] for row in rows]


def test_the_model_catches_a_fork_that_copies_nothing():
    search = settings(SEARCH, phases=[Phase.generate], max_examples=100)
    with pytest.raises(AssertionError, match="relative error"):
        run_state_machine_as_test(type("Faulty", (Histories,), {"make": MovesLengthsAlone}), settings=search)
