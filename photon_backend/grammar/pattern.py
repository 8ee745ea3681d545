"""Patterns of JSON strings, as the library keeps them.

Characters that hold every control character, but for the line feed perhaps, are taken by the library (1.9.1) to hold
quote and backslash too: of '[^"]*' it accepts a quote. So a class that holds U+0001, but not both of these, gives it up
here, for automata as for the library; and one that our parser does not know gives it up in any case. A pattern that
spells U+0001 is refused: beside such a class, '[^"]|\\x01', the library would merge the two. Price: U+0001.
"""

from __future__ import annotations

import re

from photon_backend.grammar.regular import NotRegular, Ranges, parse_class

SPELLED = re.compile(r"\x01|\\(?:x01|u0001|[xuU]\{0*1\}|U0{7}1|cA|ca)")  # U+0001, however it is written
_PIECE = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[", re.DOTALL)


def gives_up(ranges: Ranges) -> bool:
    def holds(code: int) -> bool:
        return any(low <= code <= high for low, high in ranges)

    return holds(0x01) and not (holds(0x22) and holds(0x5C)) and ranges != ((0x01, 0x01),)


def given_up(ranges: Ranges) -> Ranges:
    parts = [part for low, high in ranges for part in ((low, min(high, 0)), (max(low, 2), high))]
    return tuple((low, high) for low, high in parts if low <= high)


def narrowed(pattern: str) -> str:
    """The pattern for the library."""
    parts, at = [], 0
    while (found := _PIECE.search(pattern, at)) is not None:
        begin, at_end = found.start(), found.end()
        loses = found[0][:2] in ("\\p", "\\P")
        if found[0] == "[":
            at_end, loses = _class_at(pattern, begin)
        piece = pattern[begin:at_end]
        parts += [pattern[at:begin], f"[{piece}&&[^\\x01]]" if loses else piece]
        at = at_end
    return "".join((*parts, pattern[at:]))


def _class_at(pattern: str, begin: int) -> tuple[int, bool]:
    """Where the class that begins there ends, and whether it must give up a character."""
    try:
        chars, end = parse_class(pattern, begin)
        return end, gives_up(chars.ranges)
    except NotRegular:
        return _end_of_class(pattern, begin), True


def _end_of_class(pattern: str, at: int) -> int:
    """Of one with classes in it, or set operations. What has no end the library refuses."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "[":
            depth += 1
            at += pattern.startswith("[^", at)
            at += pattern.startswith("]", at + 1)  # as the first member it ends nothing
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1 + (pattern[at : at + 1] == "\\")
    return len(pattern)
