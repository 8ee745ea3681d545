"""The book of open requests: what came in, what is owed, what goes out. Pure Python, engine thread only.

Invariants
- P7: a request is in `_open` from its Submit to its one Done or Failed, and `_end` is the only way out.
- A picture is asked for once per prefix, from the request that will bring it (`_bringer`). When that one goes away, or
  the prefix was evicted before others could use it, the next one that needs it is asked.
- `_deadlines` holds open requests only: a client may set one of a day, and an ended request must not stay that long.
- Only a request that is not finished gets tokens; a zombie's tokens are dropped here.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from photon_backend.engine.constraints import Constraints
from photon_backend.engine.intake import sequence_of
from photon_backend.engine.ledger import ALWAYS, Ledger
from photon_backend.engine.pipeline import Step
from photon_backend.engine.scheduler import Plan, Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import ModelConfig
from photon_backend.protocol import (
    Cancel,
    Done,
    ErrorCode,
    Failed,
    FinishReason,
    FromEngine,
    NeedPicture,
    PhotonError,
    Picture,
    Status,
    Stop,
    Submit,
    ToEngine,
    Usage,
    unavailable,
)

log = logging.getLogger("photon.engine")

MatcherFor = Callable[[Submit], Any]


class Book:
    def __init__(
        self,
        config: ModelConfig,
        max_waiting: int,
        scheduler: Scheduler,
        matcher_for: MatcherFor,
        release: Callable[[Sequence], None],
        constraints: Constraints | None = None,
        skips: bool = True,
    ) -> None:
        """`release(sequence)` gives back row and pages of a finished sequence that is in flight nowhere.

        `constraints` compiles grammars; without it no request may have one. `skips`: only those tokens are looked at on
        their own on which something depends, see ledger.py; the answers are the same without.
        """
        self._skips = skips
        self._ledger = Ledger(scheduler.settings.rows, config.text.vocab_size, config.tokenizer)
        self._constraints = constraints
        self._config, self._max_waiting, self._scheduler = config, max_waiting, scheduler
        self._matcher_for, self._release = matcher_for, release
        self._open: dict[tuple[bytes, str], Sequence] = {}
        self._bringer: dict[object, Sequence] = {}
        self._outbox: dict[bytes, list[FromEngine]] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # the next one first
        self._order = count()
        self._drops_seen = 0
        self._counts = Status()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_bringers(self) -> int:
        return len(self._bringer)

    # ---- in

    def take(self, client: bytes, message: ToEngine | None, pixels: np.ndarray | None, now: float) -> None:
        """One message of a client, or None when the client is gone."""
        if isinstance(message, Submit):
            self._submit(client, message, now)
        elif isinstance(message, Picture):
            self._picture(client, message, pixels)
        elif isinstance(message, Cancel):
            sequence = self._open.get((client, message.request_id))
            if sequence is not None:
                self._end(sequence, "cancelled", now)
        elif isinstance(message, Stop):
            for sequence in [s for s in self._open.values() if s.request.name == message.name != ""]:
                self._end(sequence, "cancelled", now)
        elif message is None:
            for sequence in [s for s in self._open.values() if s.client == client]:
                self._end(sequence, "cancelled", now)
            self._ledger.forget(client)

    def _submit(self, client: bytes, request: Submit, now: float) -> None:
        if (client, request.request_id) in self._open:
            log.error(
                "request %r of client %r was submitted twice; the second one is ignored", request.request_id, client
            )
            return
        self._counts.submitted += 1
        try:
            sequence = self._admissible(client, request, now)
        except PhotonError as error:
            self._counts.failed += 1
            self._send(client, Failed(request.request_id, error.code, error.message, refused=True))
            return
        self._open[client, request.request_id] = sequence
        self._scheduler.add(sequence)
        if sequence.deadline < float("inf"):
            insort(self._deadlines, (sequence.deadline, next(self._order), sequence))
        self._ask(sequence)
        if request.grammar is not None and self._constraints is not None:
            self._constraints.start(sequence)

    def _admissible(self, client: bytes, request: Submit, now: float) -> Sequence:
        if len(self._scheduler.waiting) >= self._max_waiting:
            raise unavailable(f"{self._max_waiting} requests are waiting already", 1)
        sequence = sequence_of(client, request, self._config, now)
        pages, size = self._scheduler.pages_of(sequence), self._scheduler.settings.page_size
        if pages > self._scheduler.pool.num_pages:
            raise PhotonError(
                "INVALID_ARG",
                f"max_tokens: prompt and answer need {pages * size} positions and this engine holds "
                f"{self._scheduler.pool.num_pages * size}",
            )
        sequence.matcher = self._matcher_for(request)
        return sequence

    def _picture(self, client: bytes, message: Picture, pixels: np.ndarray | None) -> None:
        sequence = self._open.get((client, message.request_id))
        if sequence is not None and sequence.row < 0:  # else it was cancelled, or admitted on a prefix of somebody else
            sequence.pixels, sequence.tiling = pixels, message.tiling

    # ---- pictures

    def _key(self, sequence: Sequence) -> object:
        """What a bringer brings: a prefix for all, or without a cache one for itself."""
        return sequence.request.digest if self._scheduler.settings.prefix_cache else id(sequence)

    def _ask(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        if not self._scheduler.ready(sequence) and key not in self._bringer:
            self._bringer[key] = sequence
            self._send(sequence.client, NeedPicture(sequence.request.request_id))

    def _ask_all(self) -> None:
        for sequence in self._scheduler.waiting:
            self._ask(sequence)

    def _brings_no_more(self, sequence: Sequence) -> None:
        if self._bringer.get(self._key(sequence)) is sequence:
            del self._bringer[self._key(sequence)]
            self._ask_all()

    # ---- steps

    def launched(self, plan: Plan, now: float) -> None:
        for admission in plan.admissions:
            sequence = admission.sequence
            sequence.launch_time = now
            sequence.pixels = None
            self._ledger.begin(sequence)
            self._brings_no_more(sequence)

    def apply(self, step: Step, ids: np.ndarray, values: np.ndarray, now: float) -> None:
        """Commits the tokens of a step: ids int64 [B], values float32 [B, 2], in the order of its sequences."""
        rows = np.array([sequence.row for sequence in step.sequences])
        looked_at = self._ledger.looked_at(rows, ids) if self._skips else np.ones(len(rows), bool)
        ends: list[tuple[Sequence, FinishReason]] = []
        if np.count_nonzero(looked_at):
            emits = np.ones(len(rows), bool)
            for i in looked_at.nonzero()[0].tolist():
                sequence = step.sequences[i]
                reason = None if sequence.finished else self._look(sequence, int(ids[i]), now)
                emits[i] = not sequence.finished and reason != "stop"
                if reason is not None:
                    ends.append((sequence, reason))
            rows, ids, values = rows[emits], ids[emits], values[emits]
        if len(rows):
            self._counts.tokens += len(rows)
            for client, message in self._ledger.emit(rows, ids, values):
                self._send(client, message)
        for sequence, reason in ends:
            self._end(sequence, reason, now)

    def _look(self, sequence: Sequence, token: int, now: float) -> FinishReason | None:
        """What a token that is about to be emitted changes about its request. Returns the reason when it ends here:
        `stop` is that of eos, which is not emitted."""
        special, ledger, row = self._config.tokenizer, self._ledger, sequence.row
        if sequence.answering and token == special.eos_id:
            return "stop"
        if sequence.matcher is not None and sequence.answering:
            sequence.matcher.advance(token)
        emitted = self.emitted(sequence) + 1
        if emitted == 1:
            sequence.first_token_time = now
        if not sequence.answering and token == special.answer_id:
            sequence.answering = True
            sequence.limit = min(sequence.limit, emitted + sequence.program.answer_limit)
        ledger.carries[row] = sequence.request.task in ("detect", "point") or not sequence.answering
        ledger.look_from[row] = ALWAYS if sequence.matcher is not None else sequence.limit - 1
        return "length" if emitted == sequence.limit else None

    def emitted(self, sequence: Sequence) -> int:
        """Tokens committed and handed to the client, of a request that waits or holds its row."""
        return int(self._ledger.emitted[sequence.row]) if sequence.row >= 0 else 0

    # ---- ends

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end(self._deadlines[0][2], "deadline", now)

    def next_deadline(self) -> float:
        """Monotonic seconds, or infinity."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def fail_step(self, step: Step, now: float) -> None:
        """Fails the sequences of a step that raised, and those that read a prefix which it should have computed."""
        for entry in step.entries:
            self._scheduler.cache.drop(entry)
        readers = [s for s in self._scheduler.running.values() if s.entry in step.entries]
        for sequence in {id(s): s for s in step.sequences + readers}.values():
            if not sequence.finished:
                self.fail(sequence, "INTERNAL", "the engine failed on this request; its log says why", now)

    def fail_all(self, code: ErrorCode, message: str, now: float) -> None:
        for sequence in list(self._open.values()):
            self.fail(sequence, code, message, now)

    def fail(self, sequence: Sequence, code: ErrorCode, message: str, now: float) -> None:
        self._end(sequence, "failed", now, Failed(sequence.request.request_id, code, message))

    def _end(self, sequence: Sequence, reason: FinishReason | str, now: float, failed: Failed | None = None) -> None:
        """The one way out of the book."""
        del self._open[sequence.client, sequence.request.request_id]
        if sequence.deadline < float("inf"):
            self._deadlines = [entry for entry in self._deadlines if entry[2] is not sequence]
        sequence.finished = reason
        self._counts.failed += reason == "failed"
        self._counts.cancelled += reason == "cancelled"
        self._counts.done += reason not in ("failed", "cancelled")
        usage = _usage(sequence, self.emitted(sequence), now)
        self._send(sequence.client, failed or Done(sequence.request.request_id, reason, usage))  # type: ignore[arg-type]
        if sequence.row < 0:
            self._scheduler.withdraw(sequence)
            self._brings_no_more(sequence)
            if self._constraints is not None:
                self._constraints.release(sequence)
        else:
            self._ledger.look_from[sequence.row] = ALWAYS
            if sequence.inflight == 0:
                self._release(sequence)

    # ---- out

    def drain(self) -> list[tuple[bytes, list[FromEngine]]]:
        """Everything to send, by client, in order."""
        if self._drops_seen != self._scheduler.cache.num_dropped:  # a prefix that somebody waited to share may be gone
            self._drops_seen = self._scheduler.cache.num_dropped
            self._ask_all()
        outbox, self._outbox = self._outbox, {}
        return list(outbox.items())

    def status(self) -> Status:
        """The counters, as a new record."""
        counts = self._counts
        return Status(
            submitted=counts.submitted,
            done=counts.done,
            failed=counts.failed,
            cancelled=counts.cancelled,
            tokens=counts.tokens,
        )

    def _send(self, client: bytes, message: FromEngine) -> None:
        self._outbox.setdefault(client, []).append(message)


def _usage(sequence: Sequence, emitted: int, now: float) -> Usage:
    launched = sequence.launch_time or now
    first = sequence.first_token_time
    return Usage(
        input_tokens=sequence.prompt_len,
        cached_tokens=sequence.cached_len,
        output_tokens=emitted,
        queue_ms=(launched - sequence.arrival) * 1e3,
        ttft_ms=(first - sequence.arrival) * 1e3 if first else 0.0,
        decode_ms=(now - first) * 1e3 if first else 0.0,
    )
