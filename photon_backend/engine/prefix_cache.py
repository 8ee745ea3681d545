"""Cached image prefixes, by digest. Pure Python.

An image prefix (BOS and one embedding per patch) is bidirectional: it is computed whole or not at all. An entry holds
the pages that the prefix fills completely, shared read-only with every row that uses it, and one *tail page* with the
rest. A row writes its prompt right behind the prefix, so it cannot share the tail: it gets a copy on its own page.

Invariants
- An entry holds one reference on each of its pages for as long as it is in the cache; rows hold their own.
- An entry appears when the step that computes it is launched. Stream order makes it readable by any later step, never
  by the same one (`launched_by`), so two requests with one new image share one prefill.
- Only an entry whose pages nobody else holds is evicted, least recently used first: evicting another frees nothing. And
  none in the step that writes it, which fills the tail page last, over whatever a new owner had put there.

Price: one tail page per entry, and a copy of that page per hit, which is small beside the prefill that it saves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from photon_backend.engine.pages import PagePool


@dataclass(eq=False)
class PrefixEntry:
    digest: bytes
    full_pages: list[int]
    tail_page: list[int]  # one page, or none when the prefix ends on a page border
    launched_by: int  # index of the step that computes it

    @property
    def pages(self) -> list[int]:
        return self.full_pages + self.tail_page


class PrefixCache:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self.hits = 0
        self.misses = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[PrefixEntry]:
        return list(self._entries.values())

    def get(self, digest: bytes) -> PrefixEntry | None:
        return self._entries.get(digest)

    def use(self, entry: PrefixEntry) -> None:
        """Marks the entry as used now and lends its full pages to a row, which releases them itself."""
        self._entries.move_to_end(entry.digest)
        self._pool.retain(entry.full_pages)
        self.hits += 1

    def insert(self, entry: PrefixEntry) -> None:
        """Takes over the reference that the caller holds on the tail page and adds one of its own to the full pages."""
        assert entry.digest not in self._entries
        self._pool.retain(entry.full_pages)
        self._entries[entry.digest] = entry
        self.misses += 1

    def drop(self, entry: PrefixEntry) -> None:
        """Forgets an entry, used or not: its rows keep their own references."""
        if self._entries.get(entry.digest) is entry:
            del self._entries[entry.digest]
            self.num_dropped += 1
            self._pool.release(entry.pages)

    def evictable_pages(self, step_index: int, keep: bytes | None = None) -> int:
        return sum(len(e.pages) for e in self._evictable(step_index, keep))

    def evict(self, number: int, step_index: int, keep: bytes | None = None) -> None:
        """For a step: evicts idle entries, oldest first and never `keep`, until `number` pages are free or no more can
        be."""
        for entry in self._evictable(step_index, keep):
            if self._pool.num_free >= number:
                return
            self.drop(entry)

    def clear(self) -> None:
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _evictable(self, step_index: int, keep: bytes | None) -> list[PrefixEntry]:
        others = [e for e in self._entries.values() if e.digest != keep and e.launched_by != step_index]
        return [e for e in others if all(self._pool.count(page) == 1 for page in e.pages)]
