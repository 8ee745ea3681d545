"""How long running rows wait for a prefill: the cost that is learnt, and what the scheduler admits by it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_backend.config import Settings
from photon_backend.engine.intake import sequence_of
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline
from photon_backend.engine.prefill_cost import PrefillCost
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Plan, Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import ModelConfig, TextConfig, VisionConfig
from photon_backend.protocol import Sampling, Submit
from tests.unit.front_end_parts import fuzz
from tests.unit.scheduler_parts import commit_oldest

CONFIG = ModelConfig(
    text=TextConfig(vocab_size=64, max_context=256),
    vision=VisionConfig(crop_size=42, enc_patch_size=14),  # 9 patches: a prefix of 10 positions
)
ENOUGH = 400  # turns; more than any of these loads needs


class Loop:
    """The blocking loop over the real scheduler, with a device that takes what `true_ms` says."""

    def __init__(self, limit_ms: float, true_ms: tuple[float, float, float], **changes: int) -> None:
        config = Settings(page_size=4, max_decode_gap_ms=limit_ms, **changes)  # type: ignore[arg-type]
        pool = PagePool(2000)
        self.scheduler = Scheduler(config, pool, PrefixCache(pool))
        self.pipeline = Pipeline()
        self.true_ms = true_ms
        self.last_kind = "decode"
        self.added: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.plans: list[tuple[Plan, bool, float]] = []  # a prefill, whether rows waited for it, and the prediction

    def add(self, words: int, tokens: int, crops: int = 0, digest: int | None = None) -> None:
        name = None if not crops else (len(self.added) if digest is None else 1000 + digest).to_bytes(16, "little")
        submit = Submit(f"r{len(self.added)}", "query", [20] * words, name, sampling=Sampling(max_tokens=tokens))
        sequence = sequence_of(b"c", submit, CONFIG, 0.0)
        sequence.pixels = np.zeros((crops, 1)) if crops else None
        self.added.append(sequence)
        self.scheduler.add(sequence)

    def turn(self) -> bool:
        rows_wait = any(s.launchable for s in self.scheduler.running.values())
        due = self.scheduler.waiting and len(self.scheduler.running) < self.scheduler.settings.rows
        due = due and not (rows_wait and self.last_kind == "prefill")
        plan = self.scheduler.plan(self.pipeline.next_index)
        if plan is None:
            return False
        self.last_kind = plan.kind
        assert not due or plan.kind == "prefill", "somebody could have been admitted"
        if plan.kind == "prefill":
            self.plans.append((plan, rows_wait, self.scheduler.cost.predict(plan.num_crops, plan.num_tokens)))
            self.admitted += plan.sequences
        self.pipeline.sampled(self.pipeline.launch(plan.kind, plan.sequences), None)
        commit_oldest(self.pipeline, self.scheduler)
        if plan.kind == "prefill":
            fixed, crop, token = self.true_ms
            ms = fixed + crop * plan.num_crops + token * plan.num_tokens
            self.scheduler.cost.observe(plan.num_crops, plan.num_tokens, ms)
        return True


def test_nothing_measured_is_nothing_known() -> None:
    cost = PrefillCost()
    assert cost.predict(0, 1) == cost.predict(3, 30) == float("inf")
    cost.observe(0, 100, 4.0)
    assert cost.predict(0, 100) == pytest.approx(4.0)
    assert cost.predict(1, 100) == float("inf"), "no crop was ever measured"
    cost.observe(1, 100, 9.0)
    assert 4.0 < cost.predict(1, 100) < 9.01


@pytest.mark.parametrize("true", [(0.0, 1.5, 0.002), (1.0, 1.5, 0.002), (2.0, 4.0, 0.01), (0.5, 0.0, 0.05)])
def test_the_cost_is_learnt(true: tuple[float, float, float]) -> None:
    """From a mix like that of a server: cached and new pictures of all sizes, short and long prompts."""
    cost, chance = PrefillCost(), random.Random(0)

    def draw() -> tuple[int, int]:
        crops = chance.choice([0, 0, 2, 5, 9, 13, 26])
        return crops, 740 * bool(crops) + chance.randint(10, 900)

    def ms(crops: int, tokens: int) -> float:
        return true[0] + true[1] * crops + true[2] * tokens

    for _ in range(200):
        cost.observe(*(step := draw()), ms(*step) * chance.uniform(0.95, 1.05))
    errors = [abs(cost.predict(*(step := draw())) / ms(*step) - 1) for _ in range(100)]
    assert sorted(errors)[90] < 0.3


def test_a_slow_first_step_is_forgotten() -> None:
    cost = PrefillCost()
    cost.observe(9, 750, 5000.0)
    for _ in range(14):
        cost.observe(9, 750, 15.0)
    assert cost.predict(9, 750) == pytest.approx(15.0, rel=0.1)


@given(
    limit=st.sampled_from([0.0, 5.0, 20.0, 50.0, 1e9]),
    true=st.tuples(st.floats(0, 5), st.floats(0, 10), st.floats(0, 0.5)),
    arrivals=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.sampled_from([0, 0, 1, 2, 5]), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    rows=st.integers(1, 12),
)
@settings(fuzz, max_examples=200)
def test_the_bound_holds_and_nobody_starves(limit, true, arrivals, rows) -> None:
    """Whenever rows wait for a prefill of more than one sequence, it was predicted to fit; and all are admitted, in the
    order in which they came."""
    loop = Loop(limit, true, rows=rows)
    for number, (words, tokens, crops, turns) in enumerate(arrivals):
        loop.add(words, tokens, crops, digest=number % 5)
        for _ in range(turns):
            loop.turn()
    for _ in range(ENOUGH):
        if not loop.turn():
            break
    assert loop.admitted == loop.added
    for plan, rows_wait, predicted in loop.plans:
        assert len(plan.sequences) == 1 or not rows_wait or predicted <= limit


def test_as_many_as_fit() -> None:
    """Five rows run; ten pictures of 10 ms each come, with 35 ms to spare."""
    loop = Loop(35.0, (0.0, 5.0, 0.0))
    for _ in range(5):
        loop.add(8, 40)
    loop.add(8, 40, crops=2)
    while len(loop.plans) < 1 or loop.scheduler.waiting:
        loop.turn()
    for _ in range(10):
        loop.add(8, 4, crops=2)
    before = len(loop.plans)
    while loop.scheduler.waiting:
        loop.turn()
    assert [len(plan.sequences) for plan, _, _ in loop.plans[before:]] == [3, 3, 3, 1]
    assert all(rows_wait for _, rows_wait, _ in loop.plans[before:])


def test_alone_there_is_no_bound() -> None:
    loop = Loop(0.0, (0.0, 5.0, 0.0))
    for _ in range(5):
        loop.add(8, 4, crops=2)
    loop.turn()
    assert len(loop.admitted) == 5
