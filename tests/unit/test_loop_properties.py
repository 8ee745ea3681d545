"""The invariants P1-P9 of the decode loop, without a device: random admissions, ends, cancels, failures and pauses.

The machine plays the tick in any order that the rules allow, which is more than the engine's own tick does, and plays
the device by drawing what each step sampled. What it drives is the real scheduler, pipeline, page pool, prefix cache
and book.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from photon_backend.config import Settings
from photon_backend.engine.book import Book
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline, Step, StepState
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.grammar.spatial import State
from photon_backend.model.config import ModelConfig, TextConfig, VisionConfig
from photon_backend.protocol import Cancel, Done, Failed, NeedPicture, Picture, Sampling, Submit, Tokens, unpacked

CONFIG = ModelConfig(
    text=TextConfig(vocab_size=64, max_context=48),
    vision=VisionConfig(crop_size=42, enc_patch_size=14),  # 9 patches: a prefix of 10 positions
)
SPECIAL = CONFIG.tokenizer
WORD = 20
CLIENTS = (b"c", b"\0d\0")  # an identity may begin and end with a zero
VALUES = {SPECIAL.coord_id: [0.5], SPECIAL.size_id: [0.5, 0.25]}  # what comes with an id


class Matcher:
    """A host grammar that only remembers how often it was used."""

    def __init__(self) -> None:
        self.masks = self.advanced = 0

    def advance(self, token: int) -> None:
        self.advanced += 1


class Loop(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(1, 4),
        pages=st.integers(10, 60),
        cached=st.booleans(),
        room=st.integers(1, 6),
        skips=st.booleans(),
    )
    def start(self, rows: int, pages: int, cached: bool, room: int, skips: bool) -> None:
        config = Settings(rows=rows, page_size=4, prefix_cache=cached, prefill_tokens=40, prefill_crops=3)
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(config, self.pool, self.cache)
        self.pipeline = Pipeline()
        self.released: list[Sequence] = []
        self.book = Book(CONFIG, room, self.scheduler, self.matcher_for, self.release, skips=skips)
        self.matchers: dict[str, Matcher] = {}
        self.requests: dict[str, Submit] = {}
        self.clients: dict[str, bytes] = {}
        self.answers: dict[str, list] = {}
        self.wanted: list[str] = []
        self.committed: list[int] = []
        self.last_kind = ""
        self.now = 0.0

    def matcher_for(self, request: Submit) -> Matcher | None:
        return self.matchers.get(request.request_id)

    def release(self, sequence: Sequence) -> None:
        assert sequence.finished and sequence.inflight == 0
        self.released.append(sequence)
        self.scheduler.release(sequence)

    def collect(self) -> None:
        for client, messages in self.book.drain():
            for message in unpacked(messages):
                assert client == self.clients[message.request_id]
                if isinstance(message, NeedPicture):
                    self.wanted.append(message.request_id)
                else:
                    assert not isinstance(message, Tokens) or message.values == VALUES.get(message.ids[0], [])
                    self.answers[message.request_id].append(message)

    # ---- the world

    @rule(
        task=st.sampled_from(["query", "point", "detect"]),
        picture=st.sampled_from([None, b"a" * 16, b"b" * 16]),
        words=st.integers(1, 12),
        tokens=st.integers(1, 8),
        reasoning=st.booleans(),
        constrained=st.booleans(),
        patience=st.sampled_from([0.0, 0.0, 3000.0]),
        client=st.sampled_from(CLIENTS),
    )
    def submit(self, task, picture, words, tokens, reasoning, constrained, patience, client) -> None:
        name = f"r{len(self.requests)}"
        reasoning = reasoning and task == "query"
        if constrained and task == "query" and not reasoning:
            self.matchers[name] = Matcher()
        request = Submit(
            name,
            task,
            [WORD] * words,
            picture,
            reasoning=reasoning,
            max_objects=tokens,
            max_time_ms=patience,
            sampling=Sampling(max_tokens=tokens),
        )
        self.requests[name], self.clients[name], self.answers[name] = request, client, []
        self.book.take(client, request, None, self.now)
        self.collect()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def bring_picture(self, data) -> None:
        name = self.wanted.pop(data.draw(st.integers(0, len(self.wanted) - 1)))
        self.bring(name)
        self.collect()

    def bring(self, name: str) -> None:
        self.book.take(self.clients[name], Picture(name, (1, 1)), np.zeros((2, 1)), self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "cancel", "gone", "late", "step_fails"]))
    def disturb(self, data, what: str) -> None:
        """One rule for all of these, or they would end every request before it has run."""
        if what == "cancel":
            name = data.draw(st.sampled_from(sorted(self.requests)))
            self.book.take(self.clients[name], Cancel(name), None, self.now)
        elif what == "gone":
            self.book.take(data.draw(st.sampled_from(CLIENTS)), None, None, self.now)
        elif what == "late":
            self.now += 4.0
            self.book.expire(self.now)
        elif self.can_commit:
            step = self.pipeline.commit_oldest()
            self.committed.append(step.index)
            self.book.fail_step(step, self.now)
            self.retire(step)
        self.collect()

    # ---- the loop

    @property
    def can_commit(self) -> bool:
        return len(self.pipeline) > 0 and self.pipeline.oldest.state is StepState.SAMPLED

    @rule(data=st.data(), turns=st.integers(1, 12))
    def run(self, data, turns: int) -> None:
        for _ in range(turns):
            choices = []
            if not self.pipeline.full and not self.pipeline.unsampled():
                choices.append(self.launch)
            if self.can_commit:
                choices.append(lambda: self.commit(data))
            if self.pipeline.unsampled() and self.pipeline.unsampled()[0] is self.pipeline.oldest:
                choices.append(lambda: self.sample(self.pipeline.oldest))
            data.draw(st.sampled_from(choices))()
            self.check()

    def launch(self) -> None:
        decodable = any(s.launchable and s.inflight < 2 for s in self.scheduler.running.values())
        plan = self.scheduler.plan(self.pipeline.next_index)
        if plan is not None:
            assert not (decodable and plan.kind == self.last_kind == "prefill"), "rows wait for two prefills"
            self.last_kind = plan.kind
            step = self.pipeline.launch(plan.kind, plan.sequences)
            step.entries = plan.entries
            self.book.launched(plan, self.now)
            if not any(s.matcher and s.inflight > 1 for s in step.sequences):
                self.sample(step)
        self.collect()

    def sample(self, step: Step) -> None:
        for sequence in step.sequences:
            if sequence.matcher is not None and not sequence.finished:
                # P4, and commit before finalize: a mask is asked for when every earlier token has been advanced
                assert sequence.matcher.advanced == sequence.matcher.masks == self.book.emitted(sequence)
                sequence.matcher.masks += 1
        self.pipeline.sampled(step, None)

    def commit(self, data) -> None:
        step = self.pipeline.commit_oldest()
        self.committed.append(step.index)
        zombies = {s.request.request_id: len(self.answers[s.request.request_id]) for s in step.sequences if s.finished}
        ids = [self.draw(sequence, data) for sequence in step.sequences]
        self.apply(step, ids)
        self.retire(step)
        assert all(len(self.answers[name]) == number for name, number in zombies.items()), "a zombie was emitted"

    def apply(self, step: Step, ids: list[int]) -> None:
        self.book.apply(step, np.array(ids), np.full((len(ids), 2), (0.5, 0.25), np.float32), self.now)

    def draw(self, sequence: Sequence, data) -> int:
        """What a device could have sampled for this row."""
        program, emitted = sequence.program, self.book.emitted(sequence)
        if program.start in (State.POINT_X, State.BOX_X):
            stride = 2 if program.start == State.POINT_X else 3
            if emitted % stride == 0 and data.draw(st.integers(0, 7)) == 0:
                return SPECIAL.eos_id
            return SPECIAL.size_id if emitted % stride == 2 else SPECIAL.coord_id
        if not sequence.answering and emitted >= program.think_limit:
            return SPECIAL.answer_id
        return data.draw(st.sampled_from([WORD] * 6 + [SPECIAL.eos_id, SPECIAL.answer_id]))

    def retire(self, step: Step) -> None:
        for sequence in self.pipeline.retire(step):
            self.release(sequence)
        self.collect()

    # ---- what always holds

    @invariant()
    def check(self) -> None:
        self.sequences_ride_in_at_most_two_steps()
        self.slots_belong_to_one_step()
        self.steps_commit_in_order()
        self.pages_are_counted()
        self.limits_make_no_zombies()
        self.one_end_per_request()

    def sequences_ride_in_at_most_two_steps(self) -> None:  # P4
        riding: dict[int, int] = {}
        for step in self.pipeline.steps:
            for sequence in step.sequences:
                riding[id(sequence)] = riding.get(id(sequence), 0) + 1
        for sequence in self.scheduler.running.values():
            assert sequence.inflight == riding.get(id(sequence), 0) <= 2
            assert not (sequence.finished and sequence.inflight == 0), "finished, landed, and not released"

    def slots_belong_to_one_step(self) -> None:  # P3
        slots = [step.slot for step in self.pipeline.steps]
        assert len(set(slots)) == len(slots) <= 2

    def steps_commit_in_order(self) -> None:  # P2
        assert self.committed == sorted(self.committed)

    def pages_are_counted(self) -> None:
        holders = [0] * self.pool.num_pages
        for pages in [s.pages for s in self.scheduler.running.values()] + [e.pages for e in self.cache.entries]:
            for page in pages:
                holders[page] += 1
        assert holders == [self.pool.count(page) for page in range(self.pool.num_pages)]
        shared = {page for e in self.cache.entries for page in e.full_pages}
        shared |= {page for s in self.scheduler.running.values() if s.entry for page in s.entry.full_pages}
        assert all(n <= 1 or page in shared for page, n in enumerate(holders)), "two rows write one page"

    def limits_make_no_zombies(self) -> None:  # P8
        for sequence in self.scheduler.running.values():
            assert sequence.planned <= sequence.limit
            if sequence.finished == "length":
                assert sequence.inflight == 0 or sequence.planned == self.book.emitted(sequence)

    def one_end_per_request(self) -> None:  # P7
        for messages in self.answers.values():
            ends = [i for i, m in enumerate(messages) if isinstance(m, Done | Failed)]
            assert len(ends) <= 1
            assert not ends or ends[0] == len(messages) - 1, "something came after the end"

    def teardown(self) -> None:
        """Whatever happened, everything is answered and everything comes back."""
        if not hasattr(self, "pool"):
            return
        for _ in range(500):
            while self.wanted:
                self.bring(self.wanted.pop())
            if not self.pipeline.full and not self.pipeline.unsampled():
                self.launch()
            for step in self.pipeline.unsampled():
                if step is self.pipeline.oldest:
                    self.sample(step)
            if not len(self.pipeline):
                if not self.scheduler.waiting:
                    break
                continue
            step = self.pipeline.commit_oldest()
            ids = [SPECIAL.eos_id if s.answering else SPECIAL.answer_id for s in step.sequences]
            ids = [SPECIAL.coord_id if self.forced(s) else token for s, token in zip(step.sequences, ids, strict=True)]
            self.apply(step, ids)
            self.retire(step)
        assert not len(self.pipeline) and not self.scheduler.waiting and not self.scheduler.running
        assert self.book.num_open == self.book.num_bringers == 0
        assert all(isinstance(messages[-1], Done | Failed) for messages in self.answers.values())
        for name, messages in self.answers.items():
            emitted = sum(isinstance(m, Tokens) for m in messages)
            if isinstance(messages[-1], Done):
                assert messages[-1].usage.output_tokens == emitted, name
        counts = self.book.status()
        assert counts.submitted == len(self.requests) == counts.done + counts.failed + counts.cancelled
        self.cache.clear()
        assert self.pool.num_used == 0

    def forced(self, sequence: Sequence) -> bool:
        """Whether an object is not complete, so that only a coordinate can follow."""
        stride = {State.POINT_X: 2, State.BOX_X: 3}.get(sequence.program.start, 1)
        return self.book.emitted(sequence) % stride != 0


Loop.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLoop = Loop.TestCase
