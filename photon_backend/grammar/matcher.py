"""Host matchers, on the llguidance library. Imported only where a grammar is used.

What its use has to heed (each has a test):
- An error does not raise. A matcher that failed, also one that was given an illegal token, says that only eos is
  legal; so every answer is followed by a look at `is_error`.
- Its first mask of a free-text pattern costs milliseconds, the later ones microseconds: a prototype is asked once
  before it is copied.
- Copies share their prototype's lexer and a lock, so many copies of one would fill their masks one after the other. A
  hot grammar gets a new prototype every `COPIES` copies.
- The model's vocabulary may be padded beyond the tokenizer, and a control token is legal nowhere: what the tokenizer
  itself does not rule out is masked here.
- The work of an ambiguous grammar grows with every token, to a second a mask, and the engine thread waits for it. So
  matchers have a budget of processor time, which a busy machine does not use up; nearly all masks take microseconds.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from photon_backend.grammar.check import check, lark_of, refuse
from photon_backend.model.config import ModelConfig
from photon_backend.protocol import ErrorCode, GrammarSpec, PhotonError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COPIES = 8  # of one prototype
PROTOTYPES = 8  # of one grammar that are kept
# A mask of a schema takes 0.02 to 1 ms; of an ambiguous grammar ever more, 40 ms after 100 tokens and 1 s after 500.
# What a call took above the allowance adds to what its answer has spent.
SLOW_BATCH_S = 0.02  # after a batch that took longer its matchers are looked at one by one
ALLOWANCE_S = 0.005
BUDGET_S = 0.1
MAX_ITEMS = 10_000  # parser items in one mask: the library's own 50,000 take up to 1.2 s in an ambiguous grammar
# The library's messages where the grammar is to blame: its limits, and nothing can follow.
_OF_GRAMMAR = re.compile(r"Too many items|Current row has|too many expressions|fuel exhausted|NoExtensionBias")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?|^failed to parse \"%json\": ")
NOTHING_LEFT = "no answer satisfies it"


def validate(spec: GrammarSpec) -> None:
    """Whether the grammar compiles, without a vocabulary. Milliseconds, a second for the largest
    schemas, in which the library leaves the interpreter to others.

    Raises PhotonError: INVALID_ARG naming the keyword, or UNAVAILABLE when the library is not installed.
    """
    check(spec)
    library = _library()
    _, messages = library.LLMatcher.validate_grammar_with_warnings(lark_of(spec))
    if messages:  # a warning means that something is not kept as it was written
        raise refuse(spec, _sentence(messages[0]))


def _library():  # type: ignore[no-untyped-def]
    try:
        import llguidance
    except ImportError:
        raise PhotonError(
            "UNAVAILABLE", "constrained answers need the package llguidance, which this server does not have"
        ) from None
    return llguidance


def _sentence(message: str) -> str:
    """The library's message without its place, its picture of the source and an option that is not ours."""
    if message.find("coerce_one_of") >= 0:
        return "oneOf is supported only where its alternatives exclude each other"
    if "NoExtensionBias" in message:  # nothing may follow, not even at the beginning
        return NOTHING_LEFT
    return _PLACE.sub("", message.split("\n   1 |")[0].split("\n<state>")[0])


class Vocabulary:
    """The checkpoint's tokens for the library. Safe to share between threads."""

    def __init__(self, checkpoint: Path, config: ModelConfig) -> None:
        """Raises PhotonError UNAVAILABLE without the library, FileNotFoundError without a tokenizer."""
        text = (checkpoint / "tokenizer.json").read_text(encoding="utf-8")
        library = _library()
        size, ids = config.text.vocab_size, config.tokenizer
        self.tokens: LLTokenizer = library.LLTokenizer(text, n_vocab=size, eos_token=ids.eos_id)
        self.executor: LLExecutor = library.LLExecutor()
        self._new_matcher = library.LLMatcher
        self._limits = library.LLParserLimits(step_max_items=MAX_ITEMS)
        control = set(ids.control_ids)
        control |= {token for token in range(size) if self.tokens.is_special_token(token)}
        control |= {added["id"] for added in json.loads(text).get("added_tokens") or []}  # text has other spellings
        bits = np.ones(-(-size // 32) * 32, np.uint8)
        bits[size:] = 0
        bits[sorted(control - {ids.eos_id})] = 0
        self.ordinary = np.packbits(bits, bitorder="little").view(np.int32)  # and eos

    def new_matcher(self, lark: str) -> LLMatcher:
        return self._new_matcher(self.tokens, lark, log_level=0, limits=self._limits)


class Prototypes:
    """One compiled grammar, from which matchers are copied. Used by the threads that compile."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Raises PhotonError INVALID_ARG when it does not compile, or when nothing satisfies it."""
        self._spec, self._vocabulary = spec, vocabulary
        self._lark = lark_of(spec)
        self._lock = threading.Lock()
        self._prototypes: list[LLMatcher] = []
        self._copies = 0
        self._grow()

    def matcher(self) -> LibraryMatcher:
        with self._lock:
            if self._copies and self._copies % COPIES == 0:
                self._grow()
            self._copies += 1
            return LibraryMatcher(self._prototypes[-1].deep_copy(), self._vocabulary)

    def _grow(self) -> None:
        if len(self._prototypes) == PROTOTYPES:
            self._prototypes.append(self._prototypes.pop(0))
            return
        prototype = self._vocabulary.new_matcher(self._lark)
        matcher = LibraryMatcher(prototype, self._vocabulary)
        line = np.zeros_like(self._vocabulary.ordinary)
        matcher.fill(line)
        if matcher.failure or not line.any():
            raise refuse(self._spec, matcher.failure or NOTHING_LEFT)
        self._prototypes.append(prototype)


class LibraryMatcher:
    """The state of one answer. `failure` is empty while it can go on."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._spent_s = 0.0
        self._watched = False
        self.failure = ""
        self.failure_code: ErrorCode = "INTERNAL"

    def fill(self, line: np.ndarray) -> None:
        """See constraint.py."""
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        line &= self._vocabulary.ordinary
        self._look_at_error(line)

    def advance(self, token: int) -> None:
        started = time.thread_time()
        self._matcher.consume_token(token)
        self._spend(time.thread_time() - started)

    @staticmethod
    def fill_many(pairs: Sequence[tuple[LibraryMatcher, int]], mask: np.ndarray) -> None:
        """Fills lines of a C-contiguous int32 [B, ceil(V / 32)], in parallel and without the GIL.

        After a slow batch its matchers are watched: the next time each fills its line alone and on this thread, where
        its own time can be told. One that was quick is watched no longer.
        """
        vocabulary = pairs[0][0]._vocabulary
        watched = [pair for pair in pairs if pair[0]._watched]
        others = [pair for pair in pairs if not pair[0]._watched]
        for matcher, line in watched:
            matcher._fill_watched(mask[line])
        if others:
            work = [(matcher._matcher, line) for matcher, line in others]
            started = time.perf_counter()
            vocabulary.executor.unsafe_compute_mask_ptr(work, mask.ctypes.data, mask.strides[0], len(mask))
            is_slow = time.perf_counter() - started > SLOW_BATCH_S
            for matcher, _ in others:
                matcher._watched = is_slow
        mask[[line for _, line in pairs]] &= vocabulary.ordinary
        for matcher, line in pairs:
            matcher._look_at_error(mask[line])

    def _fill_watched(self, line: np.ndarray) -> None:
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        seconds = time.thread_time() - started
        self._watched = seconds > ALLOWANCE_S
        self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self._spent_s += max(0.0, seconds - ALLOWANCE_S)
        if self._spent_s > BUDGET_S:
            self._fail("INVALID_ARG", f"it is too slow to follow, {seconds * 1e3:.0f} ms for a token; is it ambiguous?")

    def _look_at_error(self, line: np.ndarray) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error()
            code: ErrorCode = "INVALID_ARG" if _OF_GRAMMAR.search(message) else "INTERNAL"
            self._fail(code, _sentence(message) or "its matcher stopped")
        if self.failure:
            line[:] = 0

    def _fail(self, code: ErrorCode, why: str) -> None:
        if not self.failure:
            self.failure_code, self.failure = code, why
