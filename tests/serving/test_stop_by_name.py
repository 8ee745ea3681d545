"""`cancel` at photon_engine ends one request by the id that its client gave it."""

from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import doors
import pytest
import tritonclient.grpc as triton
from doors import Answer, ServerError, wait_until

from photon_backend.serve import Server

ENDLESS = {"task": "caption", "max_tokens": 700, "temperature": 0}


def command(server: Server, **inputs: str) -> dict[str, Any]:
    given = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [value]} for name, value in inputs.items()]
    document = json.loads(doors.post(server, "/v2/models/photon_engine/infer", {"inputs": given}))
    return json.loads(document["outputs"][0]["data"][0])


def test_one_request_of_a_shared_stream(server: Server, pictures: list[bytes]) -> None:
    replies: queue.Queue[Any] = queue.Queue()
    answers = {"one": Answer(), "two": Answer()}
    doors.settled(server)
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: replies.put(error or result))
        for number, name in enumerate(answers):
            request = {**ENDLESS, "stream": True, "image": pictures[number]}
            client.async_stream_infer("photon", doors.tensors(request), request_id=name)
        wait_until(lambda: doors.status(server)["running"] == 2, 60, "both running")
        assert command(server, command="cancel", request_id="one") == {"request_id": "one"}
        while not all(answer.finish_reason for answer in answers.values()):
            reply = replies.get(timeout=120)
            answers[reply.get_response().id].add(doors.values_of(reply))
        client.stop_stream()
    assert answers["one"].finish_reason == "cancelled" and answers["two"].finish_reason != "cancelled"
    assert answers["one"].usage["request_id"] == "one" and answers["two"].usage["output_tokens"] > 600  # type: ignore[index]


@pytest.mark.parametrize("door", ["infer", "generate"])
def test_over_http(server: Server, pictures: list[bytes], door: str) -> None:
    """The `id` of the request's JSON is its name."""
    request = doors.body({**ENDLESS, "image": pictures[0]})
    path = f"/v2/models/photon/{door}"
    if door == "infer":
        path = "/v2/models/photon_unary/infer"
        inputs = [
            {"name": name, "shape": [1], "datatype": "BYTES", "data": [request.pop(name)]} for name in ("task", "image")
        ]
        request = {"inputs": inputs, "parameters": request}
    doors.settled(server)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(doors.post, server, path, {**request, "id": "of mine"})
        wait_until(lambda: doors.status(server)["running"] == 1, 60, "running")
        command(server, command="cancel", request_id="of mine")
        assert b"cancelled" in asked.result(timeout=60)


def test_what_cannot_be_stopped(server: Server, pictures: list[bytes]) -> None:
    """An unknown name ends nothing; nameless requests have no common name; nonsense is refused."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(doors.generate, server, image=pictures[0], task="caption", max_tokens=60, temperature=0)
        command(server, command="cancel", request_id="nobody's")
        for wrong in ({"command": "cancel"}, {"command": "cancel", "request_id": ""}, {"command": "explode"}):
            with pytest.raises(ServerError, match=r"\[INVALID_ARG\] command"):
                command(server, **wrong)
        assert asked.result().finish_reason == "length"


def test_a_name_without_end(server: Server, pictures: list[bytes]) -> None:
    with triton.InferenceServerClient(server.grpc_url) as client, pytest.raises(Exception, match="id has 300 char"):
        client.infer("photon_unary", doors.tensors({**ENDLESS, "image": pictures[0]}), request_id="x" * 300)
