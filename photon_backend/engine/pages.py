"""The pool of KV pages: reference counts, nothing else. Pure Python.

Invariants
- A page is free exactly when its count is zero; a free page is in the free list exactly once.
- A count is changed only here. Taking is all or nothing, so a caller never holds half of what it needs.

Price: one integer per page, a list pop and an addition per page and request. No per-token work: a request's pages are
taken once, at admission (see scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def count(self, page: int) -> int:
        return self._count[page]

    def take(self, number: int) -> list[int] | None:
        """`number` pages with a count of one each, or None (and nothing changed) when there are not so many."""
        if number > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(number)]
        for page in pages:
            self._count[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._count[page] > 0, f"page {page} is free"
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._count[page] > 0, f"page {page} released twice"
            self._count[page] -= 1
            if self._count[page] == 0:
                self._free.append(page)
