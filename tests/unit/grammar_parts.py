"""Grammars over the vocabulary of the seeded tiny checkpoint, and ways to spell a text letter by letter."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.constraint import Constraint, TokenAutomaton
from photon_backend.grammar.spelling import Spelling, read_spelling
from tests.model.tiny_checkpoint import CONFIG, TOKENIZER

MAX_WORDS = 1 << 22
EOS = CONFIG.tokenizer.eos_id


@functools.cache
def checkpoint_directory() -> Path:
    """config.json and tokenizer.json, no weights."""
    directory = Path(tempfile.mkdtemp(prefix="grammar-"))
    atexit.register(shutil.rmtree, directory)
    (directory / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (directory / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return directory


def make_grammars(max_words: int = MAX_WORDS) -> Grammars:
    return Grammars(checkpoint_directory(), CONFIG, max_words)


def make_spelling() -> Spelling:
    spelling = read_spelling(checkpoint_directory(), CONFIG)
    assert spelling is not None
    return spelling


def empty_line() -> np.ndarray:
    return np.zeros(-(-CONFIG.text.vocab_size // 32), np.int32)


def legal_ids(line: np.ndarray) -> list[int]:
    """Ids of the set bits, ascending."""
    return np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()


def is_legal(line: np.ndarray, token: int) -> bool:
    return bool(line[token // 32] >> (token % 32) & 1)


class Letters:
    """Feeds texts one byte a token: every byte has a token of its own."""

    def __init__(self, grammars: Grammars) -> None:
        spelling = make_spelling()
        self.token_of = {int(spelling.bytes[t, 0]): int(t) for t in np.flatnonzero(spelling.lengths == 1)}
        self.grammars = grammars

    def tokens(self, text: str) -> list[int]:
        return [self.token_of[byte] for byte in text.encode("utf-8", "surrogatepass")]

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the text may be the whole answer; an automaton, where there is one, must say the same."""
        tokens = self.tokens(text)
        matcher, line = constraint.make_matcher(), empty_line()
        said = True
        for token in tokens:
            matcher.fill(line)
            said = is_legal(line, token)
            if not said:
                break
            matcher.advance(token)
        if said:
            matcher.fill(line)
            assert not matcher.failure
            said = is_legal(line, EOS)
        if constraint.automaton is not None:
            assert runs_through(constraint.automaton, tokens) == said, text
        return said


def runs_through(automaton: TokenAutomaton, tokens: list[int]) -> bool:
    state = 0
    for token in tokens:
        if not is_legal(automaton.masks[state], token):
            return False
        state = int(automaton.next_state[state, automaton.classes[token]])
    return is_legal(automaton.masks[state], EOS)
