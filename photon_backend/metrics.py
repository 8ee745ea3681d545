"""Metrics of the engine for Triton's /metrics, published by the supervisor. Imported in a stub only.

One thread does it: Triton crashes when two threads touch one metric, and each update costs 40 to 130 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

PERIOD_S = 1.0

# name of the field in `status`: description
COUNTERS = {
    "submitted": "Requests that reached the engine",
    "done": "Requests that ended by themselves",
    "failed": "Requests that ended with an error",
    "cancelled": "Requests that were cancelled or whose deadline passed",
    "tokens": "Tokens generated",
    "prefix_hits": "Pictures whose prefix was cached",
    "prefix_misses": "Pictures that had to be encoded",
    "steps": "Steps launched",
    "steps_overlapped": "Steps launched while another one was uncommitted",
    "restarts": "Restarts of the engine process",
}
GAUGES = {
    "running": "Requests that have a row",
    "waiting": "Requests that wait for a row",
    "rows_in_use": "Rows taken, zombies included",
    "rows": "Rows",
    "pages_in_use": "KV pages taken",
    "pages": "KV pages",
    "zombies": "Rows that are computed but not emitted",
    "prefix_entries": "Pictures in the prefix cache",
    "up": "1 while the engine answers",
}


class Publisher:
    """Publishes `status()` every second until `close`."""

    def __init__(self, engine: int, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status
        self._last: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._families: list[Any] = []  # a metric dies with its family
        self._metrics: dict[str, Any] = {}
        for names, kind, suffix in (
            (COUNTERS, pb_utils.MetricFamily.COUNTER, "_total"),
            (GAUGES, pb_utils.MetricFamily.GAUGE, ""),
        ):
            for name, description in names.items():
                family = pb_utils.MetricFamily(name=f"photon_{name}{suffix}", description=description, kind=kind)
                self._families.append(family)
                self._metrics[name] = family.Metric(labels={"engine": str(engine)})
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics")
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            self._publish(self._status())

    def _publish(self, status: dict[str, Any]) -> None:
        for name in GAUGES:
            self._metrics[name].set(float(status[name]))
        for name in COUNTERS:
            value, last = status[name], self._last[name]
            grown = value - last if value >= last else value  # a new engine process counts from 0
            if grown:
                self._metrics[name].increment(float(grown))
            self._last[name] = value
