"""The library's known traps, each through our own interface."""

from __future__ import annotations

import json

import numpy as np
import pytest

from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.constraint import fill_lines
from photon_backend.grammar.matcher import BUDGET_S, COPIES, PROTOTYPES, LibraryMatcher, Prototypes
from photon_backend.protocol import GrammarSpec, PhotonError
from tests.unit.grammar_parts import CONFIG, EOS, Letters, empty_line, is_legal, legal_ids, make_grammars, make_spelling

SPELLING = make_spelling()
ANY_STRING = GrammarSpec("json_schema", '{"type":"string"}')


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars(0)


@pytest.fixture(scope="module")
def letters(grammars: Grammars) -> Letters:
    return Letters(grammars)


def matcher_of(grammars: Grammars, kind: str, text: str) -> LibraryMatcher:
    matcher = grammars.compile(GrammarSpec(kind, text)).make_matcher()  # type: ignore[arg-type]
    assert isinstance(matcher, LibraryMatcher)
    return matcher


def mask_after(matcher: LibraryMatcher, tokens: list[int]) -> np.ndarray:
    for token in tokens:
        matcher.advance(token)
    line = empty_line()
    matcher.fill(line)
    return line


@pytest.mark.parametrize("text", [".*", "[^a]*", r"(?s:.*)", "<.*>"])
def test_control_and_added_tokens_and_padding_are_never_legal(grammars, letters, text) -> None:
    matcher = matcher_of(grammars, "regex", text)
    line = mask_after(matcher, letters.tokens("<") if text[0] == "<" else [])
    legal = set(legal_ids(line)) - {EOS}
    assert legal and all(SPELLING.lengths[token] for token in legal)
    spelled = {letters.token_of[ord(c)] for c in "bcxyz0"}
    assert spelled <= legal
    assert len(line) * 32 >= CONFIG.text.vocab_size > max(legal)


def test_control_tokens_are_not_legal_inside_strings(grammars, letters) -> None:
    string = grammars.compile(ANY_STRING)
    for name in ("<|coord|>", "<|eos|>", "<note>"):
        assert letters.accepts(string, json.dumps(name))  # the text is fine, spelled with ordinary tokens
    line = mask_after(string.make_matcher(), letters.tokens('"<|'))
    assert not is_legal(line, EOS) and all(SPELLING.lengths[token] for token in legal_ids(line))


def test_eos_is_legal_exactly_where_the_answer_may_end(grammars, letters) -> None:
    for text, may_end in (("", False), ("r", False), ("red", True), ("redd", False), ("reddish", True)):
        matcher = matcher_of(grammars, "choice", '["red","reddish"]')
        assert is_legal(mask_after(matcher, letters.tokens(text)), EOS) == may_end
    assert legal_ids(mask_after(matcher, [])) == [EOS]


def test_utf8_goes_across_tokens(grammars, letters) -> None:
    face = "\U0001f600"
    constraint = grammars.compile(GrammarSpec("choice", json.dumps([face, "\U0001f601", "\u00e9"])))
    assert letters.accepts(constraint, face) and not letters.accepts(constraint, "\U0001f602")
    head = letters.tokens(face)[:3]
    after = legal_ids(mask_after(constraint.make_matcher(), head))
    assert {SPELLING.bytes[token, 0] for token in after} == {0x80, 0x81}


def test_whitespace_is_not_legal_between_the_tokens_of_json(grammars, letters) -> None:
    constraint = grammars.compile(GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'))
    assert letters.accepts(constraint, '{"a":1}') and not letters.accepts(constraint, '{"a": 1}')
    assert letters.accepts(constraint, '{"a":1,"b c":[1,{"d":null}]}')
    quoted = '"%json {}" | /%json [1]/ | "\\"%json 1" %json\n {"const":{"a":"%json {}"}} | "b" %json true  // %json {}'
    constraint = grammars.compile(GrammarSpec("lark", f"start: {quoted}"))
    for text in ("%json {}", "%json 1", '"%json 1{"a":"%json {}"}', 'b{"a":[1,2]}'):
        assert letters.accepts(constraint, text), text
    for text in ('"%json 1{"a": "%json {}"}', 'b{"a":[1, 2]}', 'b {"a":[1,2]}', "b\n1"):
        assert not letters.accepts(constraint, text), text


PATTERNS = [  # and whether quote, backslash and line feed match
    ('^[^"]$', "\\\n"),
    ("^[^\\\\]$", '"\n'),
    ('^[^"\\\\\\n]$', ""),
    ('^(?:[^",]|,,)$', "\\\n"),
    ("^[\\x00-\\x20]$", "\n"),
    ("^[^!-~]$", "\n"),
    ('^(\\t|[^"\\t])$', "\\\n"),
    ("^\\P{P}$", "\n"),
    ("^[^\\p{P}[a-z]]$", "\n"),
    ('^[^]"]$', "\\\n"),
    ("^[^a]$", '"\\\n'),
    ("^[\\s\\S]$", '"\\\n'),
    ("^\\[?[#-z]$", "\\"),
]


@pytest.mark.parametrize(("pattern", "matching"), PATTERNS, ids=[pattern for pattern, _ in PATTERNS])
def test_a_class_without_quote_or_backslash_takes_neither(grammars, letters, pattern, matching) -> None:
    """The library alone accepts them where the class holds all control characters."""
    value = {"type": "string", "pattern": pattern}
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    for kind, head, schema, tail in (
        ("json_schema", "", value, ""),
        ("json_schema", "[", {"type": "array", "items": {"anyOf": [value, {"type": "null"}]}}, "]"),
        ("json_schema", "{", named, ":null}"),
        ("lark", "x", value, ""),
    ):
        text = json.dumps(schema)
        constraint = grammars.compile(GrammarSpec(kind, f'start: "x" %json {text}' if kind == "lark" else text))
        accepted = {c for c in '"\\\n' if letters.accepts(constraint, head + json.dumps(c) + tail)}
        assert accepted == set(matching), schema


def test_an_illegal_token_ends_its_matcher_only(grammars, letters) -> None:
    constraint = grammars.compile(GrammarSpec("choice", '["red","blue"]'))
    first, second = constraint.make_matcher(), constraint.make_matcher()
    line = mask_after(first, letters.tokens("x"))
    assert not line.any() and first.failure  # the library itself would say: eos is legal
    assert not second.failure and letters.accepts(constraint, "red")
    assert is_legal(mask_after(second, letters.tokens("re")), letters.token_of[ord("d")])


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("lark", "start: /[^\\x00-\\u{10ffff}]/"),
        GrammarSpec("lark", 'start: start "a"'),
        GrammarSpec("regex", "[^\\s\\S]"),
        GrammarSpec("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
        GrammarSpec("json_schema", '{"type":"object","properties":{"a":false},"required":["a"]}'),
        GrammarSpec("json_schema", '{"type":"string","pattern":"^a$","minLength":2}'),
    ],
    ids=lambda spec: spec.text[:40],
)
def test_an_empty_language_is_refused(grammars, spec) -> None:
    with pytest.raises(PhotonError) as caught:
        grammars.compile(spec)
    assert caught.value.code == "INVALID_ARG"
    assert any(words in str(caught.value) for words in ("no answer satisfies it", "Unsatisfiable schema: "))


def test_lines_filled_together_are_those_filled_alone(grammars, letters) -> None:
    texts = ["", "r", "red", "b", "x"]
    kinds = [GrammarSpec("choice", '["red","blue"]'), ANY_STRING, GrammarSpec("regex", "[a-z]*")]
    mask = np.full((40, len(empty_line())), 7, np.int32)
    pairs, alone = [], {}
    for line, (text, spec) in enumerate((text, spec) for text in texts for spec in kinds):
        matcher, twin = (grammars.compile(spec).make_matcher() for _ in range(2))
        for token in letters.tokens(text):
            matcher.advance(token)
        alone[2 * line] = mask_after(twin, letters.tokens(text))
        pairs.append((matcher, 2 * line))
    fill_lines(pairs, mask)
    for line in range(40):
        assert (mask[line] == alone.get(line, np.full_like(mask[line], 7))).all()


def test_a_mask_above_the_budget_ends_its_matcher_only(grammars, letters, monkeypatch) -> None:
    first, second = (matcher_of(grammars, "choice", '["red","blue"]') for _ in range(2))
    pairs, mask = [(first, 0), (second, 1)], np.zeros((2, len(empty_line())), np.int32)
    monkeypatch.setattr("photon_backend.grammar.matcher.SLOW_BATCH_S", 0.0)
    fill_lines(pairs, mask)
    assert mask.any(axis=1).all() and not first.failure and first._watched and second._watched
    monkeypatch.setattr("photon_backend.grammar.matcher.ALLOWANCE_S", 0.0)
    first._spent_s = BUDGET_S
    fill_lines(pairs, mask)
    assert not mask[0].any() and first.failure_code == "INVALID_ARG" and "too slow to follow" in first.failure
    assert not second.failure and is_legal(mask[1], letters.token_of[ord("r")])


def test_masks_alone_count_for_the_budget(grammars, letters) -> None:
    """Advancing is quick in this grammar: what ends it is its masks, which are computed on many threads at first."""
    text = "start: a+ d{2000}\na: b+\nb: c+\nc: d+\nd: /[ -}]/"
    matcher, mask = matcher_of(grammars, "lark", text), np.zeros((1, len(empty_line())), np.int32)
    matcher._watched = True  # as after a slow batch
    for _ in range(400):
        fill_lines([(matcher, 0)], mask)
        if matcher.failure:
            break
        matcher._watched = True
        matcher._matcher.consume_token(letters.token_of[ord("x")])
    assert matcher.failure_code == "INVALID_ARG" and "too slow" in matcher.failure


def test_a_hot_grammar_is_spread_over_prototypes(grammars) -> None:
    prototypes = Prototypes(ANY_STRING, grammars.vocabulary())
    matchers = [prototypes.matcher() for _ in range(COPIES * (PROTOTYPES + 2))]
    assert len(prototypes._prototypes) == PROTOTYPES
    lines = [mask_after(matcher, []) for matcher in matchers]
    assert all((line == lines[0]).all() for line in lines)


def test_a_prototype_is_asked_before_it_is_copied(grammars, monkeypatch) -> None:
    """So its lexer knows the first states, and the first mask of a copy is as quick as the later ones."""
    asked = []
    fill = LibraryMatcher.fill

    def counting(matcher, line) -> None:
        asked.append(matcher._matcher)
        fill(matcher, line)

    monkeypatch.setattr(LibraryMatcher, "fill", counting)
    prototypes = Prototypes(ANY_STRING, grammars.vocabulary())
    for _ in range(COPIES + 1):
        prototypes.matcher()
    assert asked == prototypes._prototypes and len(asked) == 2
