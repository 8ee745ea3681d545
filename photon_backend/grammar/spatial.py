"""The device automaton of a row: what its next token may be and what the next input is. Pure Python tables.

Everything a Moondream row does is a small machine whose transitions depend on nothing but its state and the token just
sampled, so the tables live on the device and a row runs as far ahead as it likes, with no host round trip:

    state        sampled                          next state
    TEXT_FIRST   any token                        TEXT             first token of an answer
    TEXT         any token but answer_id          TEXT
    THINK_FIRST  any token                        THINK, or TEXT_FIRST after answer_id
    THINK        any token but eos and size_id    THINK, or TEXT_FIRST after answer_id; coord carries a coordinate
    POINT_X      eos, or a coordinate             POINT_Y          another object or the end: the only real choice
    POINT_Y      a coordinate                     POINT_X
    BOX_X        eos, or a coordinate             BOX_Y
    BOX_Y        a coordinate                     BOX_SIZE
    BOX_SIZE     a size                           BOX_X

The machine and its quirks are the reference's: the first token of a phase is sampled without suppression, and in the X
states anything but eos means another object. When reasoning has used its allowance, answer_id is forced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from photon_backend.model.config import ModelConfig
from photon_backend.protocol import Submit


class State(IntEnum):
    TEXT_FIRST = 0
    TEXT = 1
    THINK_FIRST = 2
    THINK = 3
    POINT_X = 4
    POINT_Y = 5
    BOX_X = 6
    BOX_Y = 7
    BOX_SIZE = 8


NEXT: list[int] = [
    State.TEXT,
    State.TEXT,
    State.THINK,
    State.THINK,
    State.POINT_Y,
    State.POINT_X,
    State.BOX_Y,
    State.BOX_SIZE,
    State.BOX_X,
]
THINKING = (State.THINK_FIRST, State.THINK)
CHOOSES_OBJECT = (State.POINT_X, State.BOX_X)
DECODES_COORDINATE = (State.POINT_X, State.POINT_Y, State.BOX_X, State.BOX_Y)


def suppressed_ids(state: int, config: ModelConfig) -> list[int]:
    """Token ids whose logit is minus infinity in `state`."""
    ids = config.tokenizer
    if state == State.TEXT:
        return [ids.answer_id]
    if state == State.THINK:
        return [ids.eos_id, ids.size_id]
    return []


@dataclass(frozen=True)
class RowProgram:
    """Where a row starts, how many tokens it may take, and whether it needs the region heads."""

    start: State
    think_limit: int  # reasoning tokens before answer_id is forced; 0 without reasoning
    answer_limit: int  # tokens of the answer, or of all objects
    spatial: bool  # its tokens may carry coordinates or sizes

    @property
    def limit(self) -> int:
        return self.answer_limit + (self.think_limit + 1 if self.start == State.THINK_FIRST else 0)


def program_of(request: Submit, room: int) -> RowProgram:
    """`room`: tokens that the context has left after the prompt. An object fits whole or not at all."""
    if request.task == "point":
        return RowProgram(State.POINT_X, 0, 2 * min(request.max_objects, room // 2), True)
    if request.task == "detect":
        return RowProgram(State.BOX_X, 0, 3 * min(request.max_objects, room // 3), True)
    tokens = request.sampling.max_tokens
    if not request.reasoning:
        return RowProgram(State.TEXT_FIRST, 0, min(tokens, room), False)
    thinking = min(tokens, room - 1)
    return RowProgram(State.THINK_FIRST, thinking, min(tokens, room - 1 - thinking), True)
