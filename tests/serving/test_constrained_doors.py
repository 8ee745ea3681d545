"""Constrained answers through every door of the real server, the client and its command line."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import DOORS, ServerError, wait_until
from photon_client import AsyncClient, Client, InvalidArgument
from test_numbers import Scrape

from photon_backend.serve import Server

PHOTON = str(Path(sys.executable).parent / "photon")
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


QUERY = {"task": "query", "text_input": "What?"}
COMBINED: dict[str, tuple[dict[str, Any], str, Callable[[str], Any]]] = {  # options, reason, text
    "caption": ({"task": "caption", "length": "short", "json_schema": json.dumps(SCENE)}, "stop", is_scene),
    "no picture": ({**QUERY, "image": None, "choice": ["yes", "no"]}, "stop", lambda text: text in ("yes", "no")),
    "greedy": ({**QUERY, "regex": "[0-9]{3}", "temperature": 0}, "stop", re.compile(r"\d{3}").fullmatch),
    "stop": ({**QUERY, "regex": "[a-f]{4}END[0-9]{9}", "stop": ["END"]}, "stop", re.compile("[a-f]{4}").fullmatch),
    "cut": ({**QUERY, "regex": "[a-f]{400}", "max_tokens": 3}, "length", re.compile("[a-f]{3,399}").fullmatch),
    "cut matcher": ({**QUERY, "json_schema": '{"type":"object"}', "max_tokens": 1}, "length", re.compile("{.?").match),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", COMBINED)
def test_constraints_combine(server: Server, pictures: list[bytes], name: str, door: str) -> None:
    """With either task, without a picture, with a stop string; and one that max_tokens cuts says so."""
    options, reason, is_satisfied = COMBINED[name]
    request = {"image": pictures[2], "temperature": 1.5, "top_p": 1, "seed": 5} | options
    answer = DOORS[door](server, **request)
    assert answer.finish_reason == reason and is_satisfied(answer.text), answer.text
    streamed = doors.grpc_stream(server, stream=True, **request)
    assert streamed.text == answer.text and streamed.finish_reason == reason


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_client_and_its_command_line(server: Server, pictures: list[bytes], tmp_path: Path, name: str) -> None:
    options, is_satisfied = CONSTRAINTS[name]
    options = {"temperature": 0} | options
    with Client(server.grpc_url) as client:
        answer = client.query(pictures[1], "What?", **options)
        assert answer["finish_reason"] == "stop" and is_satisfied(answer["answer"])
        with pytest.raises(InvalidArgument, match="'not'"):
            client.caption(pictures[1], json_schema={"not": {}})

    async def ask() -> dict[str, Any]:
        async with AsyncClient(server.grpc_url) as client:
            return await client.query(pictures[1], "What?", **options)

    assert asyncio.run(ask())["answer"] == answer["answer"]
    file = tmp_path / "picture.png"
    file.write_bytes(pictures[1])
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]
    command = [PHOTON, "query", str(file), "What?", "--json", "--url", server.grpc_url]
    done = subprocess.run([*command, *(part for word in words for part in ("--option", word))], capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout)["answer"] == answer["answer"], done


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_kept_is_refused(server: Server, name: str, door: str) -> None:
    options, words = BAD[name]
    with pytest.raises(ServerError, match=r"\[INVALID_ARG\]") as caught:
        DOORS[door](server, task="query", text_input="What?", **options)
    assert words in str(caught.value)


def test_status_and_metrics_count_the_classes(server: Server, pictures: list[bytes]) -> None:
    """One regular grammar more is too large for tables: a fallback, which is to be seen from outside."""
    names = ("constrained_device", "constrained_host", "constrained_fallback")

    def counted() -> list[tuple[float, float]]:
        now, metrics = doors.status(server), Scrape(server)
        return [(now[name], metrics[f'{name}_total{{engine="0"}}']) for name in names]

    doors.settled(server)
    wait_until(lambda: all(said == shown for said, shown in counted()), 60, "metrics that know what status knows")
    before = counted()
    for options in (CONSTRAINTS["choice"][0], CONSTRAINTS["host matcher"][0], {"regex": ".{5,1000}", "max_tokens": 3}):
        doors.grpc_stream(server, task="query", text_input="What?", image=pictures[0], **options)
    expected = [(said + more, shown + more) for (said, shown), more in zip(before, (1, 2, 1), strict=True)]
    wait_until(lambda: counted() == expected, 60, "status and metrics")


def test_a_large_grammar_is_looked_at_beside_all_others(server: Server, pictures: list[bytes]) -> None:
    """To check one takes half a second: a request that came after many of them does not wait for all."""
    number, before = 8, doors.settled(server)["submitted"]

    def ask(i: int) -> doors.Answer:
        schema = json.dumps({"enum": [[i, str(n)] for n in range(3500)]}, separators=(",", ":"))
        return doors.infer(server, image=pictures[0], json_schema=schema, max_tokens=1, **QUERY)

    with ThreadPoolExecutor(number) as threads:
        slow = [threads.submit(ask, i) for i in range(number)]
        wait_until(lambda: doors.status(server)["submitted"] > before, 60, "the first one at the engine")
        doors.infer(server, image=pictures[0], max_tokens=1, **QUERY)
        submitted = doors.status(server)["submitted"] - before
        assert all(future.result(timeout=120).finish_reason == "length" for future in slow)
    assert submitted < number, "all of them were checked first"
    assert doors.settled(server)["submitted"] - before == number + 1
