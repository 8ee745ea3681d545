"""Many requests at once, and clients that leave."""

from __future__ import annotations

import json
import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import doors
import pytest
import tritonclient.grpc as triton
from doors import idle, settled, wait_until

from photon_backend.serve import Server

IN_FLIGHT = 64
ENDLESS = {"task": "caption", "max_tokens": 700, "temperature": 0, "stream": True}


def mixed_request(number: int, pictures: list[bytes]) -> dict[str, Any]:
    """Of 64 in a row, every picture is asked by all four tasks."""
    task = ("query", "caption", "detect", "point")[number % 4]
    request: dict[str, Any] = {"task": task, "image": pictures[number // 4 % len(pictures)]}
    if task in ("detect", "point"):
        return request | {"text_input": "circle", "max_objects": 3}
    if task == "query":
        request["text_input"] = f"What is number {number % 7}?"
    return request | {"max_tokens": 10, "temperature": 0.8, "top_p": 0.9, "seed": number}


def test_each_gets_the_answer_of_its_own_picture(server: Server, pictures: list[bytes]) -> None:
    requests = [mixed_request(number, pictures) for number in range(IN_FLIGHT)]
    alone = [doors.grpc_stream(server, **request) for request in requests]
    assert len({answer.text for answer in alone}) > IN_FLIGHT // 2, "answers too alike to tell a mix-up"
    names = list(doors.DOORS)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        futures = [
            threads.submit(doors.DOORS[names[number // 4 % len(names)]], server, **request)
            for number, request in enumerate(requests)
        ]
        together = [future.result() for future in futures]
    wrong = [number for number in range(IN_FLIGHT) if not together[number].same_result(alone[number])]
    assert wrong == []
    wait_until(lambda: idle(server), 60, "idle again")


def test_many_requests_on_one_grpc_stream(server: Server, pictures: list[bytes]) -> None:
    requests = [mixed_request(number, pictures) for number in range(IN_FLIGHT)]
    alone = [doors.model_infer(server, **request) for request in requests]
    replies: queue.Queue[Any] = queue.Queue()
    answers = [doors.Answer() for _ in requests]
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: replies.put(error or result))
        for number, request in enumerate(requests):
            client.async_stream_infer("photon", doors.tensors(request), request_id=str(number))
        while not all(answer.finish_reason for answer in answers):
            reply = replies.get(timeout=60)
            answers[int(reply.get_response().id)].add(doors.values_of(reply))
        client.stop_stream()
    assert [n for n in range(IN_FLIGHT) if not answers[n].same_result(alone[n])] == []


# That a row is free two steps after a cancel is counted in tests/engine/test_cancel.py; this is the way to the engine.
# A request that was not cancelled would be counted as done.


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_a_grpc_stream_frees_the_row(server: Server, pictures: list[bytes], stream: bool) -> None:
    before = settled(server)
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: None)
        for picture in pictures[:3]:
            client.async_stream_infer("photon", doors.tensors({**ENDLESS, "stream": stream, "image": picture}))
        wait_until(lambda: doors.status(server)["running"] == 3, 60, "three requests running")
        client.stop_stream(cancel_requests=True)
        cancelled(server, before, 3)


def test_cancelled_model_infer_frees_the_row(server: Server, pictures: list[bytes]) -> None:
    before = settled(server)
    ended: queue.Queue[Any] = queue.Queue()
    request = {**ENDLESS, "image": pictures[0]}
    del request["stream"]
    with triton.InferenceServerClient(server.grpc_url) as client:
        call = client.async_infer("photon_unary", doors.tensors(request), lambda result, error: ended.put(error))
        wait_until(lambda: doors.status(server)["running"] == 1, 60, "running")
        call.cancel()
        cancelled(server, before, 1)
    assert "CANCELLED" in ended.get(timeout=60).status()


def test_leaving_generate_stream_frees_the_row(server: Server, pictures: list[bytes]) -> None:
    before = settled(server)
    data = json.dumps(doors.body({**ENDLESS, "image": pictures[1]})).encode()
    with socket.create_connection((server.host, server.http_port)) as connection:
        head = f"POST /v2/models/photon/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert b"200" in connection.recv(4096)
    cancelled(server, before, 1)


def cancelled(server: Server, before: dict[str, Any], number: int) -> None:
    """So many requests, and nothing else, have ended since, and hold nothing."""
    wait_until(lambda: doors.status(server)["cancelled"] == before["cancelled"] + number, 60, "cancelled")
    after = settled(server)
    assert after["done"] == before["done"] and after["rows_in_use"] == after["zombies"] == 0


def test_deadline_ends_a_request(server: Server, pictures: list[bytes]) -> None:
    answer = doors.generate(server, image=pictures[2], task="caption", max_tokens=700, temperature=0, max_time_ms=700)
    assert answer.finish_reason == "deadline"
    assert 0 < answer.usage["output_tokens"] < 700  # type: ignore[index]
