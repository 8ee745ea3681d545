"""Which steps overlap and why others do not, and that the bound on a prefill step changes no token."""

from __future__ import annotations

import pytest
from harness import Bench, request
from test_loop import OnePerPosition

from photon_backend.protocol import ALONE, Status


def counted(bench: Bench) -> Status:
    """The counters, which add up."""
    status = bench.engine.snapshot()
    assert tuple(status.steps_alone) == ALONE
    alone = sum(status.steps_alone.values())
    assert status.steps == status.steps_overlapped + status.steps_deferred + alone > 0
    return status


def alone(bench: Bench) -> dict[str, int]:
    """Steps with nothing in flight by reason, without the reasons that there were not."""
    return {reason: number for reason, number in counted(bench).steps_alone.items() if number}


def query(bench: Bench, name: str, tokens: int, **changes: object) -> None:
    """A request that does not end by itself before its length."""
    changes = {
        "task": "query",
        "picture": "none",
        "reasoning": False,
        "max_tokens": tokens,
        "temperature": 0.0,
    } | changes
    bench.submit(*request(name, bench.checkpoint, 3, **changes))


@pytest.fixture
def bench_of(make_bench, checkpoint):
    def make(**settings) -> Bench:
        bench = make_bench(**settings)
        bench.checkpoint = checkpoint
        return bench

    return make


def test_blocking_no_step_overlaps(bench_of):
    bench = bench_of(overlap=False)
    query(bench, "r", 5)
    bench.drain()
    assert alone(bench) == {"blocking": 5}


def test_the_first_step_after_a_rest(bench_of):
    bench = bench_of()
    for name in ("r0", "r1"):
        query(bench, name, 5)
        bench.drain()
    assert alone(bench) == {"idle": 2}
    assert counted(bench).steps_overlapped == 8


def test_the_last_tokens_are_launched_and_nobody_waits(bench_of):
    bench = bench_of()
    query(bench, "r0", 3)
    for _ in range(4):  # three launches; the fourth has nothing to launch
        bench.tick()
    query(bench, "r1", 3)
    bench.drain()
    assert alone(bench) == {"idle": 1, "nothing_to_launch": 1}


def test_no_row_is_free(bench_of):
    bench = bench_of(rows=1)
    for name in ("r0", "r1", "r2"):
        query(bench, name, 3)
    bench.drain()
    assert alone(bench) == {"idle": 1, "no_room": 2}


def test_whoever_waits_is_not_ready(bench_of):
    """Its picture comes when the row before it has launched its last token."""
    bench = bench_of()
    bench.deliver = False
    query(bench, "r0", 3)
    query(bench, "r1", 3, picture="tiny")
    for _ in range(4):
        bench.tick()
    bench.bring("r1")
    bench.drain()
    assert alone(bench) == {"idle": 1, "not_ready": 1}


def test_a_host_grammar_is_behind(bench_of):
    bench = bench_of(matcher_for=lambda submit: OnePerPosition(30))
    query(bench, "r", 6)
    bench.drain()
    status = counted(bench)
    assert (status.steps_deferred, alone(bench)) == (5, {"idle": 1})
    assert status.steps_overlapped == 0


@pytest.mark.parametrize("gap", [0.0, 1e9])
def test_the_bound_on_a_prefill_changes_no_token(make_bench, checkpoint, gap):
    """With none to spare, a prefill that rows wait for takes one sequence; blocking or not, the tokens are the same."""
    told = []
    for overlap in (True, False):
        bench = make_bench(max_decode_gap_ms=gap, overlap=overlap)
        plans = []
        inner = bench.engine.scheduler.plan

        def plan(step_index, inner=inner, plans=plans, scheduler=bench.engine.scheduler):
            rows_wait = any(s.launchable for s in scheduler.running.values())
            plans.append((inner(step_index), rows_wait))
            return plans[-1][0]

        bench.engine.scheduler.plan = plan
        for i in range(4):
            bench.submit(*request(f"r{i}", checkpoint, i))
        for _ in range(3):
            bench.tick()
        for i in range(4, 10):
            bench.submit(*request(f"r{i}", checkpoint, i))
        told.append({key: answer.told for key, answer in bench.drain().items()})
        sizes = [len(p.sequences) for p, rows_wait in plans if p is not None and p.kind == "prefill" and rows_wait]
        assert sizes and (max(sizes) == 1) == (gap == 0.0)
        counted(bench)
    assert told[0] == told[1]
