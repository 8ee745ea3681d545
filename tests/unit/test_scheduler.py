"""Prefill and decode take turns, and who goes first among those that wait. No device: rows are only planned."""

from __future__ import annotations

from typing import Any

import numpy as np

from photon_backend.config import Settings
from photon_backend.engine.intake import sequence_of
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import ModelConfig, TextConfig, VisionConfig
from photon_backend.protocol import Sampling, Submit
from tests.unit.scheduler_parts import commit_oldest

CONFIG = ModelConfig(
    text=TextConfig(vocab_size=64, max_context=48),
    vision=VisionConfig(crop_size=42, enc_patch_size=14),  # 9 patches: a prefix of 10 positions
)


class Bench:
    """A scheduler whose steps are launched, and committed when there is no slot."""

    def __init__(self, pages: int = 100, **settings: Any) -> None:
        pool = PagePool(pages)
        self.scheduler = Scheduler(Settings(page_size=4, **settings), pool, PrefixCache(pool))
        self.pipeline = Pipeline()

    def add(self, name: str, words: int = 8, tokens: int = 8, picture: bytes | None = None) -> Sequence:
        request = Submit(name, "query", [20] * words, picture, sampling=Sampling(max_tokens=tokens))
        sequence = sequence_of(b"c", request, CONFIG, 0.0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[str, list[str]] | None:
        """Kind and requests of the next step, as soon as there is one; None when there never will be."""
        if self.pipeline.full:
            commit_oldest(self.pipeline, self.scheduler)
        while (plan := self.scheduler.plan(self.pipeline.next_index)) is None and len(self.pipeline):
            commit_oldest(self.pipeline, self.scheduler)
        if plan is None:
            return None
        self.pipeline.sampled(self.pipeline.launch(plan.kind, plan.sequences), None)
        return plan.kind, [sequence.request.request_id for sequence in plan.sequences]


def test_prefill_and_decode_take_turns() -> None:
    bench = Bench(prefill_tokens=8)  # one prompt a step
    for name in "abc":
        bench.add(name)
    steps = [bench.step() for _ in range(6)]
    assert steps == [
        ("prefill", ["a"]),
        ("decode", ["a"]),
        ("prefill", ["b"]),
        ("decode", ["a", "b"]),
        ("prefill", ["c"]),
        ("decode", ["a", "b", "c"]),
    ]


def test_prefills_follow_each_other_while_no_row_can_decode() -> None:
    """An answer of one token ends with its prefill."""
    bench = Bench(prefill_tokens=8)
    for name in "abc":
        bench.add(name, tokens=1)
    assert [bench.step() for _ in range(4)] == [("prefill", ["a"]), ("prefill", ["b"]), ("prefill", ["c"]), None]


def test_one_that_waits_for_pages_holds_up_all_behind_it() -> None:
    """Or a stream of small ones would starve it."""
    bench = Bench(pages=8)
    bench.add("small", words=8, tokens=9)  # 4 pages
    assert bench.step() == ("prefill", ["small"])
    bench.add("large", words=20, tokens=5)  # 6
    bench.add("tiny", words=1, tokens=1)  # 1
    assert [bench.step() for _ in range(8)] == [("decode", ["small"])] * 8
    assert bench.step() == ("prefill", ["large", "tiny"])


def test_one_that_waits_for_its_picture_holds_up_nobody() -> None:
    bench = Bench()
    waiting = bench.add("picture", picture=b"p" * 16)
    bench.add("words")
    assert bench.step() == ("prefill", ["words"])
    waiting.pixels = np.zeros((2, 1))
    assert [bench.step() for _ in range(2)] == [("decode", ["words"]), ("prefill", ["picture"])]


def test_a_shared_prefix_is_read_by_the_step_after_the_one_that_writes_it() -> None:
    bench = Bench()
    first, second = bench.add("first", picture=b"p" * 16), bench.add("second", picture=b"p" * 16)
    first.pixels = second.pixels = np.zeros((2, 1))
    assert [bench.step() for _ in range(3)] == [("prefill", ["first"]), ("decode", ["first"]), ("prefill", ["second"])]
    assert (first.cached_len, second.cached_len) == (0, 10)


def test_one_whose_prefix_is_being_written_holds_up_nobody() -> None:
    """Three pictures, two questions each: a step for the pictures, one for the others."""
    bench = Bench()
    bench.scheduler.cost.observe(2, 18, 1.0)  # or a step beside rows that decode takes one
    for name in ("a1", "a2", "b1", "b2", "c1", "c2"):
        bench.add(name, picture=name[0].encode() * 16).pixels = np.zeros((2, 1))
    assert bench.step() == ("prefill", ["a1", "b1", "c1"])
    assert bench.step() == ("decode", ["a1", "b1", "c1"])
    assert bench.step() == ("prefill", ["a2", "b2", "c2"])
