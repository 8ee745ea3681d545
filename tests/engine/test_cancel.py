"""A cancel frees row and pages within two steps, whatever the engine is at. Counted in steps: a clock would measure
the machine. The wall time through Triton is measured by `python -m benchmarks.promises`."""

from __future__ import annotations

import pytest
from harness import CLIENT, Bench, request

LONG = {"task": "caption", "max_tokens": 300, "temperature": 0.0}


def committed(bench: Bench) -> int:
    """Steps that are over."""
    return bench.engine.pipeline.num_launched - len(bench.engine.pipeline)


def reach(bench: Bench, state: str) -> None:
    """Ticks until the engine is at this with the victim."""
    scheduler = bench.engine.scheduler
    reached = {
        "submitted": lambda: True,
        "waits for its picture": lambda: bench.asked == ["victim"],
        "prefill in flight": lambda: any(s.request.request_id == "victim" for s in scheduler.running.values()),
        "decoding": lambda: "victim" in bench.answers and len(bench.answers["victim"].ids) > 4,
    }[state]
    for _ in range(100):
        if reached():
            return
        bench.tick()
    raise AssertionError(f"never {state}")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("state", ["submitted", "waits for its picture", "prefill in flight", "decoding"])
def test_a_cancel_frees_within_two_steps(make_bench, checkpoint, state: str, others: int, overlap: bool):
    bench = make_bench(overlap=overlap, prefix_cache=False)
    bench.engine.stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)  # nobody ends by itself
    for number in range(others):
        bench.submit(*request(f"other {number}", checkpoint, number, picture="tall", **LONG))
    while len(bench.engine.scheduler.running) < others:
        bench.tick()
    held, rows = bench.engine.pool.num_used, len(bench.engine.scheduler.running)
    bench.asked.clear()
    bench.deliver = state != "waits for its picture"
    bench.submit(*request("victim", checkpoint, 7, picture="wide", **LONG))
    reach(bench, state)
    before = committed(bench)
    bench.cancel("victim")
    bench.tick()
    assert bench.answers["victim"].reason == "cancelled", "told at once, its row not being free yet"
    while len(bench.engine.scheduler.running) > rows or bench.engine.scheduler.waiting:
        assert bench.tick()
    assert [bench.answers[f"other {number}"].end for number in range(others)] == [None] * others
    assert committed(bench) - before <= 2
    assert bench.engine.pool.num_used == held
    bench.engine.drop_client(CLIENT)
    bench.drain()
    bench.assert_baseline()
