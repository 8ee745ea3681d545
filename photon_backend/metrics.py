"""Metrics for Triton's /metrics, published by the supervisors. Imported in a stub only.

One thread of each supervisor does it: Triton crashes when two threads touch one metric, and each update costs 40 to
130 us. For the same reason histograms are counters that we keep: one update per bucket and second instead of one call
for every observation. Prometheus's `histogram_quantile` reads them like any other.

Numbers of an engine carry its label, come from its last heartbeat and start again from 0 with its process (a counter
here goes on). Those of the requests come from the front ends (numbers.py) and are published by supervisor 0.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

from photon_backend.numbers import ENDS, HISTOGRAMS, Receiver, Report
from photon_backend.protocol import ALONE

PERIOD_S = 1.0
STUCK_S = 30.0  # publishing takes 10 to 50 ms

# metric: field of `status`, factor, description
COUNTERS = {
    "submitted_total": ("submitted", 1, "Requests that reached the engine"),
    "done_total": ("done", 1, "Requests that the engine answered, deadlines included"),
    "failed_total": ("failed", 1, "Requests that ended with an error, refused ones included"),
    "cancelled_total": ("cancelled", 1, "Requests that were cancelled, by a client or by a stop string"),
    "tokens_total": ("tokens", 1, "Tokens generated"),
    "prefix_hits_total": ("prefix_hits", 1, "Pictures whose prefix was cached"),
    "prefix_misses_total": ("prefix_misses", 1, "Pictures that had to be encoded"),
    "steps_total": ("steps", 1, "Steps launched"),
    "steps_overlapped_total": ("steps_overlapped", 1, "Steps queued whole while another one was uncommitted"),
    "ticks_total": ("ticks", 1, "Turns of the engine's loop"),
    "host_seconds_total": ("host_ms", 1e-3, "Host time of these turns, without waiting for the device"),
    "device_busy_seconds_total": ("device_busy_ms", 1e-3, "Time of the device in steps"),
    "device_idle_seconds_total": ("device_idle_ms", 1e-3, "Time of the device between steps that followed each other"),
    "constrained_device_total": ("constrained_device", 1, "Requests whose grammar ran as tables on the device"),
    "constrained_host_total": ("constrained_host", 1, "Requests whose grammar ran in a host matcher"),
    "constrained_fallback_total": ("constrained_fallback", 1, "Of those: tables too large, or no room for them"),
    "restarts_total": ("restarts", 1, "Restarts of the engine process"),
}
# field of `status`: description
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
NOT_OVERLAPPED = "Steps launched with nothing in flight, or whose sampling had to wait for a host grammar, by reason"
BUBBLE = "Idle share of the device between steps that followed each other, of the last second that had any"
ENDED = "Requests that ended, by outcome and reason"

log = logging.getLogger("photon.metrics")


class Families:
    """Series by name and labels, made when first needed. A metric dies with its family, so both are kept."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}

    def counter(self, name: str, description: str, labels: dict[str, str]) -> Any:
        return self._get(name, description, labels, pb_utils.MetricFamily.COUNTER)

    def gauge(self, name: str, description: str, labels: dict[str, str]) -> Any:
        return self._get(name, description, labels, pb_utils.MetricFamily.GAUGE)

    def _get(self, name: str, description: str, labels: dict[str, str], kind: Any) -> Any:
        key = (name, tuple(labels.items()))
        if key not in self._series:
            if name not in self._families:
                self._families[name] = pb_utils.MetricFamily(name=f"photon_{name}", description=description, kind=kind)
            self._series[key] = self._families[name].Metric(labels=labels)
        return self._series[key]


class EngineNumbers:
    """Of one engine."""

    def __init__(self, families: Families, engine: int) -> None:
        labels = {"engine": str(engine)}
        self._counters = {name: families.counter(name, text, labels) for name, (_, _, text) in COUNTERS.items()}
        self._gauges = {name: families.gauge(name, text, labels) for name, text in GAUGES.items()}
        self._not_overlapped = {
            reason: families.counter("steps_not_overlapped_total", NOT_OVERLAPPED, {**labels, "reason": reason})
            for reason in (*ALONE, "host_grammar")
        }
        self._bubble = families.gauge("bubble", BUBBLE, labels)
        self._last: dict[str, float] = {}

    def publish(self, status: dict[str, Any]) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(float(status[name]))
        grown = {name: self._grown(name, status[field] * factor) for name, (field, factor, _) in COUNTERS.items()}
        for name, by in grown.items():
            _increment(self._counters[name], by)
        for reason, number in {**status["steps_alone"], "host_grammar": status["steps_deferred"]}.items():
            _increment(self._not_overlapped[reason], self._grown(reason, number))
        busy, idle = grown["device_busy_seconds_total"], grown["device_idle_seconds_total"]
        if busy + idle > 0:
            self._bubble.set(idle / (busy + idle))

    def _grown(self, name: str, value: float) -> float:
        """Since the last call; a new engine process counts from 0."""
        last = self._last.get(name, 0.0)
        self._last[name] = value
        return value - last if value >= last else value


class RequestNumbers:
    """Of all front ends together."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._running = 0
        self._started = families.counter("requests_started_total", "Requests that reached a front end", {})
        self._responses = families.counter("responses_total", "Responses handed to Triton", {})
        self._tokens = families.counter("tokens_received_total", "Tokens that reached a front end", {})
        self._running_gauge = families.gauge("requests_running", "Requests that have not had their last response", {})
        for outcome, reason in ENDS:
            self._ended(outcome, reason)
        for name in HISTOGRAMS:
            self._histogram(name)

    def publish(self, reports: list[Report]) -> None:
        """Summed up first: an update costs more than an addition."""
        _increment(self._started, sum(report.started for report in reports))
        _increment(self._responses, sum(report.responses for report in reports))
        _increment(self._tokens, sum(report.tokens for report in reports))
        for key in {key for report in reports for key in report.ended}:
            _increment(self._ended(*key.split("/")), sum(report.ended.get(key, 0) for report in reports))
        for name in HISTOGRAMS:
            self._publish_histogram(name, [report.times[name] for report in reports])
        self._running += sum(report.running for report in reports)
        self._running_gauge.set(float(self._running))

    def _ended(self, outcome: str, reason: str) -> Any:
        labels = {"outcome": outcome, "reason": reason}
        return self._families.counter("requests_ended_total", ENDED, labels)

    def _histogram(self, name: str) -> tuple[list[Any], Any, Any]:
        """Counters of the buckets, the sum and the count, with the names and labels that Prometheus gives them."""
        text, bounds = HISTOGRAMS[name]
        labels = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        buckets = [self._families.counter(f"{name}_seconds_bucket", text, {"le": label}) for label in labels]
        total = self._families.counter(f"{name}_seconds_sum", text, {})
        return buckets, total, self._families.counter(f"{name}_seconds_count", text, {})

    def _publish_histogram(self, name: str, histograms: list[Any]) -> None:
        buckets, total, count = self._histogram(name)
        below = 0
        for index, bucket in enumerate(buckets):
            below += sum(histogram.counts[index] for histogram in histograms)
            _increment(bucket, below)
        _increment(total, sum(histogram.sum for histogram in histograms))
        _increment(count, below)


class Publisher:
    """Publishes `status()` every second until `close`; `run_dir`: and what the front ends of that directory report."""

    def __init__(self, engine: int, status: Callable[[], dict[str, Any]], run_dir: str | None) -> None:
        self._status = status
        self._families = families = Families()  # kept: series of a family that is gone cannot be set
        self._engine = EngineNumbers(families, engine)
        self._receiver = Receiver(run_dir) if run_dir is not None else None
        self._requests = RequestNumbers(families) if run_dir is not None else None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics")
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        """Triton answers an update while the stub keeps the interpreter. When Triton dies meanwhile, no thread of ours
        ever runs again, so the one that ends this process, and the engine with it, must need no interpreter."""
        while not self._end.wait(PERIOD_S):
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            try:
                self._publish()
            except Exception:
                log.exception("metrics could not be published")
            faulthandler.cancel_dump_traceback_later()
        if self._receiver is not None:
            self._receiver.close()

    def _publish(self) -> None:
        self._engine.publish(self._status())
        if self._receiver is not None and self._requests is not None:
            reports = self._receiver.receive()
            if reports:
                self._requests.publish(reports)


def _increment(counter: Any, by: float) -> None:
    if by > 0:
        counter.increment(float(by))
