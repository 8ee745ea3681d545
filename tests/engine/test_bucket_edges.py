"""What decode graphs are made of, run without graphs: batches that are filled up to a bucket, and steady steps."""

from __future__ import annotations

from bucket_edges import SETTINGS, FilledUp, told_at_edges
from harness import request

from photon_backend.engine.streams import HostStream

EDGES = (2, 3, 5, 9, 17)
SENTINEL = -7


def test_a_batch_filled_up_changes_nothing(make_bench, checkpoint):
    told = []
    for filled in (False, True):
        bench = make_bench(rows=EDGES[-1], **SETTINGS)
        if filled:
            bench.engine.stepper.graphs = FilledUp(bench.engine.stepper.runner, EDGES[-1])
        told.append(told_at_edges(bench, checkpoint, EDGES))
    assert told[0] == told[1]


def test_a_steady_step_is_one_replay_and_one_copy(make_bench, checkpoint, monkeypatch):
    """And takes nothing up: rows that stay the same are not written again, neither here nor on the device."""
    bench = make_bench(rows=3, **SETTINGS)
    stepper = bench.engine.stepper
    stepper.graphs = FilledUp(stepper.runner, 3)
    stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    for i in range(3):
        bench.submit(*request(f"r{i}", checkpoint, i, task="query", picture="none", reasoning=False, max_tokens=20))
    for _ in range(6):
        bench.tick()
    queued = []
    run = HostStream.run

    def noting(stream, work, *args):
        queued.append((stream.name, work.__name__))
        run(stream, work, *args)

    monkeypatch.setattr(HostStream, "run", noting)
    for slot in stepper.slots:
        slot.host_rows.fill_(SENTINEL)
    for _ in range(5):
        bench.tick()
    assert queued == [("compute", "_replay"), ("copy", "copy_out")] * 5
    stepper.compute.record().wait()
    assert all((slot.host_rows == SENTINEL).all() for slot in stepper.slots)
    bench.drain()


def test_region_heads_run_for_rows_that_may_find_something_only(make_bench, checkpoint):
    for task, runs in (("query", False), ("detect", True)):
        bench, calls = make_bench(**SETTINGS), []
        runner = bench.engine.stepper.runner
        heads = runner._heads
        runner._heads = lambda hidden, *asked, heads=heads, told=calls: (
            told.append(len(hidden)) or heads(hidden, *asked)
        )
        bench.submit(*request("r", checkpoint, 0, task=task, reasoning=False, max_tokens=4, max_objects=1))
        assert bench.drain()["r"].ids
        assert bool(calls) == runs
