"""Traces that clients of photon_engine wait for: asked for at any supervisor, recorded by the engine they name.

Nothing here waits. Every ask is answered once: with the recording, or with an error when the engine is down, dies
meanwhile, records another trace already, or when the server stops.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count

import msgspec

from photon_backend import draining
from photon_backend.config import Settings
from photon_backend.engine.trace import chrome
from photon_backend.frontend.link import EnginePeer
from photon_backend.protocol import (
    MAX_TRACE_S,
    MAX_TRACE_TICKS,
    Failed,
    Heard,
    PhotonError,
    Record,
    Recorded,
    unavailable,
)

Answer = Callable[[bytes | PhotonError], None]  # gets a document in Chrome's trace format as JSON, or why there is none
STOPPING = unavailable("the server is stopping", 5)

log = logging.getLogger("photon.supervisor")


class Recordings:
    """`ask` may be called on any thread, the rest belongs to the supervisor's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: deque[tuple[int, Record, Answer]] = deque()
        self._open: dict[str, tuple[int, Answer]] = {}  # by request_id: engine, and who waits
        self._names = count()

    @property
    def num_open(self) -> int:
        return len(self._asked) + len(self._open)

    def ask(self, engine: int, ticks: int, seconds: float, answer: Answer) -> None:
        """`answer` is called once, here or on the supervisor's thread; what it raises is logged.

        Raises PhotonError INVALID_ARG naming the argument that does not fit.
        """
        if not 0 <= engine < self._settings.engines:
            raise PhotonError("INVALID_ARG", f"engine must be below {self._settings.engines}, got {engine}")
        if not 1 <= ticks <= MAX_TRACE_TICKS:
            raise PhotonError("INVALID_ARG", f"ticks must be 1 to {MAX_TRACE_TICKS}, got {ticks}")
        if not 0 < seconds <= MAX_TRACE_S:
            raise PhotonError("INVALID_ARG", f"seconds must be above 0 and at most {MAX_TRACE_S:g}, got {seconds:g}")
        self._asked.append((engine, Record(f"trace-{next(self._names)}", ticks, seconds), answer))

    def receive(self, peer: EnginePeer, messages: list[Heard]) -> None:
        """What an engine said."""
        for message in messages:
            if isinstance(message, Recorded | Failed) and message.request_id in self._open:
                self._end(message.request_id, _outcome(peer, message))

    def turn(self, peers: list[EnginePeer], lost: list[EnginePeer]) -> None:
        """Sends what was asked for; answers for engines that are gone, and everybody when the server drains."""
        if (self._asked or self._open) and draining.marked(self._settings.run_dir):
            self._fail_all()
        gone = {peer.index for peer in lost}
        for name in [name for name, (engine, _) in self._open.items() if engine in gone]:
            self._end(name, unavailable("the engine ended while the trace was recorded", 5))
        while self._asked:
            engine, record, answer = self._asked.popleft()
            self._open[record.request_id] = engine, answer
            peer = next(peer for peer in peers if peer.index == engine)
            if peer.up:
                peer.send([record])
            else:
                self._end(record.request_id, unavailable(f"engine {engine} is not up", 5))

    def _fail_all(self) -> None:
        while self._asked:
            engine, record, answer = self._asked.popleft()
            self._open[record.request_id] = engine, answer
        for name in list(self._open):
            self._end(name, STOPPING)

    def _end(self, name: str, outcome: bytes | PhotonError) -> None:
        _, answer = self._open.pop(name)
        try:
            answer(outcome)
        except Exception:  # of Triton's binding
            log.exception("a trace could not be answered")


def _outcome(peer: EnginePeer, message: Recorded | Failed) -> bytes | PhotonError:
    if isinstance(message, Failed):
        return PhotonError(message.code, message.message)
    try:
        return msgspec.json.encode(chrome({f"engine {peer.index}": message.spans}))
    except Exception:
        log.exception("a trace could not be written")
        return PhotonError("INTERNAL", "the trace could not be written; the server's log says why")
