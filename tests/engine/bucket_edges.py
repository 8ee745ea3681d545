"""Batches around the edge of every bucket of the decode graphs, and the graphs' steps without a capture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import Bench, request

from photon_backend.engine.graphs import DecodeGraphs, buckets_for
from photon_backend.engine.runner import Runner
from photon_backend.engine.slots import DecodeSlot

# one picture a step; what a step takes must not decide what is in the next one
SETTINGS = {"debug": False, "prefill_crops": 1, "pages": 1000, "max_decode_gap_ms": 1e9}


class FilledUp:
    """In the place of `DecodeGraphs`: batches are filled up to a bucket, and computed without a graph."""

    bucket = DecodeGraphs.bucket

    def __init__(self, runner: Runner, rows: int) -> None:
        self.buckets = buckets_for(rows)
        self._runner = runner

    def replay(self, slot: DecodeSlot, batch: int, spatial: bool, samples: bool) -> None:
        spatial = spatial or not samples
        self._runner.decode(slot, batch, self._runner.rows.page_table.shape[1], spatial)
        if samples:
            self._runner.sample(slot, batch, spatial, masked=False, automata=True)


def told_at_edges(bench: Bench, checkpoint: Path, edges: Sequence[int]) -> dict:
    """Questions, as many at once as each edge says; none ends before the others have begun."""
    stepper, seen = bench.engine.stepper, set()
    stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    launch_decode = stepper._launch_decode

    def noting(step, slot, samples):
        seen.add(len(step.sequences))
        return launch_decode(step, slot, samples)

    stepper._launch_decode = noting
    for number in edges:
        for i in range(number):
            bench.submit(*request(f"{number}: {i}", checkpoint, i, task="query", max_tokens=8))
        bench.drain()
    bench.assert_baseline()
    assert seen >= set(edges)
    return {key: answer.told for key, answer in bench.answers.items()}
