"""What an engine does with a planned step, without a device: shared by the tests of the scheduler."""

from __future__ import annotations

from photon_backend.engine.pipeline import Pipeline
from photon_backend.engine.scheduler import Scheduler


def commit_oldest(pipeline: Pipeline, scheduler: Scheduler) -> None:
    """One token more for each of its sequences; those at their limit end and are released."""
    step = pipeline.commit_oldest()
    for sequence in step.sequences:
        if sequence.planned - sequence.inflight + 1 == sequence.limit:
            sequence.finished = "length"
    for sequence in pipeline.retire(step):
        scheduler.release(sequence)
