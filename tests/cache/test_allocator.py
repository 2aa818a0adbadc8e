"""The books of a pool's pages, alone and against a model of them."""

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jkv.cache.allocator import PageAllocator


def make_allocator(num_pages: int = 8, *, held: int = 0) -> PageAllocator:
    """Make an allocator whose first `held` pages have one holder each."""
    allocator = PageAllocator(num_pages)
    assert allocator.allocate(held) == list(range(held))
    return allocator


def counts(allocator: PageAllocator) -> tuple[int, int, int]:
    """Check the books and return the pages that are free, held and cached."""
    allocator.check()
    return allocator.num_free, allocator.num_held, allocator.num_cached


def state_of(allocator: PageAllocator) -> tuple:
    return list(allocator._free), dict(allocator._holders), list(allocator._cached)


def test_the_books_import_no_jax():
    code = "import sys, jkv.cache.allocator; sys.exit(sorted({'jax', 'jaxlib'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_are_handed_out_in_order_and_come_back_in_order():
    allocator = make_allocator(6)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.free([1, 3])
    assert allocator.allocate(3) == [1, 3, 4]
    assert counts(allocator) == (1, 5, 0)


def test_no_pages_is_no_request():
    allocator = make_allocator(1, held=1)
    assert allocator.allocate(0) == []
    allocator.share([])
    allocator.free([])
    assert counts(allocator) == (0, 1, 0)


def test_running_out_of_pages_returns_none_and_takes_nothing():
    allocator = make_allocator(4, held=1)
    before = state_of(allocator)
    assert allocator.allocate(4) is None
    assert state_of(allocator) == before
    assert allocator.allocate(3) == [1, 2, 3]


def test_a_shared_page_is_held_until_its_last_holder_frees_it():
    allocator = make_allocator(4, held=2)
    allocator.share([0, 1])
    allocator.share([0])
    assert allocator.is_shared(0)
    allocator.free([0, 1])
    assert counts(allocator) == (2, 2, 0)
    assert allocator.is_shared(0)
    assert not allocator.is_shared(1)
    allocator.free([0])
    allocator.free([0, 1])
    assert counts(allocator) == (4, 0, 0)


def test_one_call_may_end_several_holders():
    allocator = make_allocator(4, held=1)
    allocator.share([0, 0])
    allocator.free([0, 0, 0])
    assert counts(allocator) == (4, 0, 0)


def test_a_kept_page_is_cached_and_taken_back_by_id():
    allocator = make_allocator(4, held=3)
    allocator.free([0, 1, 2], keep={0, 1})
    assert counts(allocator) == (2, 0, 2)
    allocator.share([0, 1])
    assert counts(allocator) == (2, 2, 0)
    assert not allocator.is_shared(0)


def test_a_page_is_kept_only_when_its_last_holder_keeps_it():
    allocator = make_allocator(4, held=1)
    allocator.share([0])
    allocator.free([0], keep={0})
    assert counts(allocator) == (3, 1, 0)
    allocator.free([0])
    assert counts(allocator) == (4, 0, 0)


def test_cached_pages_are_reused_only_after_the_free_ones():
    allocator = make_allocator(4, held=2)
    allocator.free([0, 1], keep={0, 1})
    assert allocator.allocate(2) == [2, 3]
    assert allocator.num_cached == 2
    assert allocator.allocate(1) == [1]
    assert counts(allocator) == (0, 3, 1)


def test_cached_pages_are_reused_least_recently_used_first():
    allocator = make_allocator(4, held=4)
    for page in (2, 0, 3, 1):
        allocator.free([page], keep={page})
    allocator.share([2])
    allocator.free([2], keep={2})
    assert allocator.allocate(4) == [0, 3, 1, 2]


def test_the_end_of_a_cached_sequence_is_reused_before_its_beginning():
    allocator = make_allocator(4, held=4)
    allocator.free([3, 1, 0, 2], keep={0, 1, 2, 3})
    assert allocator.allocate(3) == [2, 0, 1]
    allocator.share([3])


def test_a_double_free_is_refused_with_its_pages_and_frees_nothing():
    allocator = make_allocator(8, held=4)
    allocator.free([1, 2], keep={2})
    before = state_of(allocator)
    for pages, named in (([0, 1, 2], r"\[1, 2\]"), ([3, 3], r"\[3\]"), ([7], r"\[7\]")):
        with pytest.raises(ValueError, match=rf"once per holder, got pages {named}"):
            allocator.free(pages)
        assert state_of(allocator) == before


def test_a_free_page_cannot_be_shared():
    allocator = make_allocator(4, held=2)
    allocator.free([1])
    before = state_of(allocator)
    with pytest.raises(ValueError, match=r"got free pages \[1, 3\]"):
        allocator.share([0, 1, 3])
    assert state_of(allocator) == before


def test_a_page_of_its_own_is_written_in_place():
    allocator, pages = make_allocator(2, held=2), [0, 1]
    assert allocator.make_writable(pages, 1) == (1, 1)
    assert pages == [0, 1]


def test_a_shared_page_is_copied_before_it_is_written():
    allocator, pages = make_allocator(4, held=2), [0, 1]
    fork = list(pages)
    allocator.share(fork)
    assert allocator.make_writable(fork, -1) == (1, 2)
    assert (pages, fork) == ([0, 1], [0, 2])
    assert allocator.is_shared(0)
    # The copy left the source with one holder, who needs no copy.
    assert allocator.make_writable(pages, -1) == (1, 1)
    allocator.free(pages)
    allocator.free(fork)
    assert counts(allocator) == (4, 0, 0)


def test_a_copy_may_take_a_cached_page():
    allocator, pages = make_allocator(2, held=2), [0]
    allocator.share(pages)
    allocator.free([1], keep={1})
    assert allocator.make_writable(pages, 0) == (0, 1)
    assert counts(allocator) == (0, 2, 0)


def test_a_copy_without_a_page_left_changes_nothing():
    allocator, pages = make_allocator(2, held=2), [0, 1]
    allocator.share(pages)
    before = state_of(allocator)
    assert allocator.make_writable(pages, 1) is None
    assert pages == [0, 1]
    assert state_of(allocator) == before


def test_a_page_that_nobody_holds_cannot_be_written():
    allocator = make_allocator(4, held=1)
    allocator.free([0], keep={0})
    for page in (0, 3):
        with pytest.raises(ValueError, match=f"got page {page} that nobody holds"):
            allocator.make_writable([page], 0)


@pytest.mark.parametrize("page", [-1, 4, 99, True])
def test_an_id_that_is_no_page_is_refused(page: int):
    allocator = make_allocator(4, held=4)
    before = state_of(allocator)
    calls = (allocator.share, allocator.free, lambda pages: allocator.is_shared(pages[1]))
    for call in (*calls, lambda pages: allocator.make_writable(pages, 1)):
        with pytest.raises(ValueError, match=rf"ints in \[0, 4\), got \[{page}\]"):
            call([0, page])
    assert state_of(allocator) == before


@pytest.mark.parametrize("num_pages", [-1, True])
def test_a_number_of_pages_is_not_negative_and_no_boolean(num_pages: int):
    with pytest.raises(ValueError, match=f"int of at least 0, got {num_pages}"):
        make_allocator().allocate(num_pages)
    with pytest.raises(ValueError, match=f"at least 1 page, as an int, got {num_pages}"):
        PageAllocator(num_pages)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least 1 page, as an int, got 0"):
        PageAllocator(0)


# Pages 0 and 1 are held, page 2 is cached, pages 3 to 5 are free.
DEFECTS = {
    "a free page is lost": lambda books: books._free.pop(),
    "a held page is lost": lambda books: books._holders.pop(0),
    "a cached page is lost": lambda books: books._cached.popitem(),
    "a page is free twice": lambda books: books._free.append(3),
    "a page is free and held": lambda books: books._free.append(0),
    "a page is free and cached": lambda books: books._free.append(2),
    "a page is held and cached": lambda books: books._cached.update({0: None}),
    "a page is not of the pool": lambda books: books._free.append(6),
    "a page is replaced by a stranger": lambda books: books._holders.update({-1: books._holders.pop(0)}),
    "a held page has no holder": lambda books: books._holders.update({0: 0}),
    "a held page has less than no holder": lambda books: books._holders.update({0: -1}),
    "the pool is larger than its books": lambda books: setattr(books, "num_pages", 7),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS.keys())
def test_check_notices_books_that_do_not_balance(defect):
    allocator = make_allocator(6, held=3)
    allocator.free([2], keep={2})
    assert counts(allocator) == (3, 2, 1)
    defect(allocator)
    with pytest.raises(AssertionError):
        allocator.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_books_balance_through_500_events(page_size: int):
    """B18: requests are admitted, finished and aborted at random."""
    allocator, draw = make_allocator(32), random.Random(18)
    sequences: list[list[int]] = []
    for _ in range(500):
        if draw.random() < 0.6:
            num_tokens = draw.randint(1, 23)
            if pages := allocator.allocate(-(-num_tokens // page_size)):
                sequences.append(pages)
        elif sequences:
            ended = sequences.pop(draw.randrange(len(sequences)))
            allocator.free(ended, keep=set(ended) if draw.random() < 0.5 else set())  # finished, or aborted
            with pytest.raises(ValueError, match="once per holder"):
                allocator.free(ended)
        owners = Counter(page for pages in sequences for page in pages)
        assert set(owners.values()) <= {1}
        assert counts(allocator)[1] == len(owners)
    for pages in sequences:
        allocator.free(pages)
    assert counts(allocator)[1] == 0


NUM_PAGES = 8
CHOICE = st.integers(0, 2**16)


class Books(RuleBasedStateMachine):
    """Sequences that come, fork, write and end, against lists that say what each page should be.

    The model knows an owner by its list of pages, what is free as the rest, and the cached pages as a list,
    oldest first, from which reuse takes the first.
    """

    make = PageAllocator

    def __init__(self):
        super().__init__()
        self.allocator = self.make(NUM_PAGES)
        self.sequences: list[list[int]] = []
        self.cached: list[int] = []

    def model_holders(self) -> Counter[int]:
        return Counter(page for pages in self.sequences for page in pages)

    def model_takes(self, pages: list[int], num_free: int) -> None:
        """Compare pages that were handed out: free ones in any order, then the oldest cached."""
        first, rest = pages[:num_free], pages[num_free:]
        assert not set(first) & (self.model_holders().keys() | set(self.cached))
        assert rest == self.cached[: len(rest)]
        del self.cached[: len(rest)]

    def num_model_free(self) -> int:
        return NUM_PAGES - len(self.model_holders()) - len(self.cached)

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def admit(self, num_pages: int):
        num_free = self.num_model_free()
        pages = self.allocator.allocate(num_pages)
        assert (pages is None) == (num_pages > num_free + len(self.cached))
        if pages is not None:
            assert len(set(pages)) == len(pages) == num_pages
            self.model_takes(pages, num_free)
            self.sequences.append(pages)

    @precondition(lambda self: self.sequences)
    @rule(choice=CHOICE, keep=st.sets(st.integers(0, NUM_PAGES - 1)))
    def end(self, choice: int, keep: set[int]):
        pages = self.sequences.pop(choice % len(self.sequences))
        self.allocator.free(pages, keep=keep)
        self.cached += [page for page in reversed(pages) if page not in self.model_holders() and page in keep]

    @precondition(lambda self: self.sequences)
    @rule(choice=CHOICE)
    def fork(self, choice: int):
        pages = list(self.sequences[choice % len(self.sequences)])
        self.allocator.share(pages)
        self.sequences.append(pages)

    @precondition(lambda self: self.cached)
    @rule(choice=CHOICE)
    def find_a_prefix(self, choice: int):
        page = self.cached.pop(choice % len(self.cached))
        self.allocator.share([page])
        self.sequences.append([page])

    @precondition(lambda self: any(self.sequences))
    @rule(choice=CHOICE)
    def write(self, choice: int):
        written = [pages for pages in self.sequences if pages]
        pages = written[choice % len(written)]
        before, num_free = list(pages), self.num_model_free()
        source = before[-1]
        is_shared = self.model_holders()[source] > 1
        assert self.allocator.is_shared(source) == is_shared
        copy = self.allocator.make_writable(pages, -1)
        if not is_shared:
            assert (copy, pages) == ((source, source), before)
        elif num_free + len(self.cached) == 0:
            assert (copy, pages) == (None, before)
        else:
            taken = pages.pop()
            assert (copy, pages) == ((source, taken), before[:-1])
            self.model_takes([taken], num_free)
            pages.append(taken)

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def misuse(self, page: int):
        holders = self.model_holders()[page]
        with pytest.raises(ValueError, match="once per holder"):
            self.allocator.free([page] * (holders + 1))
        if holders == 0 and page not in self.cached:
            with pytest.raises(ValueError, match="free pages"):
                self.allocator.share([page])

    @invariant()
    def the_books_balance(self):
        holders = self.model_holders()
        assert counts(self.allocator) == (self.num_model_free(), len(holders), len(self.cached))
        for page in holders:
            assert self.allocator.is_shared(page) == (holders[page] > 1)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40)


class ReusesTheNewest(PageAllocator):
    def _take(self) -> int:
        return self._free.pop() if self._free else self._cached.popitem(last=True)[0]


class ReusesCachedFirst(PageAllocator):
    def _take(self) -> int:
        return self._cached.popitem(last=False)[0] if self._cached else self._free.pop()


class KeepsNothing(PageAllocator):
    def _drop(self, page: int, *, is_valid: bool) -> None:
        super()._drop(page, is_valid=False)


class ForgetsToCount(PageAllocator):
    def share(self, pages) -> None:
        super().share([page for page in pages if page not in self._holders])


class WritesInPlace(PageAllocator):
    def make_writable(self, pages: list[int], index: int) -> tuple[int, int] | None:
        return pages[index], pages[index]


class AllowsDoubleFree(PageAllocator):
    def free(self, pages, *, keep=frozenset()) -> None:
        super().free([page for page in dict.fromkeys(pages) if page in self._holders], keep=keep)


MUTANTS = [ReusesTheNewest, ReusesCachedFirst, KeepsNothing, ForgetsToCount, WritesInPlace, AllowsDoubleFree]


# pytest's "DID NOT RAISE" derives from BaseException.
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_catches_a_faulty_allocator(mutant: type[PageAllocator]):
    class FaultyBooks(Books):
        make = mutant

    search = settings(stateful_step_count=40, phases=[Phase.generate], derandomize=True, database=None)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(FaultyBooks, settings=search)
