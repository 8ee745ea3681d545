"""What an engine knows of a constrained answer: one of three classes, behind one small interface. No torch.

    none              nothing to do
    TokenAutomaton    tables for the device: mask and transition need no host, the row runs as far ahead as a free one
    Matcher           a state on the host: advanced by each committed token, then asked which ids are legal next

A `Constraint` is what compiling gives: how to make a matcher, and the automaton where the grammar has one. The engine
takes the automaton when its tables fit on the device, and a matcher otherwise; it knows no grammar by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from photon_backend.protocol import ErrorCode

ALL_LEGAL = -1  # a mask word with every bit set


class Matcher(Protocol):
    """Host grammar of one sequence; used by one thread at a time."""

    failure: str  # why it cannot go on, for the client; empty while it can
    failure_code: ErrorCode  # INVALID_ARG when the grammar is to blame

    def fill(self, line: np.ndarray) -> None:
        """Writes the legal ids into int32 [ceil(V / 32)]: bit i of word w is id 32 w + i. All zero: none, a failure."""

    def advance(self, token: int) -> None:
        """A token of the answer was committed. Never called with the terminating eos, nor after it."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A state machine over token ids, as tables.

    masks       int32 [states, ceil(V / 32)]  legal ids of each state, eos where the answer may end
    classes     int32 [V]                     tokens with equal columns of `next_state` share a class
    next_state  int32 [states, classes]       a transition that is not legal stays where it is
    The start is state 0.
    """

    masks: np.ndarray
    classes: np.ndarray
    next_state: np.ndarray

    @property
    def num_words(self) -> int:
        """int32 words of all tables."""
        return self.masks.size + self.classes.size + self.next_state.size


@dataclass(frozen=True)
class Constraint:
    make_matcher: Callable[[], Matcher]  # may take milliseconds
    automaton: TokenAutomaton | None = None
    too_large: bool = False  # a regular grammar whose automaton passed the limits


def fill_lines(matchers: Sequence[tuple[Any, int]], mask: np.ndarray) -> None:
    """Asks each matcher for its line of int32 [B, ceil(V / 32)]. Kinds that can are filled together, in parallel."""
    together: dict[type, list[tuple[Any, int]]] = {}
    for matcher, line in matchers:
        if hasattr(type(matcher), "fill_many"):
            together.setdefault(type(matcher), []).append((matcher, line))
        else:
            matcher.fill(mask[line])
    for kind, pairs in together.items():
        kind.fill_many(pairs, mask)  # type: ignore[attr-defined]
