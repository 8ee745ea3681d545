"""The JSON-Schema-Test-Suite through our own interface: no value that a schema forbids may ever be an answer.

A schema that cannot be promised is refused, and a value may be spelled in one way only, so some valid values are not
reachable. Both are counted; the numbers are part of the test, so a change of them is seen.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.matcher import validate
from photon_backend.protocol import GrammarSpec, PhotonError
from tests.unit.grammar_parts import Letters, make_grammars

SUITE = Path(__file__).parents[1] / "conformance" / "json_schema_test_suite"
EXPECTED = {  # false rejects by file, refused schemas
    "draft2020-12": (
        {"const.json": 5, "enum.json": 4, "format.json": 10, "type.json": 1},
        209,
    ),
    "draft7": (
        {"const.json": 5, "enum.json": 4, "ref.json": 1, "type.json": 1},
        99,
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


@pytest.mark.parametrize("draft", sorted(EXPECTED))
def test_no_forbidden_value_is_accepted(grammars: Grammars, draft: str) -> None:
    letters = Letters(grammars)
    rejects: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for path in sorted((SUITE / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            spec = GrammarSpec("json_schema", json.dumps(group["schema"], ensure_ascii=False))
            try:
                validate(spec)
                constraint = grammars.compile(spec)
            except PhotonError as error:
                assert error.code == "INVALID_ARG" and error.message.startswith("json_schema: ")
                counts["refused"] += 1
                continue
            for test in group["tests"]:
                accepted = [letters.accepts(constraint, text) for text in spellings(test["data"], group["schema"])]
                assert test["valid"] or not any(accepted), (path.name, group["description"], test["description"])
                counts["values"] += 1
                rejects[path.name] += test["valid"] and not any(accepted)
    print(f"{draft}: {dict(counts)}, false rejects {dict(+rejects)}")
    assert counts["values"] > 500
    assert (dict(+rejects), counts["refused"]) == EXPECTED[draft]


def spellings(value: Any, schema: Any) -> set[str]:
    """Compact, with members in their own order and in that of the schema."""
    names = list(property_names(schema))
    ordered = in_order(value, {name: i for i, name in reversed(list(enumerate(names)))})
    return {json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in (value, ordered)}


def property_names(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for inner in schema for name in property_names(inner)]
    if not isinstance(schema, dict):
        return []
    properties = schema.get("properties")
    own = list(properties) if isinstance(properties, dict) else []
    return own + [name for inner in schema.values() for name in property_names(inner)]


def in_order(value: Any, rank: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [in_order(inner, rank) for inner in value]
    if isinstance(value, dict):
        return {name: in_order(value[name], rank) for name in sorted(value, key=lambda n: rank.get(n, len(rank)))}
    return value
