"""A recording of ticks: what the host and the device did when, on one clock. No torch here: supervisors import it too.

Host lanes are the phases of the tick; `wait` lies within `commit`, and `emit` comes before the launch of a prefill too.
Device lanes come from events that are recorded between the pieces of a step and read when the step is committed, so a
recording adds no wait to the tick but one: its start waits for the compute stream, to tie the two clocks. Price: some
10 us per tick while it is on, one comparison per phase while it is off. In a CUDA graph sampling is a part of the
forward, and shows there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from photon_backend.protocol import Failed, FromEngine, PhotonError, Record, Recorded, Span, unavailable

if TYPE_CHECKING:
    from photon_backend.engine.streams import Event, Stream

HOST_LANES = ("intake", "commit", "wait", "finalize", "launch", "emit")
DEVICE_LANES = ("prefill", "forward", "sampling", "copy")


class Trace:
    def __init__(self, stream: Stream) -> None:
        """`stream` is the compute stream."""
        self.on = False
        self.spans: list[Span] = []
        self._stream = stream

    def start(self) -> None:
        """Waits until the stream is idle. Not between the forward of a step and its sampling: the event that ties the
        clocks would take an error of that forward away from its step."""
        self._base = self._stream.record()
        self._base.wait()
        self._base_time = time.perf_counter()
        self.spans = []
        self.on = True

    def stop(self) -> list[Span]:
        """What was recorded, in the order in which it became known."""
        self.on = False
        spans, self.spans = self.spans, []
        return spans

    def host(self, lane: str, tick: int, begin: float, end: float) -> None:
        """Times of time.perf_counter."""
        self.spans.append(Span(lane, tick, begin, end))

    def device(self, lane: str, step: int, begin: Event, end: Event) -> None:
        """Both events have passed."""
        self.spans.append(Span(lane, step, self._time(begin), self._time(end)))

    def _time(self, event: Event) -> float:
        return self._base_time + event.ms_since(self._base) / 1e3


class Recorder:
    """The recording that a client asked for; one at a time, others are refused meanwhile. Engine thread only."""

    def __init__(self, trace: Trace, emit: Callable[[bytes, list[FromEngine]], None]) -> None:
        self.deadline = float("inf")  # seconds, monotonic
        self._trace = trace
        self._emit = emit
        self._asked: tuple[bytes, Record] | None = None
        self._ticks_left = 0

    def take(self, client: bytes, record: Record, now: float) -> None:
        if self._asked is not None:
            error = unavailable("another trace is being recorded", max(1, round(self.deadline - now)))
            self._emit(client, [Failed(record.request_id, error.code, error.message, refused=True)])
            return
        self._asked = client, record
        self._ticks_left = record.ticks
        self.deadline = now + record.seconds

    def start(self) -> bool:
        """Begins what was asked for, if anything; called when every launched step is sampled."""
        begins = self._asked is not None and not self._trace.on
        if begins:
            self._trace.start()
        return begins

    def end_of_tick(self) -> None:
        if self._asked is None:
            return
        self._ticks_left -= 1
        if self._ticks_left <= 0 or time.monotonic() >= self.deadline:
            self._answer(Recorded(self._asked[1].request_id, self._trace.stop()))

    def drop(self, client: bytes) -> None:
        """The client is gone, or was silent for so long that it counts as gone; then it will hear this."""
        if self._asked is not None and self._asked[0] == client:
            self.fail(unavailable("the trace's client was silent for too long", 5))

    def fail(self, error: PhotonError) -> None:
        if self._asked is not None:
            self._answer(Failed(self._asked[1].request_id, error.code, error.message))

    def _answer(self, message: FromEngine) -> None:
        assert self._asked is not None
        client = self._asked[0]
        self._forget()
        self._emit(client, [message])

    def _forget(self) -> None:
        self._trace.stop()
        self._asked, self.deadline = None, float("inf")


def chrome(recordings: dict[str, list[Span]]) -> dict[str, Any]:
    """Chrome's trace format, which Perfetto reads too, of recordings by title: two processes for each, host and device,
    a thread per lane. Times are microseconds from the begin of the recording."""
    events: list[dict[str, Any]] = []
    for index, (title, spans) in enumerate(recordings.items()):
        start = min((span.begin for span in spans), default=0.0)
        places: dict[str, dict[str, Any]] = {}
        for process, (name, lanes) in enumerate((("host", HOST_LANES), ("device", DEVICE_LANES)), 2 * index):
            events.append(_name("process", f"{title}: {name}", {"pid": process}))
            for thread, lane in enumerate(lanes):
                places[lane] = {"pid": process, "tid": thread}
                events.append(_name("thread", lane, places[lane]))
                events.append({"ph": "M", "name": "thread_sort_index", **places[lane], "args": {"sort_index": thread}})
        for span in sorted(spans, key=lambda span: span.begin):
            begin, end = (round(1e6 * (moment - start), 3) for moment in (span.begin, span.end))
            number = {"tick" if span.lane in HOST_LANES else "step": span.number}
            events.append(
                {
                    "ph": "X",
                    "name": span.lane,
                    **places[span.lane],
                    "ts": begin,
                    "dur": round(end - begin, 3),
                    "args": number,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(what: str, name: str, place: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
