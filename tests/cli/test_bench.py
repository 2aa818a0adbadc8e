import pytest

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.cli import bench
from jkv.config import load_config
from jkv.plan.decoder import parameters


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)


def test_a_batch_is_measured_at_every_context(run_json, tiny):
    flags = ("--batch", "1", "--context", "20,24", "--steps", 4, "--repeats", 2, "--json")
    (shown,) = run_json("bench", "decode", "--model", tiny, *flags)
    first, second = shown["measurements"]
    assert [(one["batch"], one["context"]) for one in (first, second)] == [(1, 20), (1, 24)]
    for one in (first, second):
        assert one["step_ms"]["median"] > 0
        assert one["step_ms"]["spread"] >= 0
        assert one["tokens_per_second"] == pytest.approx(1e3 * one["batch"] / one["step_ms"]["median"])
        seconds = one["step_ms"]["median"] / 1e3
        assert one["bandwidth_share"] == pytest.approx(one["bytes_per_step"] / seconds / 1e9)
    assert second["bytes_per_step"] - first["bytes_per_step"] == 4 * 2 * 3 * 2 * 8 * 4
    # All weights but an embedding that is looked up.
    weights = (127_424 - 320 * 64) * 4
    assert first["bytes_per_step"] == weights + (20 + 2) * 2 * 3 * 2 * 8 * 4


def test_a_window_bounds_the_bytes_of_a_step(run_json, tiny):
    flags = ("--batch", "2", "--context", "20", "--steps", 4, "--repeats", 1, "--cache", "paged", "--json")
    (shown,) = run_json("bench", "decode", "--model", tiny.parent / "mistral_sliding", *flags)
    (one,) = shown["measurements"]
    assert one["step_ms"]["median"] > 0
    assert one["bytes_per_step"] == (127_424 - 320 * 64) * 4 + 2 * 16 * 2 * 3 * 2 * 8 * 4


def test_a_window_bounds_what_is_read_of_a_cache_that_keeps_all():
    windows = (None, 6, 6)
    spec = CacheSpec.create([CacheGroup(1, 2, 8), CacheGroup(2, 2, 8)], page_size=4)
    assert bench.live_bytes(spec, windows, 20) == (20 + 2 * 6) * 2 * 2 * 8 * 4


def test_a_step_reads_the_experts_that_its_tokens_were_sent_to():
    sizes = load_config("smollm2-cpu", ["--model", "qwen3-30b-a3b"]).model.sizes
    of_one, of_all = (bench.weight_bytes(sizes, "bfloat16", tokens) for tokens in (1, 10**6))
    table = sizes.vocab_size * sizes.embed_dim
    assert of_all == 2 * (sum(part.num_parameters() for part in parameters(sizes)) - table)
    experts = sizes.num_layers * 3 * sizes.embed_dim * sizes.experts.mlp_dim
    assert of_all - of_one == 2 * experts * (sizes.experts.num_experts - sizes.experts.num_active)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--batch", "4", "--context", "60", "--cache", "paged", "--num-pages", "6"),
            "the 4 sequences need 20 pages at once, got a pool of 6",
        ),
        (
            ("--batch", "2,3", "--context", "16", "--mesh.axes", "data", "2", "model", "1"),
            "must split sequences evenly, got 3 over 2 devices",
        ),
        (("--context", "510"), "the model reads at most 512 tokens, got 526 with the steps"),
        (("--batch", "1000000000", "--context", "16"), "the cache must fit in the memory of"),
        (("--batch", "1,x"), "--batch must be positive numbers with commas"),
        (("--context", "0"), "--context must be positive numbers with commas"),
        (("--steps", "0"), "--steps and --repeats must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(refusal, tiny, flags, message):
    assert message in refusal("bench", "decode", "--model", tiny, *flags)


def test_a_copy_s_bandwidth_is_measured(monkeypatch):
    monkeypatch.undo()
    assert bench.copy_bandwidth(2**20, num_repeats=2) > 0
