"""Regular languages over Unicode text, and a parser for the regular expressions that describe them.

The parser knows a careful subset of the library's syntax (Rust's `regex`) and refuses the rest with `NotRegular`, so
what it accepts means the same to both. \\d, \\w and \\s are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # inclusive, ascending, disjoint


class NotRegular(Exception):
    """The grammar is outside what becomes an automaton; a host matcher takes it."""


@dataclass(frozen=True)
class Chars:
    """One character out of the ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Concat:
    parts: tuple[Node, ...]  # none: the empty text


@dataclass(frozen=True)
class Either:
    parts: tuple[Node, ...]  # at least one


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None


Node = Chars | Concat | Either | Repeat
EMPTY = Concat(())


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Ranges in any order, which may overlap."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if not merged:
        raise NotRegular("a class without a character")
    return Chars(tuple((low, high) for low, high in merged))


def inverted(ranges: Ranges) -> Chars:
    gaps, start = [], 0
    for low, high in (*ranges, (MAX_CODE_POINT + 1, MAX_CODE_POINT + 1)):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return chars(gaps)


def literal(text: str) -> Concat:
    return Concat(tuple(Chars(((ord(c), ord(c)),)) for c in text))


def optional(node: Node) -> Repeat:
    return Repeat(node, 0, 1)


ANY = Chars(((0, MAX_CODE_POINT),))
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_COUNT = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/\"'`!%,:;=@_ ")


def parse_regex(text: str) -> Node:
    """The whole text must match. Raises NotRegular for what it does not know, errors included."""
    try:
        parser = _Parser(text)
        node = parser.either()
        if parser.at < len(text):
            raise NotRegular(f"{text[parser.at]} at {parser.at}")
        return node
    except (IndexError, RecursionError):
        raise NotRegular("unfinished or too deep") from None


def parse_class(text: str, begin: int) -> tuple[Chars, int]:
    """The class in brackets that begins there, and where it ends. Raises NotRegular for what it does not know."""
    parser = _Parser(text)
    parser.at = begin + 1
    try:
        return parser.bracket(), parser.at
    except IndexError:
        raise NotRegular("unfinished") from None


def parse_search(text: str) -> Node:
    """As `pattern` in a JSON schema: matches somewhere, unless anchored with a leading ^ or a trailing $."""
    begins, ends = text.startswith("^"), text.endswith("$") and not re.search(r"(^|[^\\])(\\\\)*\\\$$", text)
    node = parse_regex(text[begins : len(text) - ends])
    if isinstance(node, Either) and (begins or ends):
        raise NotRegular("an anchor beside alternatives")
    rest = Repeat(ANY, 0, None)
    return Concat((*(() if begins else (rest,)), node, *(() if ends else (rest,))))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def either(self) -> Node:
        parts = [self.concat()]
        while self.peek() == "|":
            self.take()
            parts.append(self.concat())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def concat(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repeated(self, node: Node) -> Node:
        sign = self.peek()
        if sign in ("*", "+", "?") and sign:
            self.take()
            node = Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
        elif sign == "{":
            count = _COUNT.match(self.text, self.at)
            if count is None:
                raise NotRegular("a lone {")
            self.at = count.end()
            least = int(count[1])
            most = least if count[2] is None else None if count[3] is None else int(count[3])
            if most is not None and most < least:
                raise NotRegular("a count that ends before it begins")
            node = Repeat(node, least, most)
        else:
            return node
        if self.peek() in ("*", "+", "?", "{") and self.peek():
            raise NotRegular("a lazy, possessive or doubled repetition")
        return node

    def atom(self) -> Node:
        c = self.take()
        if c == "(":
            if self.text.startswith("?:", self.at):
                self.at += 2
            elif self.peek() == "?":
                raise NotRegular("(?")
            node = self.either()
            if self.take() != ")":
                raise NotRegular("an open group")
            return node
        if c == "[":
            return self.bracket()
        if c == ".":
            return inverted(((10, 10),))
        if c == "\\":
            return self.escape()
        if c in "*+?{}]^$":
            raise NotRegular(f"{c} without its meaning")
        return Chars(((ord(c), ord(c)),))

    def escape(self) -> Chars:
        c = self.peek()
        if c.lower() in _CLASSES and c:
            self.take()
            ranges = _CLASSES[c.lower()]
            return Chars(ranges) if c.islower() else inverted(ranges)
        code = _HEX.match(self.text, self.at)
        if code is not None:
            self.at = code.end()
            value = int(next(filter(None, code.groups())), 16)
            if value > MAX_CODE_POINT or 0xD800 <= value <= 0xDFFF:
                raise NotRegular("no such character")
        elif c in _CONTROLS:
            value = _CONTROLS[self.take()]
        elif c in _PUNCTUATION:
            value = ord(self.take())
        else:
            raise NotRegular(f"\\{c}")
        return Chars(((value, value),))

    def bracket(self) -> Chars:
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not (self.peek() == "]" and ranges):
            low = self.member()
            if self.peek() == "-" and self.text[self.at + 1] != "]":
                self.take()
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise NotRegular("a range between classes")
                if high[0][0] < low[0][0]:
                    raise NotRegular("a range that ends before it begins")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        self.take()
        found = chars(ranges)
        return inverted(found.ranges) if negated else found

    def member(self) -> Ranges:
        c = self.take()
        if c == "\\":
            return self.escape().ranges
        if c in "[]" or (c in "&~-" and self.peek() == c):
            raise NotRegular("a class in a class")
        return ((ord(c), ord(c)),)
