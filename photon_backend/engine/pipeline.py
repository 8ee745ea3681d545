"""Two decode slots and the steps that ride in them. Pure Python: no torch, no threads, no clock.

A step is launched -> sampled -> committing -> retired.

Invariants (the names are those of the design)
- P2  Steps are committed oldest first.
- P3  A slot belongs to its step from `launch` to `retire`: its buffers are read by the commit long after the GPU is
      done with them, so the GPU being done frees nothing.
- P4  A sequence rides in at most two uncommitted steps, 0 <= inflight <= 2, and `inflight` is changed here only. A
      finished sequence with inflight > 0 is a zombie: computed, never emitted, never asked for a mask. `retire` hands
      back the sequences that may be released: finished, and in flight nowhere.
- P9  Prefill is a step like any other.

Price: a zombie costs one wasted row of one step per request that ends by eos, stop or cancel (a length limit never
makes one, P8: see `Sequence.launchable`), and its row and pages stay taken for that step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from photon_backend.engine.sequence import Sequence

NUM_SLOTS = 2
StepKind = Literal["prefill", "decode"]


class StepState(Enum):
    LAUNCHED = 1
    SAMPLED = 2
    COMMITTING = 3
    RETIRED = 4


@dataclass(eq=False)
class Step:
    index: int
    slot: int
    kind: StepKind
    sequences: list[Sequence]
    state: StepState = StepState.LAUNCHED
    begun: Any = None  # event before its forward; set by the stepper, as the next one is
    done: Any = None  # event after its sampling
    copied: Any = None  # event after which the host may read the slot's mirrors; set by `sampled`
    spans: list[Any] = field(default_factory=list)  # (lane, event, event) of its pieces, while a trace is on
    entries: list[Any] = field(default_factory=list)  # prefix cache entries that this step computes
    num_crops: int = 0  # of a prefill, as the next one; set by the engine
    num_tokens: int = 0


class Pipeline:
    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._free_slots = list(range(NUM_SLOTS))
        self.num_launched = 0
        self.num_overlapped = 0  # launched while another step was uncommitted

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        return not self._free_slots

    @property
    def next_index(self) -> int:
        return self.num_launched

    @property
    def oldest(self) -> Step:
        return self._steps[0]

    @property
    def steps(self) -> list[Step]:
        return list(self._steps)

    def unsampled(self) -> list[Step]:
        return [step for step in self._steps if step.state is StepState.LAUNCHED]

    def launch(self, kind: StepKind, sequences: list[Sequence]) -> Step:
        """Takes a free slot for a step over `sequences`, in batch order."""
        assert sequences and self._free_slots
        for sequence in sequences:
            assert not sequence.finished and sequence.inflight < NUM_SLOTS
            sequence.inflight += 1
            sequence.planned += 1
        self.num_overlapped += bool(self._steps)
        step = Step(self.num_launched, self._free_slots.pop(0), kind, sequences)
        self.num_launched += 1
        self._steps.append(step)
        return step

    def sampled(self, step: Step, copied: Any) -> None:
        """`copied` is the event of the step's device-to-host copy."""
        assert step.state is StepState.LAUNCHED
        step.state = StepState.SAMPLED
        step.copied = copied

    def commit_oldest(self) -> Step:
        """The oldest step, which must be sampled; its slot stays taken until `retire`."""
        step = self.oldest
        assert step.state is StepState.SAMPLED
        step.state = StepState.COMMITTING
        return step

    def retire(self, step: Step) -> list[Sequence]:
        """Frees the slot of a committed step and returns its sequences that may be released now."""
        assert step is self.oldest and step.state is StepState.COMMITTING
        self._steps.popleft()
        self._free_slots.append(step.slot)
        step.state = StepState.RETIRED
        for sequence in step.sequences:
            assert sequence.inflight > 0
            sequence.inflight -= 1
        return [s for s in step.sequences if s.finished and s.inflight == 0]
