"""Constrained answers through every door of the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import doors
import pytest
from doors import DOORS, ServerError

from photon_backend.serve import Server

SCENE = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "gr\u00fcn"]}, "count": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95}}}
FREE |= {"required": ["n"], "maxProperties": 1}


def is_scene(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["color", "count"] and value["color"] in ("red", "gr\u00fcn") and 0 <= value["count"] <= 20


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "choice": ({"choice": ["red", "gr\u00fcn", "blue"]}, lambda text: text in ("red", "gr\u00fcn", "blue")),
    "regex": ({"regex": "[0-9]{2}:[0-9]{2}"}, re.compile(r"\d\d:\d\d").fullmatch),
    "json_schema": ({"json_schema": json.dumps(SCENE)}, is_scene),
    "host matcher": ({"json_schema": json.dumps(FREE)}, lambda text: json.loads(text)["n"] % 5 == 0),
    "grammar": ({"grammar": 'start: "yes" | "no, " /[a-z]{3}/'}, re.compile("yes|no, [a-z]{3}").fullmatch),
    "reasoning": ({"choice": ["yes", "no"], "reasoning": True, "max_tokens": 20}, lambda text: text in ("yes", "no")),
}
BAD = {
    "json_schema": ({"json_schema": '{"not": {}}'}, "'not'"),
    "regex": ({"regex": "("}, "unclosed group"),
    "choice": ({"choice": '["a", ""]'}, "empty"),
    "grammar": ({"grammar": "start: b"}, "grammar"),
    "two": ({"regex": "a", "choice": ["a"]}, "cannot be combined"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_answers_satisfy_their_constraint(server: Server, pictures: list[bytes], name: str, door: str) -> None:
    options, is_satisfied = CONSTRAINTS[name]
    request = {"task": "query", "text_input": "What?", "temperature": 1, "top_p": 1, "seed": 3} | options
    answer = DOORS[door](server, image=pictures[1], **request)
    assert answer.finish_reason == "stop" and is_satisfied(answer.text)
    streamed = doors.grpc_stream(server, image=pictures[1], stream=True, **request)
    assert streamed.text == answer.text and streamed.finish_reason == "stop"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_kept_is_refused(server: Server, name: str, door: str) -> None:
    options, words = BAD[name]
    with pytest.raises(ServerError, match=r"\[INVALID_ARG\]") as caught:
        DOORS[door](server, task="query", text_input="What?", **options)
    assert words in str(caught.value)


def test_status_counts_both_classes(server: Server, pictures: list[bytes]) -> None:
    before = doors.settled(server)
    for options in (CONSTRAINTS["choice"][0], CONSTRAINTS["host matcher"][0]):
        doors.grpc_stream(server, task="query", text_input="What?", image=pictures[0], **options)

    def counted() -> bool:
        now = doors.status(server)
        return all(now[name] == before[name] + 1 for name in ("constrained_device", "constrained_host"))

    doors.wait_until(counted, 30, "status")
