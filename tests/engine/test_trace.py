"""Recordings of ticks: lanes, order, overlap, and what a client gets that asks for one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from harness import CLIENT, Bench, request
from test_loop import OnePerPosition

from photon_backend.engine.trace import DEVICE_LANES, HOST_LANES, chrome
from photon_backend.protocol import Failed, Record, Recorded, Span


def lanes(spans: list[Span]) -> dict[str, list[Span]]:
    """By lane, in order of their begin."""
    return {
        lane: sorted((s for s in spans if s.lane == lane), key=lambda s: s.begin) for lane in HOST_LANES + DEVICE_LANES
    }


def record(bench: Bench, name: str = "trace", ticks: int = 2000, seconds: float = 60.0) -> None:
    bench.engine.post(CLIENT, Record(name, ticks, seconds))


def recorded(bench: Bench, name: str = "trace") -> list[Span]:
    end = bench.answers[name].end
    assert isinstance(end, Recorded)
    return end.spans


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trace_shows_the_overlap(make_bench, checkpoint, overlap):
    """Pipelined, a forward begins before the commit of the step before it has ended; blocking it never does."""
    bench = make_bench(overlap=overlap)
    bench.engine.trace.start()
    bench.submit(*request("r", checkpoint, 2, task="query", reasoning=False, max_tokens=12, temperature=0.0))
    bench.drain()
    by_lane = lanes(bench.engine.trace.stop())
    commits = by_lane["commit"]
    steps = sorted(by_lane["prefill"] + by_lane["forward"], key=lambda s: s.begin)
    assert len(commits) == len(steps) == bench.engine.pipeline.num_launched
    assert len(by_lane["prefill"]) == 1
    early = [step.begin < commit.end for commit, step in zip(commits, steps[1:], strict=False)]
    assert any(early) == overlap


def test_every_lane_is_in_order_and_without_overlap(make_bench, checkpoint):
    """With a host grammar and free rows, on late streams, so that every piece of a step comes apart."""

    def matcher_for(submit):
        return OnePerPosition(30) if submit.request_id == "g" else None

    bench = make_bench(matcher_for=matcher_for)
    record(bench)
    bench.submit(*request("g", checkpoint, 1, task="query", reasoning=False, max_tokens=8))
    for i in range(6):
        bench.submit(*request(f"r{i}", checkpoint, i))
    bench.drain()
    bench.engine.recorder.deadline = 0.0
    bench.tick()
    by_lane = lanes(recorded(bench))
    for lane, spans in by_lane.items():
        assert spans, lane
        assert all(span.begin <= span.end for span in spans), lane
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(spans)), lane
        numbers = [span.number for span in spans]
        assert numbers == sorted(numbers), lane
    for wait in by_lane["wait"]:
        assert any(commit.begin <= wait.begin and wait.end <= commit.end for commit in by_lane["commit"])
    of_step = {span.number: span for span in by_lane["prefill"] + by_lane["forward"]}
    for sampling in by_lane["sampling"]:
        assert of_step[sampling.number].end <= sampling.begin + 1e-9
    last = {span.number: span for span in by_lane["copy"]}
    assert all(sampling.end <= last[sampling.number].begin + 1e-9 for sampling in by_lane["sampling"])


def test_the_document_is_chrome_s(make_bench, checkpoint):
    bench = make_bench()
    bench.engine.trace.start()
    bench.submit(*request("r", checkpoint, 2, max_tokens=5))
    bench.drain()
    spans = bench.engine.trace.stop()
    events = chrome({"one": spans, "two": spans[:3], "none": []})["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(3 * (HOST_LANES + DEVICE_LANES))
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"{title}: {side}" for title in ("one", "two", "none") for side in ("host", "device")]
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(spans) + 3
    assert all(names[e["pid"], e["tid"]] == e["name"] for e in shown)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in shown)
    assert min(e["ts"] for e in shown) == 0


def test_a_recording_ends_after_its_ticks(make_bench, checkpoint):
    bench = make_bench()
    bench.submit(*request("r", checkpoint, 2, task="query", reasoning=False, max_tokens=24, temperature=0.0))
    for _ in range(3):
        bench.tick()
    record(bench, ticks=5)
    for _ in range(5):
        assert "trace" not in bench.answers
        bench.tick()
    assert {span.number for span in recorded(bench) if span.lane == "launch"} == {4, 5, 6, 7, 8}
    assert not bench.engine.trace.on
    bench.drain()
    assert bench.engine.trace.spans == []


def test_the_second_recording_is_refused(make_bench):
    bench = make_bench()
    record(bench, "first")
    record(bench, "second")
    bench.tick()
    refused = bench.answers["second"].end
    assert isinstance(refused, Failed) and refused.code == "UNAVAILABLE" and "retry after 60 s" in refused.message
    bench.engine.recorder.deadline = 0.0
    bench.tick()
    assert isinstance(bench.answers["first"].end, Recorded)
    record(bench, "third", ticks=1)
    bench.tick()
    assert isinstance(bench.answers["third"].end, Recorded)


def test_a_recording_ends_with_its_client(make_bench):
    bench = make_bench()
    record(bench)
    bench.tick()
    assert bench.engine.trace.on
    bench.engine.drop_client(b"another one")
    bench.tick()
    assert bench.engine.trace.on
    bench.engine.drop_client(CLIENT)
    bench.tick()
    assert not bench.engine.trace.on
    assert bench.answers["trace"].end.code == "UNAVAILABLE"  # heard by one that was silent and is not gone
    record(bench, "next", ticks=1)
    bench.tick()
    assert isinstance(bench.answers["next"].end, Recorded)


def test_an_idle_engine_answers_when_the_time_is_over(checkpoint):
    bench = Bench(checkpoint)
    bench.engine.start()
    record(bench, seconds=0.2)
    ended = bench.engine._thread
    ended.join(0.05)
    while "trace" not in bench.answers or bench.answers["trace"].end is None:
        assert ended.is_alive()
        ended.join(0.01)
    bench.engine.stop()
    assert {span.lane for span in recorded(bench)} <= set(HOST_LANES)


def test_an_engine_that_stops_answers_its_recording(checkpoint):
    bench = Bench(checkpoint)
    bench.engine.start()
    record(bench)
    bench.engine.stop()
    end = bench.answers["trace"].end
    assert isinstance(end, Failed) and end.code == "UNAVAILABLE"


@pytest.mark.parametrize("broken", ["prefill", "decode", "sample"])
@pytest.mark.parametrize("tracing", [True, False])
def test_a_failing_step_fails_its_requests_traced_or_not(make_bench, checkpoint, monkeypatch, broken, tracing):
    """The events between the pieces of a step take no error away from its end."""
    bench = make_bench(debug=False)

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(bench.engine.stepper.runner, broken, fail)
    if tracing:
        record(bench)
    for i in range(3):
        bench.submit(*request(f"r{i}", checkpoint, i, max_tokens=5))
    answers = bench.drain()
    assert [answers[f"r{i}"].reason for i in range(3)] == ["INTERNAL"] * 3
    monkeypatch.undo()
    bench.submit(*request("after", checkpoint, 5, max_tokens=5))
    assert bench.drain()["after"].reason in ("stop", "length")
    bench.assert_baseline()
