"""Training after a conversion: what it learns, that it goes on to the bit, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.convert.text import draw_rows, split_text
from jkv.convert.uptrain import Model, Settings, make_model, perplexity, uptrain

from ..compare import assert_close
from ..tiny import make_config
from .test_pooling import draw_parameters

CONFIG = make_config()
# A token is followed by one of few, so that there is something to learn.
TOKENS = np.cumsum(np.random.default_rng(0).integers(1, 3, 800)).astype(np.int32) % 32
SETTINGS = Settings(steps=12, batch=4, learning_rate=5e-2, warmup=2)


class StoppedError(Exception):
    """Stops a run between two steps."""


@pytest.fixture(scope="module")
def text():
    return split_text(TOKENS, 16)


@pytest.fixture(scope="module")
def model():
    return make_model(CONFIG, draw_parameters(CONFIG))


@pytest.fixture(scope="module")
def trained(model, text):
    return uptrain(model, text, SETTINGS)


def assert_same(one, other):
    np.testing.assert_array_equal(one.losses, other.losses)
    for name, array in one.parameters.items():
        np.testing.assert_array_equal(array, other.parameters[name])


def test_what_is_held_out_is_predicted_better(model, text, trained):
    after = perplexity(Model(model.forward, trained.parameters), text.held_out)
    assert after < 0.7 * perplexity(model, text.held_out)
    assert np.mean(trained.losses[-3:]) < 0.8 * np.mean(trained.losses[:3])


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(model, text, trained, tmp_path):
    def stop(step: int, loss: float) -> None:
        if step == 6:
            raise StoppedError

    keeping = {"keep": tmp_path / "run", "keep_every": 4, "identity": {"model": "tiny"}}
    with pytest.raises(StoppedError):
        uptrain(model, text, SETTINGS, report=stop, **keeping)
    steps = []
    assert_same(uptrain(model, text, SETTINGS, report=lambda step, _: steps.append(step), **keeping), trained)
    assert steps == list(range(5, 13))
    # One that has ended only gives its result.
    assert_same(uptrain(model, text, SETTINGS, report=stop, **keeping), trained)
    for change in ({"settings": replace(SETTINGS, clip=2.0)}, {"identity": {"model": "another"}}):
        with pytest.raises(
            ValueError, match=r"keeps another run, got (clip 2.0 for 1.0|model another for tiny)"
        ):
            uptrain(model, text, **{"settings": SETTINGS, **keeping, **change})


@pytest.mark.gate
def test_gradients_of_several_batches_are_averaged_and_do_not_depend_on_remat(model, text, trained):
    settings = replace(SETTINGS, batch=2, accumulate=2)
    kept = make_model(CONFIG, model.parameters, has_remat=False)
    assert_close(uptrain(kept, text, settings).losses, trained.losses, 1e-4)


@pytest.mark.gate
def test_a_teacher_s_distribution_is_learnt(model, text):
    settings = replace(SETTINGS, teacher_share=1.0)
    moved = {name: array + 0.05 * jnp.sign(array) for name, array in model.parameters.items()}
    found = uptrain(Model(model.forward, moved), text, settings, teacher=model)
    assert 0 < found.losses[-1] < 0.5 * found.losses[0]


def test_a_seed_s_rows_come_once_an_epoch_in_an_order_of_its_own():
    text = split_text(np.arange(800, dtype=np.int32), 16)
    first, second = (draw_rows(text, seed=3, first=start, count=43) for start in (0, 43))
    for rows in (first, second):
        starts = np.sort(rows[:, 0])
        assert (np.diff(starts) == 16).all()
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(17))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(draw_rows(text, seed=3, first=5, count=4), first[5:9])
    assert not np.array_equal(draw_rows(text, seed=4, first=0, count=43), first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"warmup": 12}, "warmup must be less than the 12 steps, got 12"),
        ({"learning_rate": 0.0}, "learning_rate and clip must be above 0"),
        ({"weight_decay": float("nan")}, "weight_decay not below, .* and nan"),
        ({"teacher_share": 0.5}, "got teacher_share 0.5 without a teacher"),
    ],
)
def test_a_run_that_cannot_be_is_refused(model, text, changes, message):
    with pytest.raises(ValueError, match=message):
        uptrain(model, text, replace(SETTINGS, **changes))


def test_a_loss_that_is_not_finite_ends_the_run(model, text):
    spoilt = {name: array * jnp.nan for name, array in model.parameters.items()}
    with pytest.raises(ValueError, match="the loss must be finite, got nan at step 1; lower learning_rate"):
        uptrain(Model(model.forward, spoilt), text, SETTINGS)


def test_a_last_update_that_is_not_finite_is_neither_kept_nor_given(model, text, tmp_path):
    # The rate's float32 has room for the first update's size, its decay of the weights none.
    settings = replace(SETTINGS, steps=1, warmup=0, learning_rate=3e38, weight_decay=1e3)
    with pytest.raises(ValueError, match="every parameter must be finite, got NaN or infinity in"):
        uptrain(model, text, settings, keep=tmp_path / "run")
    assert not list((tmp_path / "run" / "states").iterdir())


@pytest.mark.parametrize(
    ("length", "held_out", "message"),
    [
        (200, 0.125, "more than 200 tokens to learn from and as many held out, got 700 and 100"),
        (16, 0.0, "the held-out share must be above 0 and below 1, got 0"),
        (1, 0.5, "a row must have at least 2 tokens, got 1"),
    ],
)
def test_a_text_that_cannot_be_split_is_refused(length, held_out, message):
    with pytest.raises(ValueError, match=message):
        split_text(TOKENS, length, held_out=held_out)
