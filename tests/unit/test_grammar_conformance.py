"""The JSON-Schema-Test-Suite through our own interface: no value that a schema forbids may ever be an answer.

A schema that cannot be promised is refused, and a value may be spelled in one way only, so some valid values are not
reachable. All are counted and listed in docs/json_schema_suite.md, which this test compares; to write it anew:

    python -m tests.unit.test_grammar_conformance > docs/json_schema_suite.md

Formats bind here, which the required tests do not ask for. Those of the optional tests are listed with what they let
through: a day or a second that no calendar has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from photon_backend.grammar.compiler import Grammars
from photon_backend.grammar.matcher import validate
from photon_backend.protocol import GrammarSpec, PhotonError
from tests.unit.grammar_parts import Letters, make_grammars

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "conformance" / "json_schema_test_suite"
PAGE = ROOT / "docs" / "json_schema_suite.md"
FORMATS = "draft2020-12/optional/format"
PARTS = ("draft2020-12", "draft7", FORMATS)
HEAD = """# JSON-Schema-Test-Suite

What constrained answers make of the suite that comes with jsonschema 4.26.0, through the interface of the server. Made
and compared by `tests/unit/test_grammar_conformance.py`. A schema is refused as a whole, for the reason that the client
is given. What it means is in [grammar.md](grammar.md).
"""


@dataclass
class Result:
    """Of a part of the suite."""

    schemas: int = 0
    values: int = 0  # of the schemas that are not refused
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (reason, file)
    rejected: list[str] = field(default_factory=list)  # valid, and no answer
    accepted: list[str] = field(default_factory=list)  # forbidden, and an answer

    def section(self, name: str) -> str:
        lines = [f"\n## {name}\n"]
        lines.append(
            f"{self.refused.total()} of {self.schemas} schemas are refused. Of the {self.values} values of the others"
        )
        lines.append(
            f"{len(self.accepted)} forbidden ones are accepted, {len(self.rejected)} valid ones cannot be spelled."
        )
        reasons = sorted({reason for reason, _ in self.refused})
        lines += ["\n| refused because | schemas, by file |", "|---|---|"] if reasons else []
        for reason in reasons:
            files = sorted((file, number) for (why, file), number in self.refused.items() if why == reason)
            lines.append(f"| {reason} | {', '.join(f'{file} {number}' for file, number in files)} |")
        for title, values in (("accepted, though forbidden", self.accepted), ("valid, but no answer", self.rejected)):
            lines += [f"\n| {title} | test |", "|---|---|", *values] if values else []
        return "\n".join(lines) + "\n"


def run(grammars: Grammars, part: str) -> Result:
    letters, result = Letters(grammars), Result()
    for path in sorted((SUITE / part).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            result.schemas += 1
            spec = GrammarSpec("json_schema", json.dumps(group["schema"], ensure_ascii=False))
            try:
                validate(spec)
                constraint = grammars.compile(spec)
            except PhotonError as error:
                assert error.code == "INVALID_ARG" and error.message.startswith("json_schema: ")
                result.refused[reason_of(error), path.stem] += 1
                continue
            for test in group["tests"]:
                accepted = [letters.accepts(constraint, text) for text in spellings(test["data"], group["schema"])]
                result.values += 1
                where = f"{path.stem}: {group['description']}, {test['description']}"
                line = f"| `{cell(json.dumps(test['data']))}` | {cell(where)} |"
                if any(accepted) != test["valid"]:
                    (result.rejected if test["valid"] else result.accepted).append(line)
    return result


def reason_of(error: PhotonError) -> str:
    """Without the places that differ from schema to schema."""
    text = error.message.removeprefix("json_schema: ").partition(" is not present in a registry")
    return cell(re.sub(r"'(http|urn)[^']*'", "of another document", text[0]) + (" is not here" if text[1] else ""))


def cell(text: str) -> str:
    return text.replace("|", "\\|")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    grammars = make_grammars()
    return {part: run(grammars, part) for part in PARTS}


@pytest.mark.parametrize("part", PARTS[:2])
def test_no_forbidden_value_is_accepted(results: dict[str, Result], part: str) -> None:
    assert not results[part].accepted and results[part].values > 500


def test_formats_accept_no_more_than_what_no_calendar_has(results: dict[str, Result]) -> None:
    assert results[FORMATS].values > 200
    assert all("leap" in line or "29 days in February" in line for line in results[FORMATS].accepted)


def test_the_page_lists_what_is_refused_and_rejected(results: dict[str, Result]) -> None:
    assert page(results) == PAGE.read_text(encoding="utf-8"), "see the top of this file for how to write it anew"


def page(results: dict[str, Result]) -> str:
    return HEAD + "".join(result.section(part) for part, result in results.items())


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


if __name__ == "__main__":
    everything = make_grammars()
    print(page({part: run(everything, part) for part in PARTS}), end="")
