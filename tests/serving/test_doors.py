"""The same request through every door gives the same answer, whole or streamed, however the picture is spelled."""

from __future__ import annotations

import base64
import json

import doors
import numpy as np
import pytest
from doors import DOORS, Answer

from photon_backend.serve import Server

REQUESTS = {
    "query": {"task": "query", "text_input": "What is this?", "max_tokens": 12, "temperature": 0},
    "reasoning": {"task": "query", "text_input": "Why?", "reasoning": True, "max_tokens": 8, "temperature": 0},
    "caption": {"task": "caption", "length": "short", "max_tokens": 12, "temperature": 0},
    "sampled": {"task": "caption", "max_tokens": 12, "temperature": 1, "top_p": 0.9, "seed": 7},
    "detect": {"task": "detect", "text_input": "circle", "max_objects": 3},
    "point": {"task": "point", "text_input": "circle", "max_objects": 3},
    "stop": {"task": "caption", "max_tokens": 40, "temperature": 0, "stop": ["hing", "an"]},
    "spatial_refs": {
        "task": "query",
        "text_input": "What is here?",
        "spatial_refs": [[0.5, 0.25], [0.1, 0.2, 0.3, 0.4]],
        "max_tokens": 8,
        "temperature": 0,
    },
}


@pytest.fixture(scope="module")
def expected(server: Server, pictures: list[bytes]) -> dict[str, Answer]:
    """Each request alone, through the gRPC stream."""
    return {name: doors.grpc_stream(server, image=pictures[3], **request) for name, request in REQUESTS.items()}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", REQUESTS)
def test_same_answer_through_every_door(
    server: Server, pictures: list[bytes], expected: dict[str, Answer], name: str, door: str
) -> None:
    answer = DOORS[door](server, image=pictures[3], **REQUESTS[name])
    assert answer.same_result(expected[name])
    assert len(answer.pieces) == 1
    assert answer.finish_reason in ("stop", "length")
    assert answer.usage and answer.usage["input_tokens"] > 100 and answer.usage["output_tokens"] > 0
    assert set(answer.usage) >= {
        "request_id",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "queue_ms",
        "preprocess_ms",
        "ttft_ms",
        "decode_ms",
    }


@pytest.mark.parametrize("door", ["grpc_stream", "generate_stream"])
@pytest.mark.parametrize("name", REQUESTS)
def test_streamed_parts_make_the_whole(
    server: Server, pictures: list[bytes], expected: dict[str, Answer], name: str, door: str
) -> None:
    answer = DOORS[door](server, image=pictures[3], stream=True, **REQUESTS[name])
    whole = expected[name]
    assert answer.objects == whole.objects and answer.points == whole.points
    assert answer.finish_reason == whole.finish_reason
    if whole.objects is None and whole.points is None:
        assert answer.text == whole.text
    else:
        key = "objects" if whole.objects is not None else "points"
        assert [json.loads(line) for line in answer.text.splitlines()] == json.loads(whole.text)[key]
    if name != "reasoning":
        assert len(answer.pieces) > 1


def test_spatial_outputs(expected: dict[str, Answer]) -> None:
    boxes = expected["detect"].objects
    assert boxes and all(0 <= x0 <= x1 <= 1 and 0 <= y0 <= y1 <= 1 for x0, y0, x1, y1 in boxes)
    parsed = json.loads(expected["detect"].text)["objects"]
    assert np.allclose([[o["x_min"], o["y_min"], o["x_max"], o["y_max"]] for o in parsed], boxes)
    points = expected["point"].points
    assert points and all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spelling", ["base64", "data URL"])
def test_picture_spelled_as_text(
    server: Server, pictures: list[bytes], expected: dict[str, Answer], door: str, spelling: str
) -> None:
    text = base64.b64encode(pictures[3]).decode()
    image = text if spelling == "base64" else f"data:image/png;base64,{text}"
    assert DOORS[door](server, image=image, **REQUESTS["caption"]).same_result(expected["caption"])


@pytest.mark.parametrize("door", DOORS)
def test_query_without_picture(server: Server, door: str) -> None:
    answer = DOORS[door](server, text_input="Hello?", max_tokens=6, temperature=0)
    assert answer.text and answer.usage["input_tokens"] < 30  # type: ignore[index]


def test_generate_on_photon_unary(server: Server, pictures: list[bytes], expected: dict[str, Answer]) -> None:
    answer = doors.generate(server, model="photon_unary", image=pictures[3], **REQUESTS["caption"])
    assert answer.same_result(expected["caption"])


def test_numeric_strings_as_parameters(server: Server, pictures: list[bytes], expected: dict[str, Answer]) -> None:
    answer = doors.generate(server, image=pictures[3], task="caption", length="short", max_tokens="12", temperature="0")
    assert answer.same_result(expected["caption"])


def test_second_request_finds_the_picture_cached(server: Server, pictures: list[bytes]) -> None:
    first, second = (doors.generate(server, image=pictures[5], **REQUESTS["caption"]) for _ in range(2))
    assert second.usage["cached_tokens"] > 100 and second.same_result(first)  # type: ignore[index]


def test_status_and_metrics(server: Server) -> None:
    status = doors.status(server)
    assert status["up"] and status["problem"] is None and status["rows"] > 0

    def metrics() -> str:
        with doors.OPENER.open(server.metrics_url, timeout=60) as reply:
            return str(reply.read().decode())

    doors.wait_until(lambda: 'photon_up{engine="0"} 1' in metrics(), 30, "a server that is up says so in its metrics")
    text = metrics()
    for name in ("photon_tokens_total", "photon_running", "photon_pages_in_use", "photon_steps_overlapped_total"):
        assert f'{name}{{engine="0"}}' in text
