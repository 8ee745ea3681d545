"""What decode graphs are made of, run without graphs: a batch that is filled up to its bucket changes no token."""

from __future__ import annotations

from bucket_edges import SETTINGS, FilledUp, told_at_edges

EDGES = (2, 3, 5, 9, 17)


def test_a_batch_filled_up_changes_nothing(make_bench, checkpoint):
    told = []
    for filled in (False, True):
        bench = make_bench(rows=EDGES[-1], **SETTINGS)
        if filled:
            bench.engine.stepper.graphs = FilledUp(bench.engine.stepper.runner, EDGES[-1])
        told.append(told_at_edges(bench, checkpoint, EDGES))
    assert told[0] == told[1]
