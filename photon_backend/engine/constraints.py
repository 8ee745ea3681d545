"""The grammars of open requests: compiled on threads of their own, then handed to the engine thread.

A request with a grammar enters the book at once, so that it can be cancelled, expire and bring its picture meanwhile;
the scheduler passes it over while `compiling`. What a compiling thread finds out comes back through the engine's inbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from photon_backend.engine.sequence import Sequence
from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.constraint import Constraint, Matcher, TokenAutomaton
from photon_backend.protocol import PhotonError

if TYPE_CHECKING:
    from torch import Tensor

    from photon_backend.engine.stepper import Stepper

log = logging.getLogger("photon.engine")

COMPILING_THREADS = 2


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiling thread's message to the engine. Without a matcher the automaton is to be placed.

    `words`: its tables, ready to be uploaded, unless they were on the device already. Nothing at all of a request that
    had ended before a thread was free.
    """

    sequence: Sequence
    constraint: Constraint | None = None
    matcher: Matcher | None = None
    words: Tensor | None = None
    error: PhotonError | None = None


class Constraints:
    """`deliver(compiled)` is called on a compiling thread; everything else belongs to the engine thread."""

    def __init__(self, grammars: Grammars, stepper: Stepper, deliver: Callable[[Compiled], None]) -> None:
        self._grammars, self._stepper, self._deliver = grammars, stepper, deliver
        self._pool = ThreadPoolExecutor(COMPILING_THREADS, "grammar")
        self.num_compiling = 0
        self.num_device = self.num_host = self.num_fallback = 0

    def start(self, sequence: Sequence) -> None:
        """A request with a grammar came."""
        sequence.compiling = True
        self._submit(sequence, allow_automaton=True)

    def take(self, compiled: Compiled) -> PhotonError | None:
        """What a compiling thread delivered. Returns the error with which an open request must fail."""
        self.num_compiling -= 1
        sequence, constraint = compiled.sequence, compiled.constraint
        if sequence.finished or constraint is None:
            return None if sequence.finished else compiled.error
        if compiled.matcher is None:
            assert constraint.automaton is not None
            if compiled.words is None and not self._stepper.tables.holds(constraint.automaton):
                self._submit(sequence, allow_automaton=True)  # evicted meanwhile: its tables are wanted after all
                return None
            sequence.tables = self._stepper.place(constraint.automaton, compiled.words)
            if sequence.tables is None:  # all of the buffer is in use
                self._submit(sequence, allow_automaton=False)
                return None
        sequence.matcher = compiled.matcher
        sequence.compiling = False
        self.num_device += compiled.matcher is None
        self.num_host += compiled.matcher is not None
        falls_back = constraint.too_large or constraint.automaton is not None
        self.num_fallback += compiled.matcher is not None and falls_back
        return None

    def release(self, sequence: Sequence) -> None:
        """A request ended and none of its steps is in flight."""
        if sequence.tables is not None:
            self._stepper.tables.release(sequence.tables)
        sequence.tables = sequence.matcher = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, sequence: Sequence, allow_automaton: bool) -> None:
        self.num_compiling += 1
        self._pool.submit(self._compile, sequence, allow_automaton)

    def _compile(self, sequence: Sequence, allow_automaton: bool) -> None:
        if sequence.finished:  # while it waited for a thread: who comes after it need not wait for its grammar too
            self._deliver(Compiled(sequence))
            return
        try:
            assert sequence.request.grammar is not None
            constraint = self._grammars.compile(sequence.request.grammar)
            if allow_automaton and constraint.automaton is not None:
                compiled = Compiled(sequence, constraint, words=self._words(constraint.automaton))
            else:
                compiled = Compiled(sequence, constraint, constraint.make_matcher())
        except PhotonError as error:
            compiled = Compiled(sequence, error=error)
        except Exception:
            log.exception("compiling a grammar failed")
            message = "the engine failed on this request's grammar; its log says why"
            compiled = Compiled(sequence, error=PhotonError("INTERNAL", message))
        self._deliver(compiled)

    def _words(self, automaton: TokenAutomaton) -> Tensor | None:
        tables = self._stepper.tables
        return None if tables.holds(automaton) else tables.host_words(automaton)
