"""A recording of ticks: what the host and the device did when, on one clock.

Host lanes come from the engine thread; device lanes from the events that every step has anyway, read when the step is
committed, so recording adds no wait to the tick. Price: some microseconds per tick while a trace is on, one comparison
while it is off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from photon_backend.engine.streams import Event, Stream


@dataclass(frozen=True)
class Span:
    lane: str  # host | device | copy
    name: str
    begin: float  # seconds on the host's monotonic clock (time.perf_counter)
    end: float


class Trace:
    def __init__(self, stream: Stream) -> None:
        """Ties the device's clock to the host's: waits until the stream is idle, once."""
        self._base = stream.record()
        self._base.wait()
        self._base_time = time.perf_counter()
        self.spans: list[Span] = []

    def host(self, name: str, begin: float, end: float) -> None:
        self.spans.append(Span("host", name, begin, end))

    def device(self, lane: str, name: str, begin: Event, end: Event) -> None:
        """Both events have passed."""
        self.spans.append(Span(lane, name, self._time(begin), self._time(end)))

    def _time(self, event: Event) -> float:
        return self._base_time + event.ms_since(self._base) / 1e3


def chrome(traces: dict[str, Trace]) -> dict[str, Any]:
    """Chrome's trace format, which Perfetto reads too: a process per trace, a thread per lane, times from 0."""
    events: list[dict[str, Any]] = []
    for process, (title, trace) in enumerate(traces.items()):
        start = min(span.begin for span in trace.spans)
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        lanes = sorted({span.lane for span in trace.spans}, reverse=True)
        for thread, lane in enumerate(lanes):
            name = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
            events.append(name)
        for span in trace.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": process,
                    "tid": lanes.index(span.lane),
                    "ts": round(1e6 * (span.begin - start), 3),
                    "dur": round(1e6 * (span.end - span.begin), 3),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
