"""What the front ends count, on its way to the one thread that publishes it. No Triton here.

Every request that reaches a front end is started, and leaves it exactly once:

    started = ok + failed + cancelled + refused + running

    ok         an answer, whole or cut by a limit or its deadline      reason: stop, length, deadline
    cancelled  the client left or asked for it                         reason: cancelled
    failed     accepted, and then ended by an error                    reason: its code
    refused    never accepted: wrong, or too much at the moment        reason: its code

A `Tally` holds what happened since its last report. Reports are increments, so they add up over front ends that come
and go, and over restarts of the engine, whose own counters start again from 0.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq

from photon_backend.protocol import Done, ErrorCode, Failed, FinishReason, Tokens

Outcome = Literal["ok", "failed", "cancelled", "refused"]

ENDS: tuple[tuple[Outcome, str], ...] = (
    ("ok", "stop"),
    ("ok", "length"),
    ("ok", "deadline"),
    ("cancelled", "cancelled"),
    *(("failed", code) for code in get_args(ErrorCode)),
    *(("refused", code) for code in get_args(ErrorCode)),
)

_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_TIMES = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "queue": ("From a request's arrival at the engine to the launch of its prefill; answered requests", _TIMES),
    "preprocess": ("Work of the front end on a request: checks, prompt, picture; accepted requests", _TIMES),
    "ttft": ("From Triton's hand-over of a request to its first token at the front end", _TIMES),
    "inter_token": ("Between two tokens of one request at the front end", _TOKEN_TIMES),
    "e2e": ("From Triton's hand-over of a request to its last response; accepted requests", _TIMES),
}


class Histogram(msgspec.Struct):
    counts: list[int]  # one for each upper bound, and one for what is above them all
    sum: float = 0.0  # seconds


class Report(msgspec.Struct):
    """Increments. `running` is the change of the number of open requests."""

    started: int
    running: int
    responses: int
    tokens: int
    ended: dict[str, int]  # by "outcome/reason"
    times: dict[str, Histogram]  # by the keys of HISTOGRAMS


class Tally:
    """Of one front end; one thread."""

    def __init__(self) -> None:
        self._running = 0  # as last reported
        self._report = _empty()

    def start(self) -> None:
        self._report.started += 1

    def respond(self) -> None:
        self._report.responses += 1

    def end(self, outcome: Outcome, reason: str) -> None:
        key = f"{outcome}/{reason}"
        self._report.ended[key] = self._report.ended.get(key, 0) + 1

    def time(self, name: str, seconds: float, times: int = 1) -> None:
        """`seconds` of the histogram `name`, as if observed so many times."""
        histogram = self._report.times[name]
        histogram.counts[bisect_left(HISTOGRAMS[name][1], seconds)] += times
        histogram.sum += seconds * times

    def tokens(self, number: int) -> None:
        self._report.tokens += number

    def take(self, running: int) -> Report:
        """All since the last call. `running` is the number of open requests now."""
        report, self._report = self._report, _empty()
        report.running, self._running = running - self._running, running
        return report


class Account:
    """Of one accepted request. `arrival`: when Triton handed it over, monotonic seconds."""

    def __init__(self, tally: Tally, arrival: float) -> None:
        self._tally = tally
        self._arrival = arrival
        self._last_token = 0.0  # when it came; 0: none has
        self._refused = False  # by the engine

    def take(self, events: Sequence[Tokens | Done | Failed]) -> None:
        """What came from the engine at once; at least one event."""
        now = time.monotonic()
        number = sum(len(event.ids) for event in events if isinstance(event, Tokens))
        if number:
            self._tally.tokens(number)
            if not self._last_token:
                self._tally.time("ttft", now - self._arrival)
                number, self._last_token = number - 1, now
            if number:
                self._tally.time("inter_token", (now - self._last_token) / number, number)
            self._last_token = now
        match events[-1]:
            case Done(usage=usage):
                self._tally.time("queue", usage.queue_ms / 1000)
            case Failed(refused=refused):
                self._refused = refused

    def close(self, error: ErrorCode | None, finish_reason: FinishReason | None, preprocess_ms: float) -> None:
        """The last response was sent: with an error, or with a finish reason."""
        if self._refused:
            self._tally.end("refused", str(error))
            return
        if error is not None:
            self._tally.end("failed", error)
        else:
            self._tally.end("cancelled" if finish_reason == "cancelled" else "ok", str(finish_reason))
        self._tally.time("preprocess", preprocess_ms / 1000)
        self._tally.time("e2e", time.monotonic() - self._arrival)


def _empty() -> Report:
    times = {name: Histogram([0] * (len(bounds) + 1)) for name, (_, bounds) in HISTOGRAMS.items()}
    return Report(0, 0, 0, 0, {}, times)


def _address(run_dir: str) -> str:
    return f"ipc://{Path(run_dir) / 'numbers.sock'}"


class Sender:
    """Sends reports. One that nobody is there to hear is kept for the next call; what was on its way to a publisher
    that ended is lost with it."""

    def __init__(self, run_dir: str) -> None:
        self._report: bytes | None = None  # taken and not yet sent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.immediate = True
        self._socket.reconnect_ivl = 50
        self._socket.connect(_address(run_dir))

    def send(self, tally: Tally, running: int) -> None:
        """Never blocks, never raises: the publisher may go at any moment, and a poll before would not help."""
        if self._is_sent():
            self._report = msgspec.msgpack.encode(tally.take(running))
            self._is_sent()

    def _is_sent(self) -> bool:
        """Whether no report waits any longer."""
        if self._report is not None:
            try:
                self._socket.send(self._report, zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._report = None
        return True

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


class Receiver:
    """Bound by the publisher. Raises zmq.ZMQError when another one is."""

    def __init__(self, run_dir: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(_address(run_dir))

    def receive(self) -> list[Report]:
        """All that has come."""
        reports = []
        while self._socket.poll(0):
            reports.append(msgspec.msgpack.decode(self._socket.recv(), type=Report))
        return reports

    def close(self) -> None:
        self._context.destroy(linger=0)
