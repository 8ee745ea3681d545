"""Token automata: their masks are the library's bit for bit in every state, and their limits hold."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_backend.grammar.automaton import MAX_STATES, compile_automaton
from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.constraint import Matcher
from photon_backend.grammar.dfa import Dfa, TooLarge, build_dfa, utf8_sequences
from photon_backend.grammar.json_text import parse_schema
from photon_backend.grammar.matcher import LibraryMatcher
from photon_backend.grammar.regular import NotRegular, parse_regex, parse_search
from photon_backend.protocol import GrammarSpec
from tests.unit.front_end_parts import fuzz
from tests.unit.grammar_parts import EOS, MAX_WORDS, Letters, empty_line, legal_ids, make_grammars, make_spelling

SPELLING = make_spelling()


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(texts))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def schema(**keywords) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(keywords))


def record(required: list[str], **properties) -> GrammarSpec:
    return schema(type="object", properties=properties, required=required, additionalProperties=False)


THING = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "kind": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["color", "kind", "count"],
    "additionalProperties": False,
}
SPECS = [
    choice("red", "reddish", "blue", "light blue", "\u00dcn\u00efcode \U0001f600", 'quo"te\\', "a/b\nc", "\x7f\x00"),
    regex(r"\d{4}-\d{2}-\d{2}"),
    regex(r"[^a-c]{1,5}x?|\w+\s*"),
    regex(r"[A-Z][a-z]{0,20}( [a-z]{1,10}){0,3}"),
    regex(".*\u00e9.{2,3}"),
    regex(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]{1,3})?"),
    schema(type="integer"),
    schema(type="integer", minimum=-7, maximum=123),
    schema(type="integer", minimum=5),
    schema(type="integer", minimum=-3),
    schema(type="integer", exclusiveMaximum=-12),
    schema(type="integer", exclusiveMinimum=1.5, maximum=1099),
    schema(type="integer", minimum=-1050, maximum=-17),
    schema(type="integer", minimum=99, maximum=1000),
    schema(type="number"),
    schema(type="boolean"),
    schema(type=["null", "string"], maxLength=3),
    schema(type="string"),
    schema(type="string", minLength=2, maxLength=5),
    schema(type="string", pattern="^[a-z]+[0-9]$"),
    schema(type="string", pattern='a["\u00e9\n]'),
    schema(type="string", pattern='^[^"]{1,3}[^\\\\0-9a]$'),
    schema(type="string", pattern="^[^ -~]+x"),
    schema(enum=["a", 'b\n"', "\x7f\x01\u00e9/", 1, None, True]),
    schema(const=-5),
    schema(type="array", items={"type": "integer", "minimum": 0, "maximum": 9}, maxItems=3),
    schema(type="array", items={"enum": ["x"]}, minItems=2),
    schema(type="array", items={"type": "boolean"}, minItems=1, maxItems=1),
    schema(type="array", items={"type": "boolean"}),
    schema(type="array", items={"type": "null"}, minItems=2, maxItems=4),
    record(["a", "c"], a={"type": "integer"}, b={"type": "string", "maxLength": 4}, c={"enum": ["x", "y"]}),
    record([], a={"type": "integer"}, b={"type": "null"}, c={"type": "boolean"}),
    record(["c"], a={"type": "integer"}, b={"type": "null"}, c={"type": "boolean"}),
    record([]),
    schema(anyOf=[{"type": "integer"}, json.loads(record(["\u00e9/"], **{"\u00e9/": {"type": "null"}}).text)]),
    record(["objects"], objects={"type": "array", "maxItems": 2, "items": THING}, note={"type": "string"}),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def copy_of(matcher: Matcher) -> LibraryMatcher:
    assert isinstance(matcher, LibraryMatcher)
    return LibraryMatcher(matcher._matcher.deep_copy(), matcher._vocabulary)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text[:40])
def test_masks_equal_the_library_in_every_state(grammars: Grammars, spec: GrammarSpec) -> None:
    """A matcher is led to each state that tokens can reach, along one way."""
    constraint = grammars.compile(spec)
    automaton = constraint.automaton
    assert automaton is not None
    matchers, todo = {0: constraint.make_matcher()}, [0]
    line = empty_line()
    while todo:
        state = todo.pop()
        matchers[state].fill(line)
        assert legal_ids(line) == legal_ids(automaton.masks[state]), (state, matchers[state].failure)
        for token in legal_ids(line):
            following = int(automaton.next_state[state, automaton.classes[token]])
            if token != EOS and following not in matchers:
                matchers[following] = copy_of(matchers[state])
                matchers[following].advance(token)
                todo.append(following)
    assert len(matchers) > 0.6 * len(automaton.masks)  # the rest lies inside characters that no token begins


def test_masks_equal_the_library_on_random_walks(grammars: Grammars) -> None:
    chance, line, compared = random.Random(5), empty_line(), 0
    for walk in range(3000):
        constraint = grammars.compile(SPECS[walk % len(SPECS)])
        automaton, matcher, state = constraint.automaton, constraint.make_matcher(), 0
        assert automaton is not None
        for _ in range(20):
            matcher.fill(line)
            compared += 1
            assert (line == automaton.masks[state]).all(), (SPECS[walk % len(SPECS)].text, state)
            legal = [token for token in legal_ids(line) if token != EOS]
            if not legal:
                break
            token = chance.choice(legal)
            matcher.advance(token)
            state = int(automaton.next_state[state, automaton.classes[token]])
    assert compared > 20_000


def test_a_transition_that_is_not_legal_stays(grammars: Grammars) -> None:
    automaton = grammars.compile(choice("red")).automaton
    assert automaton is not None
    for state in range(len(automaton.masks)):
        for token in set(range(len(automaton.classes))) - set(legal_ids(automaton.masks[state])) | {EOS}:
            assert automaton.next_state[state, automaton.classes[token]] == state


@pytest.mark.parametrize(
    "spec",
    [
        regex(".{0,1000}"),
        regex("(a|b)*a(a|b){20}"),
        regex("((((a{1,30}){1,30}){1,30}){1,30})"),
        regex("(ab|cd)*" * 1000),
        schema(type="string", maxLength=1024),
    ],
    ids=lambda spec: spec.text[:40],
)
def test_what_is_too_large_falls_back_visibly(grammars: Grammars, spec: GrammarSpec) -> None:
    with pytest.raises(TooLarge):
        compile_automaton(spec, SPELLING, 1 << 30)
    constraint = grammars.compile(spec)
    assert constraint.automaton is None and constraint.too_large
    line = empty_line()
    constraint.make_matcher().fill(line)
    assert legal_ids(line)


def test_the_memory_budget_is_kept() -> None:
    spec = schema(type="string", maxLength=40)
    automaton = compile_automaton(spec, SPELLING, 1 << 24)
    assert len(automaton.masks) < MAX_STATES
    assert compile_automaton(spec, SPELLING, 2 * automaton.num_words).num_words == automaton.num_words
    for words in (automaton.num_words - 1, automaton.num_words // 2, automaton.masks.size, 1):
        with pytest.raises(TooLarge):
            compile_automaton(spec, SPELLING, words)


NOT_REGULAR = [
    GrammarSpec("lark", 'start: "a"'),
    schema(),
    schema(type="object"),
    schema(type="string", format="date"),
    schema(type="number", minimum=1),
    schema(type="integer", multipleOf=3),
    schema(type="array"),
    schema(allOf=[{"type": "integer"}]),
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    schema(type="string", pattern="a", maxLength=3),
    schema(type="string", pattern=r"\s"),
    schema(enum=[1.5]),
    schema(type=5),
    schema(type=["integer", ["null"]]),
    schema(type="object", properties=5, additionalProperties=False),
    schema(type="object", properties={}, required=5, additionalProperties=False),
    schema(enum=5),
    *map(
        regex, ["a*?", "(?i)a", "^a", "a$", r"\bx", "[[:alpha:]]", "[a&&b]", r"\p{L}", "(", "a{2", "a**", "[z-a]", "]"]
    ),
]


@pytest.mark.parametrize("spec", NOT_REGULAR, ids=str)
def test_other_grammars_have_no_automaton(spec) -> None:
    spec = GrammarSpec("json_schema", json.dumps(spec)) if isinstance(spec, dict) else spec
    with pytest.raises(NotRegular):
        compile_automaton(spec, SPELLING, MAX_WORDS)


def matches(dfa: Dfa, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = int(dfa.next_state[state, dfa.byte_class[byte]])
        if state < 0:
            return False
    return bool(dfa.accepting[state])


PATTERNS = [
    r"a*b|c{2,4}",
    r"[^a-c]x?",
    r"\d{4}-\d\d",
    r"(ab|a)(bc|c)?",
    r"[\w.-]+@[a-z]{2,3}",
    ".\u00e9?",
    r"a{0}",
    r"(?:a|b){3,}",
    r"\x61\u0062[\u{e0}-\u{1f600}]",
    r"\D\W\S",
    r"[]a]",
    r"()",
    r"a||b",
    r"\/\-\.",
]


@fuzz
@given(st.sampled_from(PATTERNS), st.text("abcx12-\u00e9.@\n\U0001f600_] /", max_size=8))
def test_an_automaton_matches_as_python_does(pattern: str, text: str) -> None:
    try:
        dfa = build_dfa(parse_regex(pattern), MAX_STATES)
    except NotRegular:
        assert pattern == r"[]a]"
        return
    twin = pattern.replace(r"\u{e0}", "\u00e0").replace(r"\u{1f600}", "\U0001f600")
    assert matches(dfa, text) == bool(re.fullmatch(twin, text, re.ASCII)), (pattern, text)


BOUNDS = st.none() | st.integers(-15, 15) | st.integers(-3000, 3000) | st.integers(-(10**15), 10**15)


@fuzz
@given(BOUNDS, BOUNDS, st.lists(st.integers(-4000, 4000), max_size=20))
def test_a_range_holds_its_integers_and_no_other_text(low: int | None, high: int | None, others: list[int]) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    bounds = {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    dfa = build_dfa(parse_schema({"type": "integer", **bounds}), MAX_STATES)
    for value in (*others, *(bound + step for bound in bounds.values() for step in (-10, -1, 0, 1, 10))):
        assert matches(dfa, str(value)) == ((low is None or low <= value) and (high is None or value <= high)), value
    assert not any(matches(dfa, text) for text in ("", "-", "01", "-01", "1a", "+1"))


@pytest.mark.parametrize("pattern", ["ab", "^ab", "ab$", "^ab$", r"a\$", "^a|b", "a|b"])
def test_patterns_search(pattern: str) -> None:
    if pattern == "^a|b":
        with pytest.raises(NotRegular):
            parse_search(pattern)
        return
    dfa = build_dfa(parse_search(pattern), MAX_STATES)
    for text in ("ab", "xab", "abx", "xaby", "a$", "b", "x", ""):
        assert matches(dfa, text) == bool(re.search(pattern, text)), (pattern, text)


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_utf8_sequences_spell_the_range_and_nothing_else(a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    sequences = utf8_sequences(low, high) if not 0xD800 <= low <= high <= 0xDFFF else []
    spelled = sum(int(np.prod([last - first + 1 for first, last in spans])) for spans in sequences)
    surrogates = max(0, min(high, 0xDFFF) - max(low, 0xD800) + 1)
    assert spelled == high - low + 1 - surrogates
    for spans in sequences:
        for edge in (bytes(first for first, _ in spans), bytes(last for _, last in spans)):
            assert low <= ord(edge.decode()) <= high


def test_every_token_is_spelled_as_the_library_spells_it(grammars: Grammars) -> None:
    tokens = grammars.vocabulary().tokens
    for token, length in enumerate(SPELLING.lengths):
        if length and SPELLING.bytes[token, 0] != 0xFF:  # never part of a text; the library keeps it for itself
            assert bytes(SPELLING.bytes[token, :length]) == tokens.decode_bytes([token])


def test_a_choice_is_what_it_says(grammars: Grammars) -> None:
    letters = Letters(grammars)
    constraint = grammars.compile(SPECS[0])
    for text in json.loads(SPECS[0].text):
        assert letters.accepts(constraint, text)
        assert not letters.accepts(constraint, text[:-1] or "x")
        assert not letters.accepts(constraint, text + "e")
