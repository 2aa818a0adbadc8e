"""Who holds which page: the host's books of one cache group's pool.

Knows no tokens, hashes or arrays, and imports no JAX: it counts the holders of page ids.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence, Set


class PageAllocator:
    """Counts the holders of the pages `[0, num_pages)`; each page is in one of three states.

        free    nobody holds it and its contents are void
        held    by as many sequences as its count says
        cached  nobody holds it, but its contents stay valid, and `share` takes it back by id

    Free pages are handed out first, then cached ones, least recently used first. Which pages come depends
    on the calls alone. A call that raises or returns None has changed nothing.

        pages = allocator.allocate(3)         # a new sequence, or None: make room first
        allocator.share(pages)                # its fork
        allocator.make_writable(pages, -1)    # (2, 3): copy page 2 to page 3 on the device
        allocator.free(pages)                 # the end of a sequence
    """

    def __init__(self, num_pages: int):
        """Start with all pages free.

        Raises:
            ValueError: `num_pages` is not a positive int.
        """
        if type(num_pages) is not int or num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, as an int, got {num_pages!r}")
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))  # a stack: its last page is handed out first
        self._holders: dict[int, int] = {}  # held page -> its count, at least 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages whose contents are void. `num_free + num_held + num_cached` is `num_pages`."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold; one with several holders counts once."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose contents are valid until they are handed out again."""
        return len(self._cached)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return `num_pages` pages with one holder each, or None when free and cached pages are too few.

        Their contents are void, also where a page was cached: whoever finds pages by their contents must
        forget those that are handed out.

        Raises:
            ValueError: `num_pages` is not an int of at least 0.
        """
        if type(num_pages) is not int or num_pages < 0:
            raise ValueError(f"num_pages must be an int of at least 0, got {num_pages!r}")
        if num_pages > self.num_free + self.num_cached:
            return None
        pages = [self._take() for _ in range(num_pages)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def _take(self) -> int:
        return self._free.pop() if self._free else self._cached.popitem(last=False)[0]

    def share(self, pages: Sequence[int]) -> None:
        """Add one holder to each of `pages`, held or cached: a fork, or a prefix that was found.

        Raises:
            ValueError: an id is not a page's, or a page is free.
        """
        self._require_ids(pages)
        if void := [page for page in pages if page not in self._holders and page not in self._cached]:
            raise ValueError(f"only held or cached pages can be shared, got free pages {void}")
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def _require_ids(self, pages: Sequence[int]) -> None:
        # Booleans and NumPy's integers are refused: they equal an id, but would travel on as themselves.
        if wrong := [page for page in pages if type(page) is not int or not 0 <= page < self.num_pages]:
            raise ValueError(f"page ids must be ints in [0, {self.num_pages}), got {wrong}")

    def free(self, pages: Sequence[int], *, keep: Set[int] = frozenset()) -> None:
        """Drop one holder of each of `pages`; a page without holders becomes cached if in `keep`, else free.

        Cached pages count as used from the last to the first, so that a sequence's end is reused before its
        beginning: nothing can share what follows a prefix without the prefix.

        Raises:
            ValueError: an id is not a page's, or a page has fewer holders than times it is named.
        """
        self._require_ids(pages)
        excess = [page for page, times in Counter(pages).items() if times > self._holders.get(page, 0)]
        if excess:
            raise ValueError(
                f"a page can be freed once per holder, got pages {excess} that have fewer holders"
            )
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._drop(page, is_valid=page in keep)

    def _drop(self, page: int, *, is_valid: bool) -> None:
        del self._holders[page]
        if is_valid:
            self._cached[page] = None
        else:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Tell whether `page` has several holders, so that a holder must copy it before writing.

        Raises:
            ValueError: the id is not a page's, or nobody holds the page.
        """
        self._require_ids([page])
        if page not in self._holders:
            raise ValueError(f"only a held page can be written, got page {page} that nobody holds")
        return self._holders[page] > 1

    def make_writable(self, pages: list[int], index: int) -> tuple[int, int] | None:
        """Give a sequence a page of its own at `pages[index]`, in place, and return (source, destination).

        Where they differ the caller copies source to destination on the device, before any other write:
        the source may by then have one holder, who writes to it. They are equal where the page has no
        other holder. None when a copy is needed and no page is left.

        Raises:
            ValueError: `pages[index]` is not a page's id, or nobody holds the page.
        """
        source = pages[index]
        if self.is_shared(source):
            if (copy := self.allocate(1)) is None:
                return None
            self.free([source])
            pages[index] = copy[0]
        return source, pages[index]

    def check(self) -> None:
        """Assert that each page is in one state, so that the numbers add up, and that counts are positive."""
        states = Counter([*self._free, *self._holders, *self._cached])
        pages = Counter(range(self.num_pages))
        wrong = list((states - pages) | (pages - states))
        assert not wrong, f"pages {wrong} must be in exactly one state"
        unheld = [page for page, count in self._holders.items() if count < 1]
        assert not unheld, f"held pages {unheld} must have a holder"
