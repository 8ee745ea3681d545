"""From a grammar's text to a `Constraint`, cached. For compiling threads: never on the engine's or the I/O thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from photon_backend.grammar.automaton import compile_automaton
from photon_backend.grammar.check import check
from photon_backend.grammar.constraint import Constraint, TokenAutomaton
from photon_backend.grammar.dfa import TooLarge
from photon_backend.grammar.matcher import LibraryMatcher, Prototypes, Vocabulary
from photon_backend.grammar.regular import NotRegular
from photon_backend.grammar.spelling import Spelling, read_spelling
from photon_backend.model.config import ModelConfig
from photon_backend.protocol import GrammarSpec

CACHED = 64  # grammars; the tables of one are at most as large as `max_words` allows


class Grammars:
    """Safe to share between threads. Nothing is loaded before the first grammar comes."""

    def __init__(self, checkpoint: Path, config: ModelConfig, max_words: int) -> None:
        """`max_words`: int32 words that the tables of one automaton may take; 0: matchers only."""
        self._checkpoint, self._config, self._max_words = checkpoint, config, max_words
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._spelling: Spelling | None = None
        self._is_loaded = False
        self._cache: OrderedDict[GrammarSpec, Constraint] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> Constraint:
        """Raises PhotonError: INVALID_ARG for a grammar that cannot be compiled, UNAVAILABLE without the library."""
        with self._lock:
            if spec in self._cache:
                self._cache.move_to_end(spec)
                return self._cache[spec]
        check(spec)  # the front end has done it; whatever comes here must not reach the end of a stack
        automaton, too_large = self._automaton(spec)
        constraint = Constraint(_Matchers(self, spec).make, automaton, too_large)
        if automaton is None:
            constraint.make_matcher()  # a grammar that does not compile fails here
        with self._lock:
            self._cache[spec] = constraint
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return constraint

    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._checkpoint, self._config)
            return self._vocabulary

    def _load_spelling(self) -> Spelling | None:
        with self._lock:
            if self._max_words and not self._is_loaded:
                self._spelling = read_spelling(self._checkpoint, self._config)
                self._is_loaded = True
            return self._spelling

    def _automaton(self, spec: GrammarSpec) -> tuple[TokenAutomaton | None, bool]:
        """The automaton if there is one, and whether it is only the limits that forbid it."""
        spelling = self._load_spelling()
        if spelling is None:
            return None, False
        try:
            return compile_automaton(spec, spelling, self._max_words), False
        except NotRegular:
            return None, False
        except TooLarge:
            return None, True


class _Matchers:
    """Makes matchers of one grammar, whose prototype is compiled when the first one is wanted."""

    def __init__(self, grammars: Grammars, spec: GrammarSpec) -> None:
        self._grammars, self._spec = grammars, spec
        self._prototypes: Prototypes | None = None
        self._lock = threading.Lock()

    def make(self) -> LibraryMatcher:
        vocabulary = self._grammars.vocabulary()
        with self._lock:
            if self._prototypes is None:
                self._prototypes = Prototypes(self._spec, vocabulary)
        return self._prototypes.matcher()
