"""What is refused at admission: by name, in one sentence, and without ever reaching the end of a stack."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from photon_backend.grammar.check import MAX_CHARS, MAX_CHOICES
from photon_backend.grammar.matcher import validate
from photon_backend.protocol import GrammarSpec, PhotonError


def schema(value) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def lark(text: str) -> GrammarSpec:
    return GrammarSpec("lark", text)


STRINGS = [{"type": "string", "pattern": f"(.*{chr(97 + i)}.{{{20 + i}}}.*)"} for i in range(26)]  # minutes, once

GOOD = [
    schema(True),
    schema({}),
    schema({"type": "object", "properties": {"not": {"type": "integer"}, "x-guidance": {"const": {"if": 1}}}}),
    schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "title": "n", "default": {"not": 1}}}}),
    schema({"type": "integer", "x-order": 3, "deprecated": True}),
    schema({"oneOf": [{"type": "integer"}, {"type": "string"}]}),
    schema({"anyOf": STRINGS, "title": "one of many"}),
    schema({"allOf": [{"type": "string", "pattern": p} for p in ("^a", "b$")] + [{"format": "email"}]}),
    schema({"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 3600}, "c": {"multipleOf": 1000}}}),
    schema({"allOf": [{"multipleOf": 2.5}, {"multipleOf": 60}], "anyOf": [{"multipleOf": 0.75}, {"type": "null"}]}),
    schema({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    schema({"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5, "title": "exclusiveMaximum"}),
    schema({"type": "integer", "exclusiveMinimum": 1, "maximum": 1099.5}),
    schema({"prefixItems": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]}),
    GrammarSpec("regex", "a/b\\/\n[^x]"),
    GrammarSpec("choice", json.dumps(["a", '"', "\\", "\u00e9\U0001f600", "a\nb", "/", "\x7f\x00"])),
    lark('start: "a" b+\nb: /[0-9]+/ | "x"'),
    lark('%llguidance {}\nstart: %json {"type": "integer"}'),
]
REFUSED = [
    (schema(False), "false"),
    (schema({"not": {}}), "'not'"),
    (schema({"properties": {"a": {"items": {"uniqueItems": True}}}}), "'uniqueItems'"),
    (schema({"anyOf": [{"type": "integer"}, {"maxlength": 3}]}), "'maxlength'"),
    (schema({"$defs": {"a": {"if": {}}}}), "'if'"),
    (schema({"type": "string", "nullable": True}), "'nullable'"),
    (schema({"type": "string", "x-guidance": {"lenient": True}}), "'x-guidance'"),
    (schema({"type": "string", "contentEncoding": "base64"}), "'contentEncoding'"),
    (schema({"type": "strin"}), "strin"),
    (schema({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}), "'exclusiveMinimum'"),  # 3 would be legal
    (schema({"items": {"minimum": -0.25, "exclusiveMaximum": 0.0}}), "'exclusiveMaximum'"),
    (schema({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]}), "'exclusiveMinimum'"),
    (lark('start: %json {"exclusiveMinimum": 1e999, "maximum": 5}'), "grammar"),
    (schema({"exclusiveMinimum": 10**400, "maximum": 1.5}), "json_schema"),
    (schema({"type": "string", "format": "foo"}), "foo"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (schema({"type": "string", "pattern": "("}), "regex"),
    (schema({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "oneOf"),
    (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    (schema({"enum": []}), "empty"),
    (schema({"$ref": "https://example.com/schema.json"}), "https://example.com/schema.json"),
    (schema({"$ref": "#/$defs/none"}), "/$defs/none"),
    (schema({"properties": 5}), "properties"),
    (schema({"properties": {"a": {"$ref": "#", "$id": "x"}}}), "'$id'"),
    (GrammarSpec("json_schema", "[" * 900 + "]" * 900), "schema"),
    (GrammarSpec("json_schema", '{"items":' * 900 + "{}" + "}" * 900), "nested too deeply|recursion"),
    (GrammarSpec("json_schema", '{"default":' + "[" * 5000 + "]" * 5000 + "}"), "nested too deeply"),
    (schema({"allOf": STRINGS}), "'pattern'"),
    (schema({"allOf": [{"properties": {"a": s}} for s in STRINGS]}), "'pattern'"),
    (schema({"type": "object", "properties": {"a": {"anyOf": STRINGS, "minLength": 3}}}), "'anyOf'"),
    (schema({"$defs": dict(enumerate(STRINGS)), "properties": {"a": {"$ref": "#/$defs/0", "pattern": "b"}}}), "'$ref'"),
    (schema({"patternProperties": {f"^{i:03d}(.*a.{{20}}.*)$": {} for i in range(200)}}), "'patternProperties'"),
    (schema({"type": "integer", "multipleOf": 99_999_989}), "'multipleOf'"),
    (schema({"multipleOf": 10**400}), "'multipleOf'"),
    (schema({"items": {"multipleOf": 1.23456}}), "'multipleOf'"),
    (schema({"properties": {"a": {"multipleOf": 7001}, "b": {"multipleOf": 7002}}}), "'multipleOf'"),
    (schema({"anyOf": [{"type": "integer", "multipleOf": n} for n in (1009, 1013)]}), "'multipleOf'"),
    (schema({"allOf": [{"multipleOf": 0.001}, {"multipleOf": 11}]}), "'multipleOf'"),
    (schema({"multipleOf": True}), "multipleOf"),
    (schema({"type": "string", "format": "unknown"}), "'format'"),
    (schema({"type": "string", "format": "colour"}), "colour"),
    *((schema({"pattern": pattern}), "'pattern'") for pattern in ('[^"]|\\x01', "\\u0001", "\\x{1}", "a\x01")),
    (schema({"patternProperties": {"^\\u{01}": {}}}), "'patternProperties'"),
    (lark('start: %json {"type": "integer", "multipleOf": 99999989}'), "'multipleOf'"),
    (lark('start: %json {"multipleOf": Infinity}'), "grammar"),
    (lark('start: "x" | %json\n ' + json.dumps({"allOf": STRINGS})), "'pattern'"),
    (lark('start: %json {"not": {}}'), "'not'"),
    (lark('start: %json "a"%json'), "%json must be followed"),
    (lark("start: %json " + '{"items":' * 900 + "{}" + "}" * 900), "nested too deeply"),
    (GrammarSpec("regex", "("), "unclosed group"),
    (GrammarSpec("regex", r"\bx"), "lookarounds"),
    (GrammarSpec("regex", "(" * 2000 + ")" * 2000), "regex"),
    (GrammarSpec("choice", "[]"), str(MAX_CHOICES)),
    (GrammarSpec("choice", '["a",""]'), "empty"),
    (GrammarSpec("choice", json.dumps(["a"] * (MAX_CHOICES + 1))), str(MAX_CHOICES)),
    (lark("start: b"), "b"),
    (lark("start: /a("), "lexer error"),
    (lark('start: "a" <|coord|>'), "tokens by name"),
    (lark('start: "a" <[0]>'), "tokens by name"),
    (lark('%llguidance { "allow_invalid_utf8": true }\nstart: "a"'), "%llguidance"),
    (lark('start[temperature=0.5]: "a"'), "temperature"),
    (lark('start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
    (lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    *((GrammarSpec(kind, " " * (most + 1)), str(most)) for kind, most in MAX_CHARS.items()),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("spec", GOOD, ids=lambda spec: spec.text[:50])
def test_what_can_be_promised_is_accepted(spec: GrammarSpec) -> None:
    validate(spec)


@pytest.mark.parametrize(("spec", "names"), REFUSED, ids=lambda value: getattr(value, "text", value)[:50])
def test_what_cannot_be_promised_is_refused_by_name(spec: GrammarSpec, names: str) -> None:
    with pytest.raises(PhotonError) as caught:
        validate(spec)
    assert any(name in caught.value.message for name in names.split("|"))
    option = "grammar" if spec.kind == "lark" else spec.kind
    assert caught.value.code == "INVALID_ARG" and caught.value.message.startswith(f"{option}: ")
    message = caught.value.message
    assert message.isprintable() and message.isascii() and len(message) < 300 and "coerce_one_of" not in message


CHAINS = """
import json, sys, threading
from photon_backend.grammar.matcher import validate
from photon_backend.protocol import GrammarSpec, PhotonError
rules = lambda n: "start: r0\\n" + "\\n".join(f"r{i}: r{i + 1}" for i in range(n)) + f'\\nr{n}: "a"'
def refs(n, wrap):
    return json.dumps({"$ref": "#/$defs/0", "$defs": {str(i): wrap({"$ref": f"#/$defs/{i + 1}"}) for i in range(n)}
                       | {str(n): {"type": "null"}}})
makers = [
    ("lark", rules), ("lark", lambda n: rules(n).upper().replace("START", "start").replace('"A"', '"a"')),
    ("json_schema", lambda n: refs(n, lambda ref: ref)),
    ("json_schema", lambda n: refs(n, lambda ref: {"type": "object", "allOf": [{"properties": {"a": ref}}]})),
    ("json_schema", lambda n: refs(n, lambda ref: {"type": ["object", "null"], **ref})),
]
def check():
    for kind, make in makers:
        for n in (300, 990, 3000, 9000):
            try:
                validate(GrammarSpec(kind, make(n)))
                print("accepted", kind, n)
            except PhotonError as error:
                print("refused", kind, n)
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


def test_long_chains_never_overflow_a_stack() -> None:
    """In a process of its own: before there were bounds, this killed it."""
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout.count("accepted") >= 5 and done.stdout.count("refused") >= 10


def test_without_the_library_a_grammar_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PhotonError, match="llguidance") as caught:
        validate(GrammarSpec("choice", '["a"]'))
    assert caught.value.code == "UNAVAILABLE"
