"""What Triton's Python back end invites, a test for each trap. Failing front ends: test_faulty_front_end.py."""

from __future__ import annotations

import http.client
import io
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pytest
import tritonclient.grpc as triton
from doors import ServerError, wait_until
from PIL import Image

from benchmarks.soak import family, shared_memory
from photon_backend.serve import Server

ENDLESS: dict[str, Any] = {"task": "caption", "max_tokens": 700, "temperature": 0}
GOOD: dict[str, Any] = {"task": "caption", "max_tokens": 3, "temperature": 0}


def scrape(server: Server) -> str:
    with doors.OPENER.open(server.metrics_url, timeout=60) as reply:
        return reply.read().decode()


def get(server: Server, path: str) -> int:
    """Status of one request over a connection of its own."""
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
    connection.request("GET", path)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def assert_whole(server: Server, picture: bytes) -> None:
    """No process has died, nothing is open, and it answers."""
    wait_until(lambda: doors.idle(server), 60, "idle again")
    assert doors.generate(server, image=picture, **GOOD).finish_reason == "length"
    assert server.problem() is None and doors.status(server)["restarts"] == 0


def test_clients_that_leave_as_the_answer_ends(server: Server, pictures: list[bytes]) -> None:
    """Asked for cancellation after or beside the last response, Triton 2.51 dies; two threads at one metric, too."""
    end = threading.Event()

    def scrape_on() -> None:
        while not end.is_set():
            scrape(server)

    def leave(number: int) -> None:
        chance = random.Random(number)
        with triton.InferenceServerClient(server.grpc_url) as client:
            first = threading.Event()
            client.start_stream(lambda result, error: first.set())
            for tokens in (1, 2, 3):
                request = {**GOOD, "max_tokens": tokens, "stream": True, "image": pictures[number % len(pictures)]}
                client.async_stream_infer("photon", doors.tensors(request))
            first.wait(60)
            time.sleep(chance.uniform(0, 0.03))
            client.stop_stream(cancel_requests=True)

    with ThreadPoolExecutor(9) as threads:
        scraping = threads.submit(scrape_on)
        try:
            for future in [threads.submit(leave, number) for number in range(64)]:
                future.result(timeout=120)
        finally:
            end.set()
        scraping.result(timeout=60)
    assert_whole(server, pictures[0])


def test_who_leaves_before_the_first_byte_is_bounded_by_the_deadline(server: Server, pictures: list[bytes]) -> None:
    """Triton does not tell of it: the request ends by its deadline, as one that was answered."""
    before = doors.settled(server)
    data = json.dumps(doors.body({**ENDLESS, "image": pictures[1], "max_time_ms": 700})).encode()
    with socket.create_connection((server.host, server.http_port)) as connection:
        head = f"POST /v2/models/photon/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
    wait_until(lambda: doors.status(server)["submitted"] > before["submitted"], 60, "submitted")
    after = doors.settled(server)
    assert (after["done"], after["cancelled"]) == (before["done"] + 1, before["cancelled"])
    assert after["tokens"] - before["tokens"] < ENDLESS["max_tokens"]
    assert_whole(server, pictures[0])


def test_probes_tell_the_truth_under_full_load(server: Server, pictures: list[bytes]) -> None:
    """Twice as many requests as rows. How fast they are is measured by `python -m benchmarks.promises`."""
    replies: list[Any] = []
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: replies.append(result))
        for number in range(64):
            request = {**ENDLESS, "stream": True, "image": pictures[number % len(pictures)]}
            client.async_stream_infer("photon", doors.tensors(request))
        wait_until(lambda: doors.status(server)["running"] == doors.status(server)["rows"], 60, "all rows taken")
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/photon/ready", "/v2/models/photon_unary/ready"):
            assert [get(server, path) for _ in range(5)] == [200] * 5
        assert doors.status(server)["running"] > 0
        client.stop_stream(cancel_requests=True)
    assert_whole(server, pictures[0])


def test_stubs_are_light(server: Server) -> None:
    """No torch in a process whose death Triton would not notice; all of it in the engine."""
    with_torch = {
        name for pid, name in family(server.pid).items() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    }
    assert with_torch == {"engine 0"}


@pytest.mark.parametrize("model", ["photon", "photon_unary"])
def test_no_queue_of_triton(server: Server, model: str) -> None:
    """Any queue policy costs 4 to 10 times of the throughput."""
    with doors.OPENER.open(f"{server.http_url}/v2/models/{model}/config") as reply:
        config = json.loads(reply.read())
    assert config["max_batch_size"] == 0
    assert not any("batching" in name or "scheduling" in name for name in config if config[name])


@pytest.mark.parametrize("name", ["timeout", "priority"])
def test_what_looks_like_an_option_of_triton_is_refused_by_name(
    server: Server, pictures: list[bytes], name: str
) -> None:
    """To generate they are parameters like any other."""
    with pytest.raises(ServerError, match=rf"^\[INVALID_ARG\] .*{name}"):
        doors.generate(server, image=pictures[0], **GOOD, **{name: 1})
    assert_whole(server, pictures[0])


def test_large_pictures_at_once(server: Server) -> None:
    """Stubs get them through shared memory that grows. HTTP bodies that call themselves a form, as curl's do and those
    of these doors, ended Triton 2.51 from 3 MB on, for want of stack."""
    noise = np.random.RandomState(0).randint(0, 255, (2000, 2000, 3), np.uint8)
    files = []
    for number in range(2):
        file = io.BytesIO()
        Image.fromarray(np.roll(noise, 100 * number, axis=0)).save(file, "BMP")
        files.append(file.getvalue())
    names = list(doors.DOORS)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(doors.DOORS[name], server, image=file, **GOOD) for name in names for file in files]
        answers = [future.result(timeout=120) for future in asked]
    for number, answer in enumerate(answers):
        assert answer.same_result(answers[number % len(files)]), names[number // len(files)]
    print(f"{shared_memory(server) >> 20} MiB of shared memory for pictures of {len(files[0]) >> 20} MiB")
    assert_whole(server, files[0])


def test_large_pictures_do_not_stay_in_memory(server: Server, pictures: list[bytes]) -> None:
    """A front end had 1.3 GB for ever after a few of 49 million pixels."""
    files = []
    for number in range(4):
        file = io.BytesIO()
        Image.new("RGBA", (6000, 6000), (60 * number, 0, 0, 200)).save(file, "PNG")
        files.append(file.getvalue())
    with ThreadPoolExecutor(4) as threads:
        for answer in threads.map(lambda file: doors.grpc_stream(server, image=file, **GOOD), files):
            assert answer.finish_reason == "length"
    assert_whole(server, pictures[0])
    for pid, name in family(server.pid).items():
        if name.startswith("photon_"):
            anonymous = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            assert anonymous and int(anonymous[1]) < 200 << 10, name


@pytest.mark.parametrize("depth", [10_000, 100_000])
def test_json_nested_without_end(server: Server, pictures: list[bytes], depth: int) -> None:
    """Triton 2.51 parses it recursively."""
    nested = b"[" * depth + b"]" * depth
    for path, name in (("photon/generate", b"text_input"), ("photon_unary/infer", b"inputs")):
        with pytest.raises(ServerError):
            doors.post(server, f"/v2/models/{path}", b'{"%b": %b}' % (name, nested))
    assert_whole(server, pictures[0])


def test_streamed_text_is_whole_characters(server: Server, pictures: list[bytes]) -> None:
    """Bytes of an output go into the JSON unchecked. Random weights at a high temperature say anything at all."""
    texts = []
    for seed in range(4):
        request = {
            "task": "caption",
            "max_tokens": 80,
            "temperature": 2,
            "top_p": 1,
            "seed": seed,
            "image": pictures[0],
        }
        whole, streamed = doors.generate(server, **request), doors.generate_stream(server, stream=True, **request)
        assert streamed.text == whole.text and len(streamed.pieces) > 1
        texts.append(whole.text)
    assert any(not text.isascii() for text in texts), "nothing that could have been cut"
