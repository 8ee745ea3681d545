"""What a commit sends: one message for each client, whatever the number of rows, and the same as token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from photon_backend.config import Settings
from photon_backend.engine.book import Book
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.protocol import (
    REQUEST_ID_BYTES,
    Done,
    Failed,
    FinishReason,
    FromEngine,
    Sampling,
    Submit,
    Task,
    Tokens,
    unpacked,
)

CONFIG = ModelConfig(text=TextConfig(vocab_size=64, max_context=2048))
SPECIAL = CONFIG.tokenizer
WORD = 20


class Rig:
    """Rows without a device: what a step samples is what a test says."""

    def __init__(self, rows: int, skips: bool = True) -> None:
        pool = PagePool(rows * 200)
        self.scheduler = Scheduler(
            Settings(rows=rows, max_waiting=rows, prefill_tokens=1 << 20), pool, PrefixCache(pool)
        )
        self.pipeline = Pipeline()
        self.book = Book(CONFIG, rows, self.scheduler, lambda request: None, self.scheduler.release, skips=skips)

    def submit(
        self, client: bytes, request_id: str, task: Task = "query", tokens: int = 1000, reasoning: bool = False
    ) -> None:
        request = Submit(request_id, task, [WORD], reasoning=reasoning, sampling=Sampling(max_tokens=tokens))
        self.book.take(client, request, None, 0.0)

    def step(self, ids: dict[str, int] | int) -> list[tuple[bytes, list[FromEngine]]]:
        """One step, in which each row samples its token; what it brings."""
        plan = self.scheduler.plan(self.pipeline.next_index)
        assert plan is not None
        step = self.pipeline.launch(plan.kind, plan.sequences)
        self.book.launched(plan, 0.0)
        self.pipeline.sampled(step, None)
        names = [s.request.request_id for s in step.sequences]
        sampled = np.array([ids[name] if isinstance(ids, dict) else ids for name in names])
        values = np.full((len(names), 2), (0.5, 0.25), np.float32)
        self.book.apply(self.pipeline.commit_oldest(), sampled, values, 1.0)
        for sequence in self.pipeline.retire(step):
            self.scheduler.release(sequence)
        return self.book.drain()


@pytest.mark.parametrize("rows", [2, 200])
def test_a_step_makes_one_message_for_each_client_and_looks_at_no_token(rows: int) -> None:
    rig, clients = Rig(rows), (b"\0a\0", b"\0a")
    for row in range(rows):
        rig.submit(clients[row % 2], f"r{row}")
    looks, look = [], rig.book._look

    def noting(sequence: Sequence, token: int, now: float) -> FinishReason | None:
        looks.append(sequence.request.request_id)
        return look(sequence, token, now)

    rig.book._look = noting  # type: ignore[method-assign]
    rig.step(WORD)
    assert looks == [f"r{row}" for row in range(rows)], "the first token of each"
    for _ in range(20):
        outbox = rig.step(WORD)
        assert [client for client, _ in outbox] == list(clients)
        ids = [[token.request_id for token in unpacked(messages)] for _, messages in outbox]  # type: ignore[union-attr]
        assert ids == [[f"r{row}" for row in range(rows) if row % 2 == client] for client in (0, 1)]
        assert all(len(messages) == 1 for _, messages in outbox)
    assert len(looks) == rows


def conversation(rig: Rig) -> Iterator[tuple[bytes, object]]:
    """Text, reasoning, boxes and one that ends by its limit, from two clients. Yields (client, event)."""
    rig.submit(b"a", "text")
    rig.submit(b"b", "short", tokens=3)
    rig.submit(b"a", "thinks", reasoning=True)
    rig.submit(b"b", "boxes", task="detect")
    coord, size, answer, eos = SPECIAL.coord_id, SPECIAL.size_id, SPECIAL.answer_id, SPECIAL.eos_id
    for text, thinks, boxes in [
        (WORD, WORD, coord),
        (coord, coord, coord),  # a coord id of an answer brings nothing
        (WORD, answer, size),
        (WORD, coord, coord),  # nor one after the reasoning
        (eos, WORD, coord),
        (WORD, WORD, size),
        (WORD, eos, eos),
    ]:
        ids = {"text": text, "short": WORD, "thinks": thinks, "boxes": boxes}
        yield from ((client, event) for client, messages in rig.step(ids) for event in unpacked(messages))


@pytest.mark.parametrize("skips", [False, True])
def test_what_is_told(skips: bool) -> None:
    told: dict[str, list[object]] = {"text": [], "short": [], "thinks": [], "boxes": []}
    for client, event in conversation(Rig(4, skips)):
        assert isinstance(event, Tokens | Done | Failed)
        assert client == (b"a" if event.request_id in ("text", "thinks") else b"b")
        values = event.values if isinstance(event, Tokens) else []
        told[event.request_id].append((event.ids[0], *values) if isinstance(event, Tokens) else event.reason)
    coord, size, answer = SPECIAL.coord_id, SPECIAL.size_id, SPECIAL.answer_id
    assert told == {
        "text": [(WORD,), (coord,), (WORD,), (WORD,), "stop"],
        "short": [(WORD,), (WORD,), (WORD,), "length"],
        "thinks": [(WORD,), (coord, 0.5), (answer,), (coord,), (WORD,), (WORD,), "stop"],
        "boxes": [(coord, 0.5), (coord, 0.5), (size, 0.5, 0.25)] * 2 + ["stop"],
    }


@pytest.mark.parametrize("request_id", ["", "x" * (REQUEST_ID_BYTES + 1), "é", "a\0", "a\n"])
def test_a_name_that_a_step_cannot_carry_is_refused(request_id: str) -> None:
    rig = Rig(1)
    rig.submit(b"c", request_id)
    ((_, (refusal,)),) = rig.book.drain()
    assert isinstance(refusal, Failed) and refusal.code == "INVALID_ARG" and "request_id" in refusal.message


def test_a_client_that_is_gone_leaves_nothing() -> None:
    rig = Rig(2)
    for number in range(3):
        rig.submit(b"%d" % number, "r")
        rig.step(WORD)
        rig.book.take(b"%d" % number, None, None, 0.0)
    assert not rig.book.num_open and not rig.book._ledger._number
