"""What cache a batch needs, and the host's books of which row holds which of its pages.

Knows sizes and page ids; imports no JAX and touches no device.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jkv.cache.allocator import PageAllocator
from jkv.cache.spec import CacheSpec
from jkv.decode.batch import round_capacity

NumPages = int | Literal["auto"] | None


@dataclass(frozen=True)
class CachePlan:
    """The sizes of a batch's cache.

    Attributes:
        spec: groups, codecs and the page size.
        num_sequences: rows of the batch.
        capacity: tokens that a sequence may hold.
        num_pages: pages of each group's pool, in each shard of the sequences and of their pages; None where
            every sequence owns its pages.
        needed_pages: pages that all sequences take at once, counted as `num_pages`.
        num_shards: parts that the mesh splits the sequences into.
    """

    spec: CacheSpec
    num_sequences: int
    capacity: int
    num_pages: tuple[int, ...] | None
    needed_pages: tuple[int, ...]
    num_shards: int

    @property
    def pool_pages(self) -> tuple[int, ...]:
        """Pages of each group's pool in all shards; none where every sequence owns its pages."""
        return tuple(self.num_shards * self.spec.num_stripes * pages for pages in self.num_pages or ())

    @property
    def nbytes(self) -> int:
        """Bytes of the pools."""
        if self.num_pages is None:
            return self.spec.num_stripes * self.spec.dense_bytes(self.num_sequences, self.capacity)
        pages = [self.num_shards * count for count in self.num_pages]
        return self.spec.num_stripes * self.spec.paged_bytes(self.num_sequences, pages)

    def require_room(self) -> None:
        """Refuse a pool that cannot hold all sequences at once, where none can wait.

        Raises:
            ValueError: names the pages needed and there.
        """
        for needed, there in zip(self.needed_pages, self.num_pages or self.needed_pages, strict=True):
            if needed > there:
                raise ValueError(
                    f"the {self.num_sequences} sequences need {needed} pages at once, got a pool of {there}; "
                    "raise num_pages, or shorten them"
                )


def plan_cache(
    spec: CacheSpec,
    prompts: Mapping[int, int],
    max_new_tokens: int,
    *,
    capacity: int | None = None,
    num_pages: NumPages = None,
    num_shards: int = 1,
) -> CachePlan:
    """Return the sizes of the cache for prompts and their continuations.

    Args:
        spec: groups, codecs and the page size.
        prompts: how many prompts there are of each length.
        max_new_tokens: that may follow each prompt.
        capacity: tokens that a sequence may hold; None is the least that serves.
        num_pages: pages of each group's pool, in each shard; no group gets more than its tables can name.
            "auto" is what all prompts take at once; None gives every sequence pages of its own.
        num_shards: parts that the mesh splits the sequences into.

    Raises:
        ValueError: the longest prompt and its new tokens do not fit in `capacity` or in the pool.
    """
    # The last new token is never written: nothing follows that would attend to it.
    lengths = {length + max_new_tokens - 1: count for length, count in prompts.items()}
    longest, num_sequences = max(lengths), sum(lengths.values())
    asked = f"a prompt of {max(prompts)} tokens and {max_new_tokens} new ones"
    if capacity is None:
        capacity = round_capacity(longest, spec.page_size)
    elif longest > capacity:
        raise ValueError(
            f"{asked} need a capacity of {longest} tokens, got {capacity}; shorten them or raise the capacity"
        )
    rows = -(-num_sequences // num_shards)
    needed, pools = [], []
    for group in range(len(spec.groups)):
        total = sum(count * spec.stripe_pages(length, group) for length, count in lengths.items())
        # Of several shards any may have the longest.
        needed.append(min(total, rows * spec.stripe_pages(longest, group)))
        most = rows * spec.stripe_pages(capacity, group)
        pools.append(needed[-1] if num_pages in (None, "auto") else min(int(num_pages), most))
        if (least := spec.stripe_pages(longest, group)) > pools[-1]:
            raise ValueError(
                f"{asked} need {least} pages of {spec.page_size} tokens, got a pool of {pools[-1]}; shorten "
                "them or raise num_pages"
            )
    return CachePlan(
        spec=spec,
        num_sequences=num_sequences,
        capacity=capacity,
        num_pages=None if num_pages is None else tuple(pools),
        needed_pages=tuple(needed),
        num_shards=num_shards,
    )


class PageBooks:
    """The pages that each row of a batch holds, in every cache group.

    A row that starts is promised pages for all that it may come to hold and takes them as it grows, so that
    what has started can end. Pages go round the stripes, each of which has a pool of its own.

        books.start(0)           # True: there is room for all of row 0
        books.extend(0, 40)      # pages for its prompt
        books.extend(0, 1)       # for one more token
        books.end(0)             # its pages are free again

    Attributes:
        plan: sizes of the cache.
        peaks: the most pages that rows have held at once, in each group.
    """

    def __init__(self, plan: CachePlan, limits: Sequence[int]):
        """Start with all pages free.

        Args:
            plan: of a cache with a pool.
            limits: tokens that each row may come to hold.
        """
        assert plan.num_pages is not None
        self.plan = plan
        self.peaks = [0] * len(plan.num_pages)
        self._limits = list(limits)
        self._lengths: dict[int, int] = {}  # started row -> tokens that it has pages for
        self._allocators = [
            [[PageAllocator(n) for _ in range(plan.spec.num_stripes)] for _ in range(plan.num_shards)]
            for n in plan.num_pages
        ]
        self._pages: list[list[list[int]]] = [[[] for _ in limits] for _ in plan.num_pages]
        self._most = [[0] * len(plan.num_pages) for _ in limits]

    def start(self, row: int) -> bool:
        """Promise a row its pages; False, and nothing has changed, where others hold or await them."""
        others = [other for other in self._lengths if self._shard(other) == self._shard(row)]
        for group, num_pages in enumerate(self.plan.num_pages or ()):
            if self._promised(group, [*others, row]) > num_pages:
                return False
        self._lengths[row] = 0
        return True

    def extend(self, row: int, num_tokens: int) -> bool:
        """Give a started row pages for more tokens, up to its limit; returns whether it took any."""
        self._lengths[row] = min(self._lengths[row] + num_tokens, self._limits[row])
        has_taken = False
        for group, shards in enumerate(self._allocators):
            held, stripes = self._pages[group][row], shards[self._shard(row)]
            pages = range(len(held), self.plan.spec.pages_for(self._lengths[row], group))
            for page in pages:
                fresh = stripes[page % len(stripes)].allocate(1)
                assert fresh is not None, "a started row's pages were promised to it"
                held += fresh
            has_taken |= len(pages) > 0
            self._most[row][group] = len(held)
            num_held = sum(allocator.num_held for each in shards for allocator in each)
            self.peaks[group] = max(self.peaks[group], num_held)
        return has_taken

    def end(self, row: int) -> None:
        """Take a row's pages and promises back; a row that has none stays as it is."""
        if self._lengths.pop(row, None) is None:
            return
        for pages, shards in zip(self._pages, self._allocators, strict=True):
            for stripe, allocator in enumerate(shards[self._shard(row)]):
                allocator.free(pages[row][stripe :: self.plan.spec.num_stripes])
            pages[row] = []

    def tables(self) -> list[np.ndarray]:
        """Return each group's page table, int32 `[seq, max_pages]`; -1 is no page."""
        tables = []
        for group, rows in enumerate(self._pages):
            width = self.plan.spec.table_width(self.plan.capacity, group)
            table = np.full((len(rows), width), -1, np.int32)
            for row, pages in enumerate(rows):
                table[row, : len(pages)] = pages
            tables.append(table)
        return tables

    def row_bytes(self, row: int) -> int:
        """Return the bytes of the most pages that a row has held."""
        return self.plan.spec.paged_bytes(1, self._most[row])

    def check(self) -> None:
        """Assert that each held page is in one row, and that what is promised is there."""
        num_stripes = self.plan.spec.num_stripes
        for group, shards in enumerate(self._allocators):
            for (shard, stripes), stripe in itertools.product(enumerate(shards), range(num_stripes)):
                allocator = stripes[stripe]
                allocator.check()
                rows = [row for row in range(len(self._limits)) if self._shard(row) == shard]
                held = [page for row in rows for page in self._pages[group][row][stripe::num_stripes]]
                assert len(set(held)) == len(held) == allocator.num_held, f"pages {held} must be held once"
                started = [row for row in rows if row in self._lengths]
                assert len(held) <= self._promised(group, started) <= allocator.num_pages

    def _promised(self, group: int, rows: Sequence[int]) -> int:
        """Return the pages promised to rows in the stripe that has most of them."""
        return sum(self.plan.spec.stripe_pages(self._limits[row], group) for row in rows)

    def _shard(self, row: int) -> int:
        return row * self.plan.num_shards // len(self._limits)
