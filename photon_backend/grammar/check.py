"""What a grammar must satisfy before the library sees it, and its text for the library. Pure Python, fast.

The library refuses what it cannot compile. What it would accept and then not keep is refused here: a keyword that it
does not know (it would be ignored), options that loosen a schema, and token syntax in a Lark grammar (a control token
inside an answer would let a client write the model's own structure). The bounds keep its recursion far from the end of
a thread's stack of 8 MB: 2,000 rules or 3,000 nested schemas in a chain are where it overflows.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from photon_backend.grammar.pattern import SPELLED, narrowed
from photon_backend.protocol import GrammarSpec, PhotonError

OPTION_OF_KIND = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "lark": "grammar"}
MAX_CHARS = {"json_schema": 1 << 16, "choice": 1 << 16, "lark": 1 << 14, "regex": 1 << 13}  # all compile in a second
MAX_RULES = 1000  # of a Lark grammar, and schemas of a JSON schema that uses $ref
MAX_CHOICES = 1024
MAX_NESTING = 100  # of objects and lists; the library itself ends at 128, Python's parser near 900
# Of `pattern`, `format` and the names of `patternProperties`. The library compares the names in pairs: 200 take 10 s.
MAX_PATTERNS = 32
# Of these, different ones where schemas are intersected. Doubles with each: 4 take 10 ms, 14 a second, 18 minutes.
MAX_INTERSECTED = 4
# Remainders that the library goes through for `multipleOf`: 10,000 take 0.1 s and 5 MB, 1,000,000 14 s and 400 MB, and
# 100,000,000 all memory. Where schemas are joined, those of the least common multiple.
MAX_MULTIPLE = 10_000

# keyword: where its value holds further schemas
_ONE = ("additionalItems", "additionalProperties", "items")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN_WORDS = """
    $anchor $comment $id $ref $schema const default deprecated description
    discriminator enum examples exclusiveMaximum exclusiveMinimum format id maxItems maxLength maxProperties maximum
    minItems minLength minProperties minimum multipleOf pattern readOnly required title type writeOnly
"""
_PLAIN = frozenset(_PLAIN_WORDS.split())
_BRANCHES = frozenset(("$ref", "anyOf", "oneOf"))  # the library intersects each with what stands beside it
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_JOINED = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_NO_ASSERTION_WORDS = """
    $anchor $comment $defs $id $schema default definitions deprecated description examples id readOnly title writeOnly
"""
_NO_ASSERTION = frozenset(_NO_ASSERTION_WORDS.split())

_LARK_REFUSED = (
    (re.compile(r"<[\[|]"), "tokens by name or number, such as <|name|> or <[1]>"),
    (re.compile(r"%llguidance\s*\{\s*[^}\s]"), "options in %llguidance"),
    (re.compile(r"\btemperature\s*="), "temperature"),
    (re.compile(r"x-guidance"), "x-guidance"),
)
# Strings, expressions and comments of the library's Lark; or, its group, what stands before a schema.
_LARK_JSON = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(%json\s*)')


def refuse(spec: GrammarSpec, why: str) -> PhotonError:
    """INVALID_ARG with one short, printable sentence."""
    text = " ".join(why.split()).encode("ascii", "replace").decode()
    return PhotonError(
        "INVALID_ARG", f"{OPTION_OF_KIND[spec.kind]}: {text if len(text) <= 240 else text[:237] + '...'}"
    )


def check(spec: GrammarSpec) -> None:
    """Raises PhotonError INVALID_ARG naming the option and the keyword."""
    if len(spec.text) > MAX_CHARS[spec.kind]:
        raise refuse(spec, f"it has {len(spec.text)} characters; at most {MAX_CHARS[spec.kind]} are accepted")
    if spec.kind == "json_schema":
        _check_schema(spec)
    elif spec.kind == "lark":
        _check_lark(spec)
    elif spec.kind == "choice":
        choices = json.loads(spec.text)
        if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
            raise refuse(spec, f"give 1 to {MAX_CHOICES} strings, none of them empty")


def _check_lark(spec: GrammarSpec) -> None:
    for pattern, what in _LARK_REFUSED:
        if pattern.search(spec.text):
            raise refuse(spec, f"{what} cannot be used here")
    if max(spec.text.count(":"), spec.text.count("{")) > MAX_RULES:
        raise refuse(spec, f"more than {MAX_RULES} rules are not accepted")
    walk = _SchemaWalk(spec)
    for found in re.finditer(r"%json\s*", spec.text):
        try:
            walk.enter(json.JSONDecoder().raw_decode(spec.text, found.end())[0])
        except ValueError:
            raise refuse(spec, "%json must be followed by a JSON schema") from None
        except RecursionError:
            raise refuse(spec, "a schema after %json is nested too deeply") from None
    walk.check_work()


def _check_schema(spec: GrammarSpec) -> None:
    try:
        schema = json.loads(spec.text)
    except RecursionError:
        raise refuse(spec, "it is nested too deeply") from None
    if schema is False:
        raise refuse(spec, "no value satisfies the schema false")
    if not isinstance(schema, dict | bool):
        raise refuse(spec, "a schema is an object, or true")
    if '"$ref"' in spec.text and spec.text.count("{") > MAX_RULES:
        raise refuse(spec, f"more than {MAX_RULES} schemas are not accepted together with $ref")
    walk = _SchemaWalk(spec)
    walk.enter(schema)
    walk.check_work()


def _is_nested(value: Any, levels: int) -> bool:
    """Whether the value has more than so many levels of objects and lists."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_nested(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )


class _SchemaWalk:
    """Looks at every keyword of a grammar's schemas, and gathers what makes the library's work grow."""

    def __init__(self, spec: GrammarSpec) -> None:
        self._spec = spec
        self._patterns: list[tuple[str, str]] = []  # keyword and its text
        self._intersects = False
        self._bounds: list[list[tuple[str, Any]]] = []  # of numbers, by schema: keyword and value
        self._multiples: set[Decimal] = set()  # of `multipleOf`
        self._joins = False

    def enter(self, schema: Any) -> None:
        if _is_nested(schema, MAX_NESTING):
            raise refuse(self._spec, f"it is nested too deeply; at most {MAX_NESTING} levels are accepted")
        self._keywords(schema, root=True)

    def check_work(self) -> None:
        self._check_patterns()
        self._check_bounds()
        if _remainders(self._multiples, self._joins) > MAX_MULTIPLE:
            raise refuse(
                self._spec,
                f"'multipleOf' may be {MAX_MULTIPLE} at most, without its point and all in sum; with 'anyOf', 'oneOf', "
                "'allOf' or '$ref' so may their least common multiple",
            )

    def _check_bounds(self) -> None:
        """The library lets an excluded whole number through where the other bound is less than 1 away."""
        together = [[bound for bounds in self._bounds for bound in bounds]]
        for bounds in together if self._intersects else self._bounds:
            for keyword, value in bounds:
                others = [other for name, other in bounds if name.lower()[-7:] != keyword.lower()[-7:]]
                is_near = any(value - 1 < other < value + 1 and other != value for other in others)
                if keyword.startswith("exclusive") and value % 1 == 0 and is_near:
                    why = f"{keyword!r} needs its other bound at least 1 away, or not to be a whole number"
                    raise refuse(self._spec, why)

    def _check_patterns(self) -> None:
        what = "of 'pattern', 'format' and the names of 'patternProperties'"
        if len(self._patterns) > MAX_PATTERNS:
            raise refuse(self._spec, f"{len(self._patterns)} {what}; at most {MAX_PATTERNS} are accepted")
        if self._intersects and len(set(self._patterns)) > MAX_INTERSECTED:
            raise refuse(
                self._spec,
                f"more than {MAX_INTERSECTED} different ones {what} are not accepted together with 'allOf', or with "
                "'$ref', 'anyOf' or 'oneOf' beside other keywords",
            )

    def _keywords(self, schema: Any, root: bool = False) -> None:
        if not isinstance(schema, dict):
            return  # true, false, or something that the library refuses
        if not root and "$ref" in schema and not schema.keys().isdisjoint(("$id", "id")):
            raise refuse(self._spec, "the keyword '$id' beside '$ref' is not supported")  # drafts differ in its meaning
        self._gather(schema)
        for keyword, value in schema.items():
            if keyword in _ONE or keyword in _MANY:
                for inner in value if isinstance(value, list) else [value]:
                    self._keywords(inner)
            elif keyword in _NAMED:
                for inner in value.values() if isinstance(value, dict) else []:
                    self._keywords(inner)
            elif keyword not in _PLAIN and (not keyword.startswith("x-") or keyword == "x-guidance"):
                raise refuse(self._spec, f"the keyword {keyword!r} is not supported")

    def _gather(self, schema: dict[str, Any]) -> None:
        if schema.get("format") == "unknown":  # the one name of no format that the library takes, and ignores
            raise refuse(self._spec, "'format' is unknown")
        asserted = schema.keys() - _NO_ASSERTION
        self._intersects |= "allOf" in schema or (len(asserted) > 1 and not asserted.isdisjoint(_BRANCHES))
        first = len(self._patterns)
        self._patterns += [(keyword, str(schema[keyword])) for keyword in ("pattern", "format") if keyword in schema]
        self._joins |= not schema.keys().isdisjoint(_JOINED)
        multiple = schema.get("multipleOf")
        # the library refuses others
        if isinstance(multiple, int | float) and multiple is not True and 0 < multiple < math.inf:
            self._multiples.add(Decimal(str(multiple)).normalize())
        if schema.get("type") != "integer":
            bounds = ((keyword, schema.get(keyword)) for keyword in _BOUNDS)
            self._bounds.append([(keyword, value) for keyword, value in bounds if type(value) in (int, float)])
        names = schema.get("patternProperties")
        self._patterns += [("patternProperties", name) for name in names] if isinstance(names, dict) else []
        for keyword, pattern in self._patterns[first:]:
            if keyword != "format" and SPELLED.search(pattern):
                raise refuse(self._spec, f"{keyword!r} with the control character U+0001 is not supported")


def _remainders(multiples: set[Decimal], join: bool) -> int:
    """What the library counts through: each multiple in units of its last decimal place, joined ones of one place."""
    places = {multiple: max(0, -int(multiple.as_tuple().exponent)) for multiple in multiples}
    number = sum(int(multiple.scaleb(places[multiple])) for multiple in multiples)
    if not join or number > MAX_MULTIPLE:
        return number
    return max(number, math.lcm(*(int(multiple.scaleb(max(places.values()))) for multiple in multiples)))


def lark_of(spec: GrammarSpec) -> str:
    """The grammar in the library's dialect of Lark.

    `no_forcing`: every spelling of a forced text is legal, so masks depend on the language alone. Whitespace between
    the tokens of JSON is not legal: a model that likes it would loop in it for ever. \\d, \\w and \\s are ASCII.
    """
    if spec.kind == "lark":
        body = _compact(spec.text)
    elif spec.kind == "choice":
        # one terminal: alternatives in one automaton, not lexemes of which the longest would win; U+007F by its number,
        # since the library reads it in no other way
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
        body = "start: CHOICE\nCHOICE: " + " | ".join(choices).replace("\x7f", "\\u007f")
    elif spec.kind == "regex":
        from llguidance import regex_to_lark

        body = f"start: /{regex_to_lark(spec.text, 'dws')}/"
    else:
        body = f"start: %json {_compact_schema(json.loads(spec.text))}"
    return f'%llguidance {{"no_forcing": true}}\n{body}'


def _compact_schema(schema: Any) -> str:
    """The schema for the library, without white space between the tokens of its values."""
    if schema is True:
        schema = {}
    rules = {"x-guidance": {"whitespace_flexible": False}}
    return json.dumps({**_narrowed_patterns(schema), **rules} if isinstance(schema, dict) else schema)


def _narrowed_patterns(schema: Any) -> Any:
    """See pattern.py."""
    if isinstance(schema, list):
        return [_narrowed_patterns(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for keyword, value in schema.items():
        if keyword in _ONE or keyword in _MANY:
            result[keyword] = _narrowed_patterns(value)
        elif keyword in _NAMED and isinstance(value, dict):
            rename = narrowed if keyword == "patternProperties" else str
            result[keyword] = {rename(name): _narrowed_patterns(inner) for name, inner in value.items()}
        elif keyword == "pattern" and isinstance(value, str):
            result[keyword] = narrowed(value)
    return result


def _compact(lark: str) -> str:
    """A checked Lark grammar with each schema after %json made compact; %json in a string or a comment is text."""
    parts, at = [], 0
    while (found := _LARK_JSON.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[1]:
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            parts.append(_compact_schema(schema))
    return "".join((*parts, lark[at:]))
