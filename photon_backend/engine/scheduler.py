"""Who runs next: rows, admission, and the choice between prefill and decode. Pure Python.

Invariants
- A sequence is admitted with every page it can ever need, so a running sequence never waits for memory and no rule can
  deadlock. Price: pages for tokens that are never produced stay idle until the request ends.
- First come, first admitted among those that are ready (no picture, its prefix cached, or its pixels here). One that
  waits for its pixels, its grammar or, one step long, a prefix that the step before it writes holds up nobody; one that
  waits for pages or a row holds up all behind it, so none starves.
- Prefill and decode take turns: a prefill step is never followed by another while rows can decode. And such a prefill
  step takes only so many sequences as are predicted to fit into `max_decode_gap_ms`, but always one: an image prefix
  cannot be split, so a single larger one exceeds it. What did not fit is first in line for the next prefill step.
- A row belongs to one sequence from admission to release, zombies included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from photon_backend.config import Settings
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import NUM_SLOTS, StepKind
from photon_backend.engine.prefill_cost import PrefillCost
from photon_backend.engine.prefix_cache import PrefixCache, PrefixEntry
from photon_backend.engine.sequence import Sequence


@dataclass(eq=False)
class Admission:
    """What the prefill of one sequence has to do with pages."""

    sequence: Sequence
    computes_prefix: bool  # False: hit, or no picture
    load_tail: tuple[int, int] | None = None  # (page, page): copy the entry's tail to the row before the forward
    save_tail: tuple[int, int] | None = None  # (page, page): copy the row's tail to the entry after the forward


@dataclass(eq=False)
class Plan:
    kind: StepKind
    sequences: list[Sequence]
    admissions: list[Admission]
    entries: list[PrefixEntry]
    num_crops: int = 0  # encoded in it
    num_tokens: int = 0  # positions that it computes, of a prefill


class Scheduler:
    def __init__(self, settings: Settings, pool: PagePool, cache: PrefixCache) -> None:
        self.settings = settings
        self.pool = pool
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}  # by row
        self._free_rows = list(range(settings.rows - 1, -1, -1))
        self.cost = PrefillCost()
        self._last_kind: StepKind = "decode"

    def pages_of(self, sequence: Sequence) -> int:
        """Pages for all positions that may be written: the last token is never fed back."""
        return -(-(sequence.prompt_len + sequence.limit - 1) // self.settings.page_size)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes out a sequence that was never admitted."""
        self.waiting.remove(sequence)
        sequence.pixels = None

    def ready(self, sequence: Sequence) -> bool:
        return sequence.request.digest is None or sequence.pixels is not None or self._cached(sequence) is not None

    def plan(self, step_index: int) -> Plan | None:
        """The next step, or None when nothing can be launched. Prefills are admitted here, with row and pages."""
        decodable = [s for s in self.running.values() if s.launchable and s.inflight < NUM_SLOTS]
        if not (decodable and self._last_kind == "prefill"):
            prefill = self._admit(step_index, self.settings.max_decode_gap_ms if decodable else float("inf"))
            if prefill is not None:
                self._last_kind = "prefill"
                return prefill
        if decodable:
            self._last_kind = "decode"
            return Plan("decode", decodable, [], [])
        return None

    def obstacle(self) -> str:
        """Why `plan` has just found nothing, see protocol.ALONE."""
        if not self.waiting:
            return "nothing_to_launch"
        return "no_room" if any(self._ready_in_order()) else "not_ready"

    def release(self, sequence: Sequence) -> list[int]:
        """Gives back the row and the pages of a finished sequence; returns the pages that are free now."""
        assert sequence.finished and sequence.inflight == 0 and self.running.get(sequence.row) is sequence
        del self.running[sequence.row]
        self._free_rows.append(sequence.row)
        pages, sequence.pages = sequence.pages, []
        self.pool.release(pages)
        return [page for page in pages if self.pool.count(page) == 0]

    def _shares(self, sequence: Sequence) -> bool:
        """Whether its prefix comes from the cache or goes there. Not when it needs the whole pool: beside the tail page
        of an entry it would wait for ever."""
        wanted = sequence.request.digest is not None and self.settings.prefix_cache
        return wanted and self.pages_of(sequence) < self.pool.num_pages

    def _cached(self, sequence: Sequence) -> PrefixEntry | None:
        digest = sequence.request.digest
        entry = self.cache.get(digest) if digest is not None else None
        return entry if entry is not None and self._shares(sequence) else None  # asked of all that wait, in every tick

    def _admit(self, step_index: int, limit_ms: float) -> Plan | None:
        """A prefill step that is predicted to take at most `limit_ms`, or one with a single sequence."""
        admissions: list[Admission] = []
        tokens = crops = 0
        for sequence in self._ready_in_order():
            if not self._free_rows:
                break
            entry = self._cached(sequence)
            if entry is not None and entry.launched_by == step_index:
                continue  # the prefix that it shares is written by this very step: it is readable by the next
            more_crops, more_tokens = _work(sequence, entry)
            if admissions and self.cost.predict(crops + more_crops, tokens + more_tokens) > limit_ms:
                break
            admission = self._take(sequence, entry, step_index)
            if admission is None:
                break
            admissions.append(admission)
            tokens += more_tokens
            crops += more_crops
            if tokens >= self.settings.prefill_tokens or crops >= self.settings.prefill_crops:
                break
        if not admissions:
            return None
        admitted = [a.sequence for a in admissions]
        gone = {id(sequence) for sequence in admitted}
        self.waiting = [s for s in self.waiting if id(s) not in gone]
        entries = [a.sequence.entry for a in admissions if a.computes_prefix and a.sequence.entry]
        return Plan("prefill", admitted, admissions, entries, crops, tokens)

    def _ready_in_order(self) -> Iterator[Sequence]:
        return (s for s in self.waiting if self.ready(s) and not s.compiling)

    def _take(self, sequence: Sequence, entry: PrefixEntry | None, step_index: int) -> Admission | None:
        """Row and pages for one sequence, or None when there are not enough even after eviction."""
        size = self.settings.page_size
        total = self.pages_of(sequence)
        num_full, rest = divmod(sequence.prefix_len, size)
        stores = entry is None and self._shares(sequence)
        need = total - num_full if entry else total + (1 if stores and rest else 0)
        keep = entry.digest if entry else None
        if self.pool.num_free < need:
            if self.pool.num_free + self.cache.evictable_pages(step_index, keep) < need:
                return None
            self.cache.evict(need, step_index, keep)
        pages = self.pool.take(need)
        assert pages is not None
        sequence.row = self._free_rows.pop()
        self.running[sequence.row] = sequence
        if entry:
            return self._hit(sequence, entry, pages)
        return self._miss(sequence, pages, step_index if stores else None, num_full, rest)

    def _hit(self, sequence: Sequence, entry: PrefixEntry, own: list[int]) -> Admission:
        self.cache.use(entry)
        sequence.entry = entry
        sequence.pages = entry.full_pages + own
        sequence.cached_len = sequence.prefix_len
        load = (entry.tail_page[0], own[0]) if entry.tail_page else None
        return Admission(sequence, computes_prefix=False, load_tail=load)

    def _miss(
        self, sequence: Sequence, pages: list[int], step_index: int | None, num_full: int, rest: int
    ) -> Admission:
        sequence.pages = pages
        admission = Admission(sequence, computes_prefix=sequence.prefix_len > 0)
        digest = sequence.request.digest
        if step_index is not None and digest is not None:
            tail = [pages.pop()] if rest else []
            sequence.entry = PrefixEntry(digest, pages[:num_full], tail, step_index)
            self.cache.insert(sequence.entry)
            if tail:
                admission.save_tail = (pages[num_full], tail[0])
        return admission


def _work(sequence: Sequence, entry: PrefixEntry | None) -> tuple[int, int]:
    """(crops, tokens) that its prefill computes; `entry`: where its prefix is cached."""
    if entry is not None:
        return 0, sequence.prompt_len - sequence.prefix_len
    pixels = sequence.pixels
    return len(pixels) if sequence.prefix_len and pixels is not None else 0, sequence.prompt_len
