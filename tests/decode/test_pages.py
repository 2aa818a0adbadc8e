"""What a batch's cache is planned to be, and the books of its pages."""

import random
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.pages import CachePlan, PageBooks, plan_cache

# A window of 6 tokens and a step of 2 are two pages of 4; the other group keeps every token.
SPEC = CacheSpec.create(
    [CacheGroup(2, 1, 8), CacheGroup(1, 1, 8, "int8", window=6)], page_size=4, max_chunk=2
)
PROMPTS = [3, 9, 9, 30]


def make_plan(num_pages=None, **options) -> CachePlan:
    return plan_cache(SPEC, Counter(PROMPTS), 3, num_pages=num_pages, **options)


@pytest.mark.parametrize(
    ("num_pages", "pools"),
    [
        (None, None),
        # Sequences of 5, 11, 11 and 32 tokens: 2 + 3 + 3 + 8 pages, and 2 of each window.
        ("auto", (16, 8)),
        (10, (10, 8)),
        # Tables of four sequences name 8 pages each, or 2.
        (1000, (32, 8)),
    ],
)
def test_a_plan_has_the_bytes_of_the_cache(num_pages, pools):
    plan = make_plan(num_pages)
    assert (plan.capacity, plan.num_pages, plan.needed_pages) == (32, pools, (16, 8))
    sizes = {"num_sequences": 4, "capacity": plan.capacity}
    cache = Cache.dense(SPEC, **sizes) if pools is None else Cache.paged(SPEC, **sizes, num_pages=pools)
    arrays = jax.tree.leaves([(pool.keys, pool.values) for pool in cache.pools])
    assert plan.nbytes == sum(array.nbytes for array in arrays)


@pytest.mark.usefixtures("unchecked")
def test_a_number_of_numpy_s_is_a_number_of_pages():
    assert make_plan(np.int64(10)).num_pages == (10, 8)


def test_shards_have_pools_of_their_own():
    plan = make_plan("auto", num_shards=2)
    # Two of four sequences lie in a shard, the longest may be both of them.
    assert (plan.num_pages, plan.nbytes) == ((16, 4), SPEC.paged_bytes(4, [32, 8]))


def test_stripes_have_pools_of_their_own():
    spec = replace(SPEC, num_stripes=3)
    plan = plan_cache(spec, Counter(PROMPTS), 3, num_pages="auto")
    # 2, 3, 3 and 8 pages, a third of each rounded up; three of each window.
    assert (plan.num_pages, plan.pool_pages) == ((1 + 1 + 1 + 3, 4), (18, 12))
    assert plan.nbytes == 3 * spec.paged_bytes(4, [6, 4])
    with pytest.raises(ValueError, match="need 3 pages of 4 tokens, got a pool of 2"):
        plan_cache(spec, Counter(PROMPTS), 3, num_pages=2)
    books = PageBooks(plan, [5, 11, 11, 32])
    books.start(3)
    books.extend(3, 32)
    # Each page is the next of its own stripe.
    assert [table[3].tolist() for table in books.tables()] == [[0, 0, 0, 1, 1, 1, 2, 2, -1], [0, 0, 0]]


def test_what_can_never_fit_is_refused_with_its_sizes():
    message = "a prompt of 30 tokens and 3 new ones need 8 pages of 4 tokens, got a pool of 7; shorten them"
    with pytest.raises(ValueError, match=message):
        make_plan(7)
    with pytest.raises(ValueError, match="need a capacity of 32 tokens, got 31; shorten them or raise"):
        make_plan(8, capacity=31)


def test_a_pool_that_cannot_hold_all_at_once_is_refused_where_none_can_wait():
    make_plan("auto").require_room()
    make_plan(None).require_room()
    with pytest.raises(ValueError, match="the 4 sequences need 16 pages at once, got a pool of 15; raise"):
        make_plan(15).require_room()


def test_a_row_takes_pages_as_it_grows_and_gives_all_back():
    books = PageBooks(make_plan(10), [5, 11, 11, 32])
    assert books.start(0)
    assert books.extend(0, 3)
    assert not books.extend(0, 1)
    assert [table[0].tolist() for table in books.tables()] == [[0, *[-1] * 7], [0, -1]]
    # Past its limit of 5 tokens nothing is taken.
    assert books.extend(0, 100)
    assert not books.extend(0, 1)
    books.end(0)
    books.end(0)
    books.check()
    assert all((table == -1).all() for table in books.tables())
    assert books.peaks == [2, 2]
    assert books.row_bytes(0) == SPEC.paged_bytes(1, [2, 2])


def test_a_row_that_has_not_grown_yet_keeps_others_from_its_pages():
    books = PageBooks(make_plan(10), [5, 11, 11, 32])
    assert books.start(3)
    assert books.start(0)
    # 8 and 2 pages are promised, though none is taken.
    assert not books.start(1)
    books.end(3)
    assert books.start(1)
    books.extend(1, 11)
    books.check()


@pytest.mark.parametrize(("num_shards", "num_stripes"), [(1, 1), (2, 1), (2, 3)])
def test_the_books_hold_through_any_history(num_shards: int, num_stripes: int):
    choose = random.Random(0)
    limits = [choose.randint(1, 32) for _ in range(8)]
    spec = replace(SPEC, num_stripes=num_stripes)
    plan = plan_cache(spec, Counter(limits), 1, num_pages=12, num_shards=num_shards)
    books, started = PageBooks(plan, limits), set()
    for _ in range(500):
        row = choose.randrange(8)
        if row not in started:
            if books.start(row):
                started.add(row)
        elif choose.random() < 0.3:
            books.end(row)
            started.remove(row)
        else:
            books.extend(row, choose.randint(0, 9))
        books.check()
    for row in started:
        books.extend(row, 32)
    books.check()


def test_a_page_in_two_rows_is_found():
    books = PageBooks(make_plan(10), [5, 11, 11, 32])
    for row in (0, 1):
        books.start(row)
        books.extend(row, 1)
    books._pages[0][1] = books._pages[0][0]
    with pytest.raises(AssertionError, match="must be held once"):
        books.check()
