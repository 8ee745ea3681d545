"""The JSON texts that satisfy a schema, as a regular language, for the schemas where that is one.

It gives the very language that the library's own compiler gives (compact, properties in the order of the schema, its
escapes and its spelling of numbers), so a row may take either class and the answer stays the same; a test compares the
two bit for bit. What is not sure to be equal is refused with `NotRegular` and goes to the library: $ref, allOf, free
objects, formats, ranges of non-integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

from photon_backend.grammar.pattern import given_up, gives_up
from photon_backend.grammar.regular import (
    ANY,
    EMPTY,
    MAX_CODE_POINT,
    Chars,
    Concat,
    Either,
    Node,
    NotRegular,
    Repeat,
    chars,
    literal,
    optional,
    parse_regex,
    parse_search,
)

_ANNOTATIONS = frozenset(("$comment", "title", "description", "default", "examples"))
_KEYWORDS: dict[Any, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(),
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_LARGEST = 10**15  # of an integer bound: beyond it a double is not exact


def parse_schema(schema: Any) -> Node:
    """Raises NotRegular, also for what is no schema at all: the library says why."""
    try:
        return _schema(schema)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NotRegular(f"malformed: {error}") from None


def _schema(schema: Any) -> Node:
    if not isinstance(schema, dict):
        raise NotRegular("any value")
    keywords = set(schema) - _ANNOTATIONS - {"$schema"}
    if keywords <= {"enum", "type"} and "enum" in keywords:
        return _either(_constant(value) for value in schema["enum"] if _has_type(value, schema))
    if keywords <= {"const", "type"} and "const" in keywords and _has_type(schema["const"], schema):
        return _constant(schema["const"])
    if keywords == {"anyOf"}:
        return _either(_schema(inner) for inner in schema["anyOf"])
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if any(name not in _KEYWORDS for name in names):
        raise NotRegular("no type, or an unknown one")
    if not keywords <= {"type"}.union(*(_KEYWORDS[name] for name in names)):
        raise NotRegular("keywords: " + " ".join(sorted(keywords)))
    return _either(_TYPES[name](schema) for name in names)


def _either(nodes: Any) -> Node:
    parts = tuple(nodes)
    if not parts:
        raise NotRegular("no alternative")
    return parts[0] if len(parts) == 1 else Either(parts)


def _has_type(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a constant passes a `type` beside it."""
    kinds = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
    types = schema.get("type", kinds.get(type(value)))
    names = types if isinstance(types, list) else [types]
    if "number" in names or type(value) not in kinds:
        raise NotRegular("a constant that is a number, an array or an object")
    return kinds[type(value)] in names


def _constant(value: Any) -> Node:
    if isinstance(value, str):
        return Concat((literal('"'), quoted(literal(value)), literal('"')))
    if type(value) is int and abs(value) > _LARGEST:
        raise NotRegular("a large integer")
    return literal(json.dumps(value))


def quoted(node: Node) -> Node:
    """The inside of a JSON string whose value is in `node`: control characters, quote and backslash escaped."""
    if isinstance(node, Chars):
        return _quoted_chars(node)
    if isinstance(node, Repeat):
        return Repeat(quoted(node.part), node.least, node.most)
    parts = tuple(map(quoted, node.parts))
    return Concat(parts) if isinstance(node, Concat) else Either(parts)


def _quoted_chars(node: Chars) -> Node:
    plain: list[tuple[int, int]] = []
    escaped: list[int] = []
    ranges = given_up(node.ranges) if gives_up(node.ranges) else node.ranges
    for low, high in ranges:
        escaped += range(low, min(high, 0x1F) + 1)
        start = max(low, 0x20)
        for code in (0x22, 0x5C, 0x7F, MAX_CODE_POINT + 1):
            if start <= min(high, code - 1):
                plain.append((start, min(high, code - 1)))
            if low <= code <= high:
                escaped.append(code)
            start = max(start, code + 1)
    return _either(([Chars(tuple(plain))] if plain else []) + ([_escapes(escaped)] if escaped else []))


def _escapes(codes: list[int]) -> Node:
    """A backslash and its letter, or u00 and two digits, where each exists. Few states: it is copied for each
    character of a bounded string."""
    ways: list[Node] = []
    letters = [ord(_SHORT[code]) for code in codes if code in _SHORT]
    if letters:
        ways.append(chars((c, c) for c in letters))
    for first in (0, 1, 7):
        last = [code & 15 for code in codes if code >> 4 == first]
        if last:
            digits = chars((ord(c), ord(c)) for code in last for c in f"{code:x}{code:X}")
            ways.append(Concat((literal(f"u00{first}"), digits)))
    return Concat((literal("\\"), _either(ways)))


def _string(schema: dict[str, Any]) -> Node:
    least, most = _bounds(schema, "minLength", "maxLength")
    if "pattern" not in schema:
        content: Node = Repeat(ANY, least, most)
    elif least or most is not None:
        raise NotRegular("pattern together with a length")
    elif "\\s" in schema["pattern"].lower():
        raise NotRegular("white space of all alphabets")
    else:
        content = parse_search(schema["pattern"])
    return Concat((literal('"'), quoted(content), literal('"')))


def _bounds(schema: dict[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
    least, most = schema.get(lower, 0), schema.get(upper)
    if type(least) is not int or least < 0 or (most is not None and (type(most) is not int or most < least)):
        raise NotRegular(f"{lower} or {upper}")
    return least, most


def _integer(schema: dict[str, Any]) -> Node:
    limits = {name: schema[name] for name in _KEYWORDS["integer"] if name in schema}
    if any(type(value) not in (int, float) or abs(value) > _LARGEST for value in limits.values()):
        raise NotRegular("a bound that is no number, or a large one")
    low = [math.ceil(limits["minimum"])] if "minimum" in limits else []
    low += [math.floor(limits["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in limits else []
    high = [math.floor(limits["maximum"])] if "maximum" in limits else []
    high += [math.ceil(limits["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in limits else []
    return _integers(max(low, default=None), min(high, default=None))


def _integers(low: int | None, high: int | None) -> Node:
    """The integers of a range; -0 is one where the range holds negative numbers and 0."""
    if low is None and high is None:
        return parse_regex("-?(0|[1-9][0-9]*)")
    if low is not None and high is not None:
        if low > high:
            raise NotRegular("an empty range")
        if high < 0:
            return _negative(_digits(-high, -low))
        return Either((_negative(_digits(0, -low)), _digits(0, high))) if low < 0 else _digits(low, high)
    if low is not None:
        if low < 0:
            return Either((_integers(low, -1), _integers(0, None)))
        longer = Concat((_digit(1, 9), Repeat(_digit(0, 9), len(str(low)), None)))
        return Either((_digits(low, 10 ** len(str(low)) - 1), longer))
    assert high is not None
    if high >= 0:
        return Either((_digits(0, high), _integers(None, -1)))
    return _negative(_integers(-high, None))


def _negative(node: Node) -> Node:
    return Concat((literal("-"), node))


@cache
def _digit(first: int, last: int) -> Node:
    return Chars(((ord("0") + first, ord("0") + last),))


def _digits(low: int, high: int) -> Node:
    """0 <= low..high without leading zeros. Not the text of an expression: a schema may have 900 ranges, and to parse
    theirs took 4 s."""
    if len(str(low)) < len(str(high)):
        border = 10 ** len(str(low))
        return Either((_digits(low, border - 1), _digits(border, high)))
    first, last = low // 10, high // 10
    if first == last:
        return _ending(first, low % 10, high % 10)
    parts = []
    if low % 10:
        parts.append(_ending(first, low % 10, 9))
        first += 1
    if high % 10 != 9:
        parts.append(_ending(last, 0, high % 10))
        last -= 1
    if first <= last:
        parts.append(Concat((_digits(first, last), _digit(0, 9))))
    return _either(parts)


def _ending(tens: int, first: int, last: int) -> Node:
    tens_digits = [_digit(int(c), int(c)) for c in str(tens or "")]
    return Concat((*tens_digits, _digit(first, last)))


def _array(schema: dict[str, Any]) -> Node:
    least, most = _bounds(schema, "minItems", "maxItems")
    if most == 0:
        return literal("[]")
    item = _schema(schema.get("items"))
    more = Repeat(Concat((literal(","), item)), max(least - 1, 0), None if most is None else most - 1)
    items: Node = Concat((item, more))
    return Concat((literal("["), items if least else optional(items), literal("]")))


def _object(schema: dict[str, Any]) -> Node:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("additionalProperties") is not False or not set(required) <= set(properties):
        raise NotRegular("properties that the schema does not list")
    members = [(_member(name, inner), name in required) for name, inner in properties.items()]
    # from the last property to the first: what may follow when a member went before, and when none did
    after: Node = EMPTY
    fresh: Node = EMPTY
    for member, is_required in reversed(members):
        begun = Concat((literal(","), member, after))
        first = Concat((member, after))
        fresh = first if is_required else Either((first, fresh))
        after = begun if is_required else Concat((optional(Concat((literal(","), member))), after))
    return Concat((literal("{"), fresh, literal("}")))


def _member(name: str, schema: Any) -> Node:
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in name):
        raise NotRegular("a control character in a name")
    return Concat((literal(json.dumps(name, ensure_ascii=False) + ":"), _schema(schema)))


_TYPES: dict[Any, Callable[[dict[str, Any]], Node]] = {
    "null": lambda schema: literal("null"),
    "boolean": lambda schema: Either((literal("true"), literal("false"))),
    "integer": _integer,
    "number": lambda schema: parse_regex(_NUMBER),
    "string": _string,
    "array": _array,
    "object": _object,
}
