"""From a regular language to a deterministic automaton over UTF-8 bytes.

The non-deterministic automaton is built backwards, each part knowing the state that follows it; the subset construction
makes it deterministic. Every state it makes can still reach an end, so a mask made from it never leads into a dead end.
Price: pure Python, some 10 microseconds per state and byte class; it runs on a compiling thread, which lets other
threads in every now and then. All limits are checked on the way, so a hostile expression costs what they allow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from photon_backend.grammar.regular import Chars, Concat, Either, Node, NotRegular, Ranges

MAX_NFA_STATES = 50_000
MAX_WORK = 1_000_000  # states looked at, well below a second
_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # last code point of each UTF-8 length
_SURROGATES = (0xD800, 0xDFFF)


class TooLarge(Exception):
    """The automaton passes the limits; a host matcher takes the grammar."""


@dataclass(frozen=True)
class Dfa:
    """State 0 is the start. next_state int32 [states, byte classes], -1: no way; byte_class uint8 [256]; accepting bool
    [states]."""

    next_state: np.ndarray
    byte_class: np.ndarray
    accepting: np.ndarray


def build_dfa(node: Node, max_states: int) -> Dfa:
    """Raises TooLarge or NotRegular."""
    nfa = _Nfa()
    try:
        start = nfa.add(node, nfa.end)
    except RecursionError:
        raise NotRegular("too deep") from None
    return _determinise(nfa, start, max_states)


class _Nfa:
    def __init__(self) -> None:
        self.free: list[list[int]] = []  # transitions that take no byte
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, target)
        self._tails: dict[tuple[object, int], int] = {}
        self._entries: dict[tuple[int, int], int] = {}
        self._closures: dict[int, frozenset[int]] = {}
        self._work = 0
        self.end = self.state()

    def state(self) -> int:
        if len(self.free) >= MAX_NFA_STATES:
            raise TooLarge(f"more than {MAX_NFA_STATES} states before it is deterministic")
        self.free.append([])
        self.edges.append([])
        if len(self.free) % 64 == 0:
            time.sleep(0)  # lets the engine thread have the interpreter
        return len(self.free) - 1

    def add(self, node: Node, to: int) -> int:
        """The state from which `node`, then `to`, is read. A node that is shared is built once for each `to`."""
        key = (id(node), to)
        if key not in self._entries:
            self._entries[key] = self._build(node, to)
        return self._entries[key]

    def _build(self, node: Node, to: int) -> int:
        if isinstance(node, Chars):
            return self._chars(node.ranges, to)
        if isinstance(node, Concat):
            for part in reversed(node.parts):
                to = self.add(part, to)
            return to
        if isinstance(node, Either):
            fork = self.state()
            self.free[fork] = [self.add(part, to) for part in node.parts]
            return fork
        entry = to
        if node.most is None:
            entry = self.state()
            self.free[entry] = [self.add(node.part, entry), to]
        for _ in range(0 if node.most is None else node.most - node.least):
            fork = self.state()
            self.free[fork] = [self.add(node.part, entry), to]
            entry = fork
        for _ in range(node.least):
            entry = self.add(node.part, entry)
        return entry

    def _chars(self, ranges: Ranges, to: int) -> int:
        key = (ranges, to)
        if key not in self._tails:
            self._tails[key] = self.state()
            for low, high in ranges:
                for sequence in utf8_sequences(low, high):
                    target = to
                    for i in range(len(sequence) - 1, 0, -1):
                        target = self._tail(sequence[i], target)
                    self.edges[self._tails[key]].append((*sequence[0], target))
        return self._tails[key]

    def _tail(self, span: tuple[int, int], to: int) -> int:
        key = (span, to)
        if key not in self._tails:
            self._tails[key] = self.state()
            self.edges[self._tails[key]].append((*span, to))
        return self._tails[key]

    def spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise TooLarge("it takes too long to make it deterministic")

    def closure(self, state: int) -> frozenset[int]:
        """States that read a byte, or end, reachable without reading one."""
        if state not in self._closures:
            seen, todo = {state}, [state]
            while todo:
                for target in self.free[todo.pop()]:
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)
            self.spend(len(seen))
            self._closures[state] = frozenset(s for s in seen if self.edges[s] or s == self.end)
        return self._closures[state]


def utf8_sequences(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Byte ranges, position by position, that spell exactly the code points low..high, surrogates left out."""
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        below = utf8_sequences(low, _SURROGATES[0] - 1) if low < _SURROGATES[0] else []
        return below + (utf8_sequences(_SURROGATES[1] + 1, high) if high > _SURROGATES[1] else [])
    for end in _LENGTH_ENDS:
        if low <= end < high:
            return utf8_sequences(low, end) + utf8_sequences(end + 1, high)
    if high <= 0x7F:
        return [((low, high),)]
    for bits in (6, 12, 18):  # cut where all later bytes do not run over their whole range
        tail = (1 << bits) - 1
        if low & ~tail != high & ~tail:
            if low & tail:
                return utf8_sequences(low, low | tail) + utf8_sequences((low | tail) + 1, high)
            if high & tail != tail:
                return utf8_sequences(low, (high & ~tail) - 1) + utf8_sequences(high & ~tail, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]


def _determinise(nfa: _Nfa, start: int, max_states: int) -> Dfa:
    borders = {0} | {b for edges in nfa.edges for low, high, _ in edges for b in (low, high + 1)} - {256}
    byte_class = np.cumsum([b in borders for b in range(256)]).astype(np.uint8) - 1
    first = {b: int(byte_class[b]) for b in borders} | {256: len(borders)}
    sets = [nfa.closure(start)]
    index = {sets[0]: 0}
    lines: list[list[int]] = []  # of next_state
    while len(lines) < len(sets):
        moves: dict[int, set[int]] = {}
        for state in sets[len(lines)]:
            for low, high, target in nfa.edges[state]:
                reached = nfa.closure(target)
                symbols = range(first[low], first[high + 1])
                nfa.spend(len(symbols) * len(reached))
                for c in symbols:
                    moves.setdefault(c, set()).update(reached)
        line = [-1] * len(borders)
        for c, states in moves.items():
            reached = frozenset(states)
            if reached not in index:
                if len(sets) >= max_states:
                    raise TooLarge(f"more than {max_states} states")
                index[reached] = len(sets)
                sets.append(reached)
            line[c] = index[reached]
        lines.append(line)
        time.sleep(0)
    accepting = np.array([nfa.end in states for states in sets])
    return Dfa(np.array(lines, np.int32), byte_class, accepting)
