"""A server with more to do than it takes: one front end, two rows, a short waiting list, little room for pictures."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import grpc
import pytest
import tritonclient.grpc as triton
from doors import ServerError, wait_until
from photon_client.wire import build_request
from tritonclient.grpc import service_pb2_grpc

from photon_backend.serve import Server, start_server

ENDLESS: dict[str, Any] = {"task": "caption", "max_tokens": 700, "temperature": 0}
GOOD: dict[str, Any] = {"task": "caption", "max_tokens": 3, "temperature": 0}
ROWS, WAITING, PICTURES = 2, 3, 4


@pytest.fixture(scope="module")
def tight(checkpoint: Path, pictures: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "PHOTON_ROWS": str(ROWS),
        "PHOTON_MAX_WAITING": str(WAITING),
        "PHOTON_MAX_IMAGE_BYTES": str(max(map(len, pictures))),
        "PHOTON_WAITING_PICTURES": str(PICTURES),
        "PHOTON_THREADS": "1",
    }
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(checkpoint, front_ends=1, settings=settings, log=log) as server:
        yield server


class Asked:
    """Requests on one gRPC stream, and what has come back by their ids."""

    def __init__(self, server: Server, requests: list[dict[str, Any]]) -> None:
        self.replies: queue.Queue[Any] = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.replies.put(error or result))
        self.send(requests)

    def send(self, requests: list[dict[str, Any]]) -> None:
        for number, request in enumerate(requests):
            self.client.async_stream_infer("photon", doors.tensors(request), request_id=str(number))

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def takes(server: Server, picture: bytes) -> bool:
    """Whether a request is taken. A front end refuses as long as its last heartbeat says that the engine is full."""
    try:
        return bool(doors.grpc_stream(server, image=picture, **GOOD).text)
    except ServerError as error:
        assert "[UNAVAILABLE]" in str(error)
        return False


def test_full_server_refuses_at_once(tight: Server, pictures: list[bytes]) -> None:
    """The engine takes what it has rows and waiting places for; the rest is told so while all of that still runs. How
    fast is measured by `python -m benchmarks.promises`."""
    endless = [{**ENDLESS, "image": picture} for picture in pictures[: ROWS + WAITING]]
    with Asked(tight, endless[:ROWS]), contextlib.ExitStack() as stack:
        wait_until(lambda: doors.status(tight)["running"] == ROWS, 60, "rows taken")
        stack.enter_context(Asked(tight, endless[ROWS:]))
        wait_until(lambda: doors.status(tight)["waiting"] == WAITING, 60, "full")
        for picture in pictures[5:15]:
            with pytest.raises(ServerError, match=r"^\[UNAVAILABLE\] 3 requests are waiting already; retry after 1 s$"):
                doors.model_infer(tight, image=picture, **GOOD)
    wait_until(lambda: doors.idle(tight) and takes(tight, pictures[0]), 60, "idle again, and the front end knows")


def test_deadline_of_a_waiting_request(tight: Server, pictures: list[bytes]) -> None:
    with Asked(tight, [{**ENDLESS, "image": picture} for picture in pictures[:ROWS]]):
        wait_until(lambda: doors.status(tight)["running"] == ROWS, 60, "rows taken")
        answer = doors.generate(tight, image=pictures[2], max_time_ms=150, **GOOD)
        assert answer.finish_reason == "deadline" and answer.usage["output_tokens"] == 0  # type: ignore[index]
    wait_until(lambda: doors.idle(tight) and takes(tight, pictures[0]), 60, "idle again, and the front end knows")


def test_pictures_that_wait_are_bounded(tight: Server, pictures: list[bytes]) -> None:
    """An engine that asks for no picture: the front end holds four of the largest size and refuses the fifth."""
    largest = max(pictures, key=len)
    process = doors.status(tight)["pid"]
    try:
        with Asked(tight, [{**GOOD, "image": largest}]) as asked:
            assert asked.replies.get(timeout=60).as_numpy("finish_reason"), "the stream is there"
            os.kill(process, signal.SIGSTOP)  # no time to lose now: after 4 s the engine counts as dead
            asked.send([{**GOOD, "image": largest}] * (PICTURES + 1))
            refusal = asked.replies.get(timeout=60)
            text = f"pictures of {PICTURES * len(largest)} bytes are waiting in this front end; retry after 1 s"
            assert refusal.message() == f"[UNAVAILABLE] {text}"
    finally:
        os.kill(process, signal.SIGCONT)
    tight.wait_ready(60)
    wait_until(lambda: doors.status(tight)["up"] and doors.idle(tight), 60, "idle again")
    assert doors.model_infer(tight, image=largest, **GOOD).text


def test_clients_that_read_nothing(server: Server, pictures: list[bytes]) -> None:
    """Triton tells nobody about them: their requests run to their end, whose length bounds what piles up."""
    assert doors.model_infer(server, image=pictures[0], **GOOD).text
    before = resident_mb(server.pid)
    request = {**ENDLESS, "stream": True, "max_tokens": 300}
    with contextlib.ExitStack() as connections:
        channel = connections.enter_context(grpc.insecure_channel(server.grpc_url, [("grpc.enable_http_proxy", 0)]))
        calls = []
        for picture in pictures[:8]:
            message = build_request("caption", picture, None, True, {"max_tokens": 300, "temperature": 0})
            calls.append(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter((message,))))
            connection = connections.enter_context(socket.create_connection((server.host, server.http_port)))
            data = json.dumps(doors.body({**request, "image": picture})).encode()
            head = f"POST /v2/models/photon/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
        wait_until(lambda: doors.status(server)["running"] > 8, 60, "running")
        wait_until(lambda: doors.idle(server), 240, "all ended, read or not")
        grown = resident_mb(server.pid) - before
        print(f"tritonserver grew by {grown:.1f} MB for 16 answers of 300 tokens that nobody read")
        assert grown < 100
        assert doors.model_infer(server, image=pictures[0], **GOOD).text
        for call in calls:
            call.cancel()


def resident_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
