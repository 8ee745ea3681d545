"""Random loads on engines that are too small for them: who waits is overtaken only where the rules say so, and all end.

No device: the real scheduler, pipeline, page pool, prefix cache and book, with tokens, failures and cancels drawn.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from photon_backend.config import Settings
from photon_backend.engine.book import Book
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Plan, Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import ModelConfig, TextConfig, VisionConfig
from photon_backend.protocol import Cancel, Done, Failed, NeedPicture, Picture, Sampling, Submit

CONFIG = ModelConfig(
    text=TextConfig(vocab_size=64, max_context=48),
    vision=VisionConfig(crop_size=42, enc_patch_size=14),  # 9 patches: a prefix of 10 positions
)
WORD = 20
ENOUGH = 400  # turns without new requests; more than any of these loads needs


class Traffic:
    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.rows = chance.randint(1, 5)
        settings = Settings(
            rows=self.rows, page_size=chance.choice([4, 5, 16]), prefill_tokens=chance.choice([16, 60, 200]),
            prefill_crops=chance.choice([2, 4, 20]), max_decode_gap_ms=chance.choice([0.0, 10.0]),
        )  # fmt: skip
        self.pool = PagePool(chance.randint(1, 14))  # what can never fit is refused
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(settings, self.pool, self.cache)
        self.pipeline = Pipeline()
        self.book = Book(CONFIG, 40, self.scheduler, lambda request: None, self.scheduler.release)
        self.wanted: list[str] = []
        self.ended: dict[str, bool] = {}  # by request, of all

    def collect(self) -> None:
        for _, messages in self.book.drain():
            for message in messages:
                if isinstance(message, NeedPicture):
                    self.wanted.append(message.request_id)
                elif isinstance(message, Done | Failed):
                    assert not self.ended[message.request_id]
                    self.ended[message.request_id] = True

    def submit(self) -> None:
        name, chance = f"r{len(self.ended)}", self.chance
        self.ended[name] = False
        picture = chance.choice([None, *(bytes([i]) * 16 for i in range(3))])
        sampling = Sampling(max_tokens=chance.randint(1, 8))
        self.take(Submit(name, "query", [WORD] * chance.randint(1, 12), picture, sampling=sampling))

    def take(self, message: Submit | Cancel | Picture, pixels: np.ndarray | None = None) -> None:
        self.book.take(b"c", message, pixels, 0.0)
        self.collect()

    def turn(self, arrivals: float) -> None:
        chance = self.chance
        if chance.random() < arrivals:
            self.submit()
        if chance.random() < 0.04:
            self.take(Cancel(chance.choice(list(self.ended) or ["none"])))
        if self.wanted and chance.random() < 0.5:
            name = self.wanted.pop(chance.randrange(len(self.wanted)))
            self.take(Picture(name, (1, 1)), np.zeros((2, 1)))
        if self.pipeline.full:
            self.commit()
        if not self.launch() and len(self.pipeline):
            self.commit()
        self.collect()

    def launch(self) -> bool:
        waited = [s for s in self.scheduler.waiting if self.scheduler.ready(s)]
        plan = self.scheduler.plan(self.pipeline.next_index)
        if plan is None:
            return False
        if plan.kind == "prefill":
            self.nobody_is_overtaken(waited, plan)
            self.no_page_is_written_twice(plan)
        step = self.pipeline.launch(plan.kind, plan.sequences)
        step.entries = plan.entries
        self.book.launched(plan, 0.0)
        self.pipeline.sampled(step, None)
        if plan.kind == "prefill":
            self.scheduler.cost.observe(plan.num_crops, plan.num_tokens, 3.0 * len(plan.sequences))
        return True

    def nobody_is_overtaken(self, waited: list[Sequence], plan: Plan) -> None:
        """But one whose prefix this very step writes, or whose prefix had to make room for one before it."""
        written = {entry.digest for entry in plan.entries}
        still = [s for s in waited if s.row < 0 and s.request.digest not in written and self.scheduler.ready(s)]
        last = max(waited.index(s) for s in plan.sequences)
        assert all(waited.index(s) > last for s in still)

    def no_page_is_written_twice(self, plan: Plan) -> None:
        written = [a.save_tail[1] for a in plan.admissions if a.save_tail]
        for admission in plan.admissions:
            shared = admission.sequence.cached_len // self.scheduler.settings.page_size
            written += admission.sequence.pages[shared:]
        assert len(set(written)) == len(written)

    def commit(self) -> None:
        step = self.pipeline.commit_oldest()
        if self.chance.random() < 0.05:
            self.book.fail_step(step, 0.0)
        else:
            ids = [self.chance.choice([WORD] * 5 + [CONFIG.tokenizer.eos_id]) for _ in step.sequences]
            self.book.apply(step, np.array(ids), np.zeros((len(ids), 2), np.float32), 0.0)
        for sequence in self.pipeline.retire(step):
            self.scheduler.release(sequence)


@pytest.mark.parametrize("seed", range(80))
def test_all_end(seed: int) -> None:
    traffic = Traffic(seed)
    arrivals = traffic.chance.choice([0.2, 0.5, 1.0])
    for _ in range(150):
        traffic.turn(arrivals)
    for _ in range(ENOUGH):
        traffic.turn(0.0)
    assert all(traffic.ended.values()), [name for name, ended in traffic.ended.items() if not ended]
    assert not traffic.scheduler.running and len(traffic.scheduler._free_rows) == traffic.rows
    traffic.cache.clear()
    assert traffic.pool.num_used == 0
