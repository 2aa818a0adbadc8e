"""The arithmetic of cache sizes."""

import pytest

from jkv.cache.spec import CacheGroup, CacheSpec


def make_spec(page_size: int = 16, **sizes) -> CacheSpec:
    group = CacheGroup(**{"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, **sizes})
    return CacheSpec.create([group], page_size=page_size)


def test_dense_bytes_are_two_b_s_l_h_d_p():
    spec = make_spec(codec="bf16")
    assert spec.dense_bytes(num_sequences=5, capacity=64) == 2 * 5 * 64 * 3 * 2 * 8 * 2


def test_a_part_of_a_page_costs_a_whole_one():
    spec = make_spec(page_size=16)
    assert spec.dense_bytes(1, 17) == spec.dense_bytes(1, 32) == 2 * spec.bytes_per_page
    assert [spec.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_budget_holds_whole_pages():
    spec = make_spec(page_size=16)
    assert spec.tokens_in(3 * spec.bytes_per_page - 1) == 32
    assert spec.tokens_in(spec.bytes_per_page - 1) == 0


def test_groups_add_up():
    wide, narrow = CacheGroup(1, 4, 16), CacheGroup(2, 1, 8, "bf16")
    spec = CacheSpec.create([wide, narrow], page_size=4)
    assert spec.bytes_per_token == 2 * (4 * 16 * 4 + 2 * 8 * 2)
    assert wide.page_arrays(10, page_size=4)[0]["data"].shape == (10, 4, 4, 16)
    assert narrow.page_arrays(10, page_size=4)[1]["data"].shape == (20, 1, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, r"must be positive, got \(0, 2, 8\)"),
        ({"head_dim": -8}, r"must be positive, got \(3, 2, -8\)"),
        ({"page_size": 0}, "at least 1 token, got 0"),
    ],
)
def test_sizes_that_make_no_cache_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_spec(**options)


def test_a_cache_without_groups_is_refused():
    with pytest.raises(ValueError, match="at least one group"):
        CacheSpec.create([], page_size=4)
