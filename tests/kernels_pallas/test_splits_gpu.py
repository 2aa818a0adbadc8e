"""What GPU kernels share of splits: which there are, how they are merged, and by how many kernels."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.hopper import splits as splitting
from kernels_pallas.hopper.blocks import BLOCK_TOKENS
from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.paged_attention import Stripe
from kernels_pallas.paged_attention.shapes import MODELS
from scripts.gpu_launches import OF_PALLAS
from scripts.gpu_static_calls import launches_of

from ..compare import assert_close
from ..gpu_kernels import interpret
from ..machines import find_target
from .faults import with_fault

# Tokens held before a step, and new ones: idle rows, one that has nothing before, and rings written over.
STARTS = (0, 0, 7, 127, 900, 2397, 40)
LENS = (0, 1, 3, 1, 4, 3, 0)
# Pages of a row, slots of one, tokens of a split, window, and the stripe.
PLANS = [
    (40, 16, 64, None, None),
    (16, 64, 512, 100, None),
    (8, 32, 64, None, (2, 1)),
    (3, 128, 64, None, (3, 0)),
]


def defined_work(sizes: splitting.Cut, window: int | None, stripe: Stripe) -> list[tuple[int, ...]]:
    """Return what each split of each sequence has to do, slot by slot."""
    stride, offset = (int(x) for x in stripe)
    work = []
    for seq, (start, new) in enumerate(zip(STARTS, LENS, strict=True)):
        end = start + new
        first_seen = max(0, end - sizes.capacity * stride, start - window + 1 if window else 0)
        # Of several stripes, whole pages.
        begin = first_seen - (first_seen % sizes.page_size if stride > 1 else 0)
        stop = end + (-end % sizes.page_size if stride > 1 else 0)
        of_splits: dict[int, list[int]] = {}
        for position in range(begin, stop if new else begin):
            page, within = divmod(position, sizes.page_size)
            if page % stride == offset:
                slot = page // stride * sizes.page_size + within
                of_splits.setdefault(slot // sizes.split, []).append(slot // BLOCK_TOKENS)
        for blocks in of_splits.values():
            work.append((seq, min(blocks), max(blocks) - min(blocks) + 1, first_seen, end))
    return work


def assert_plans_are_as_defined(module: ModuleType) -> None:
    for max_pages, page_size, split_tokens, window, stripe in PLANS:
        sizes = module.cut(max_pages, page_size, split_tokens, 4)
        starts, lens = (jnp.asarray(each, jnp.int32) for each in (STARTS, LENS))
        given = None if stripe is None else Stripe(*(jnp.int32(each) for each in stripe))
        splits = module.plan(starts, lens, 5, sizes, given, time=4, group=1, padding=0, window=window)
        expected = defined_work(sizes, window, given or Stripe(1, 0))
        assert splits.counts.tolist() == [len(expected), 5, *(stripe or ())]
        np.testing.assert_array_equal(splits.work[: len(expected)], expected)
        assert not np.asarray(splits.work[len(expected) :]).any()
        counts = np.bincount([seq for seq, *_ in expected], minlength=len(STARTS))
        np.testing.assert_array_equal(
            splits.of_sequences, np.stack([np.cumsum(counts) - counts, counts], axis=1)
        )


def test_a_plan_names_each_split_of_each_sequence_once():
    assert_plans_are_as_defined(splitting)


PLAN_FAULTS = {
    "one split too few": ("-(-capacity // split) + 1", "-(-capacity // split)"),
    "splits of parts of a page": ("max(BLOCK_TOKENS, page_size)", "BLOCK_TOKENS"),
    "splits of the sequence before": ("first[:, None] + split, nowhere", "last[:, None] + split, nowhere"),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_in_a_plan_is_found(fault: str):
    with pytest.raises(AssertionError):
        assert_plans_are_as_defined(with_fault((splitting, *PLAN_FAULTS[fault])))


def assert_merges_as_defined(module: ModuleType, query_axis: int) -> None:
    """Of more splits than are merged at once, and none; what lies past them is NaN."""
    counts, num_parts, num_queries, num_channels = np.array([0, 1, 8, 18]), 2, 64, 64
    random = np.random.default_rng(0)
    num_splits = counts.sum() + 8
    out = random.standard_normal((num_splits, num_parts, num_channels, num_queries), np.float32)
    log_sum = 3 * random.standard_normal((num_splits, num_parts, num_queries), np.float32)
    first = np.cumsum(counts) - counts
    # What one query sees in no split; and another not in the first 8.
    log_sum[first[3] : first[3] + 18, :, 3] = log_sum[first[3] : first[3] + 8, :, 4] = -np.inf
    out[counts.sum() :] = log_sum[counts.sum() :] = np.nan
    expected = np.zeros((len(counts), *out.shape[1:]))
    expected_log_sum = np.full((len(counts), *log_sum.shape[1:]), -np.inf)
    for seq, (begin, count) in enumerate(zip(first, counts, strict=True)):
        if count:
            own = log_sum[begin : begin + count].astype(np.float64)
            expected_log_sum[seq] = np.logaddexp.reduce(own, axis=0)
            is_seen = np.isfinite(expected_log_sum[seq])
            shares = np.exp(own - np.where(is_seen, expected_log_sum[seq], 0))
            expected[seq] = (out[begin : begin + count] * shares[:, :, None]).sum(axis=0)
    if query_axis == 0:
        out, expected = out.swapaxes(2, 3), expected.swapaxes(2, 3)
    of_sequences = np.stack([first, counts], axis=1).astype(np.int32)

    def merge(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return module.merge(*arrays, query_axis=query_axis, name="merge")

    arrays = map(jnp.asarray, (out, log_sum, of_sequences))
    got, got_log_sum = interpret(jax.jit(merge), *arrays, num_kernels=1)
    assert_close(got, expected, 1e-5)
    is_seen = np.isfinite(expected_log_sum)
    assert (np.asarray(got_log_sum)[~is_seen] == -np.inf).all()
    assert_close(np.asarray(got_log_sum)[is_seen], expected_log_sum[is_seen], 1e-5)


@pytest.mark.parametrize("query_axis", [0, 1])
def test_any_number_of_splits_is_merged(query_axis: int):
    assert_merges_as_defined(splitting, query_axis)


MERGE_FAULTS = {
    "neither rescaled": ("total * keep, sums * spread(keep, block)", "total, sums"),
    "sums not rescaled": ("sums * spread(keep, block)", "sums"),
    "what is past the last": (
        "jnp.minimum(index * _MERGED_AT_ONCE + i, count - 1)",
        "(index * _MERGED_AT_ONCE + i)",
    ),
    "the last again": (
        "_MERGED_AT_ONCE + i < count, 0.0, -jnp.inf)",
        "_MERGED_AT_ONCE + i < count, 0.0, 0.0)",
    ),
    "no last eight": ("divide(count + _MERGED_AT_ONCE - 1,", "divide(count,"),
}


@pytest.mark.parametrize("fault", MERGE_FAULTS)
def test_a_fault_in_the_merge_is_found(fault: str):
    with pytest.raises(AssertionError):
        assert_merges_as_defined(with_fault((splitting, *MERGE_FAULTS[fault])), 1)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("model", [MODELS["llama3_8b"], LATENT_MODELS["deepseek_v3"]])
def test_a_call_is_a_dozen_kernels_however_many_sequences_it_has(model):
    """Two of them are Pallas'; none is in a loop."""
    shape = dataclasses.replace(model, totals=(8192,) * 256)
    launches = launches_of(find_target("h200"), shape, "bf16")
    assert sum(launch.name == OF_PALLAS for launch in launches) == 2
    assert len(launches) <= 12
