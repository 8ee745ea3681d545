from __future__ import annotations

import pytest

from photon_backend.engine.pages import PagePool
from photon_backend.engine.prefix_cache import PrefixCache, PrefixEntry


def test_taking_is_all_or_nothing():
    pool = PagePool(4)
    assert pool.take(5) is None
    assert pool.num_free == 4
    pages = pool.take(4)
    assert pages is not None and sorted(pages) == [0, 1, 2, 3]
    assert pool.take(1) is None


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2)
    (page,) = pool.take(1) or []
    pool.retain([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2


def test_releasing_twice_is_an_error():
    pool = PagePool(2)
    pages = pool.take(1) or []
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def entry_of(pool: PagePool, cache: PrefixCache, digest: bytes, full: int = 2) -> PrefixEntry:
    """An entry whose row has let go already."""
    pages = pool.take(full + 1) or []
    entry = PrefixEntry(digest, pages[:full], pages[full:], 0)
    cache.insert(entry)
    pool.release(entry.full_pages)
    return entry


def test_eviction_spares_what_is_in_use_and_takes_the_oldest():
    pool = PagePool(9)
    cache = PrefixCache(pool)
    first, second, third = (entry_of(pool, cache, bytes([i])) for i in range(3))
    cache.use(first)  # a row holds it
    assert cache.evictable_pages(1) == 6
    cache.evict(3, 1)
    assert cache.get(second.digest) is None
    assert cache.get(first.digest) is first and cache.get(third.digest) is third
    cache.evict(9, 1)
    assert len(cache) == 1
    pool.release(first.full_pages)
    cache.evict(9, 1)
    assert pool.num_free == 9


def test_a_dropped_entry_leaves_its_row_the_pages():
    pool = PagePool(3)
    cache = PrefixCache(pool)
    entry = entry_of(pool, cache, b"a")
    cache.use(entry)
    cache.drop(entry)
    cache.drop(entry)
    assert pool.num_free == 1
    pool.release(entry.full_pages)
    assert pool.num_free == 3


def test_the_entry_to_be_used_next_is_kept():
    pool = PagePool(6)
    cache = PrefixCache(pool)
    kept, other = entry_of(pool, cache, b"a"), entry_of(pool, cache, b"b")
    assert cache.evictable_pages(1, keep=kept.digest) == 3
    cache.evict(6, 1, keep=kept.digest)
    assert cache.get(kept.digest) is kept and cache.get(other.digest) is None
