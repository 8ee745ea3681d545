"""Front ends with a bug in them: a request that Triton lost, or whose exception reached it, would hang its client or
show it our paths. And an engine that dies in the middle of a streamed answer."""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import DOORS, ServerError, wait_until
from photon_client import Client, Unavailable
from PIL import Image

from photon_backend import layout
from photon_backend.serve import Server, start_server

GOOD: dict[str, Any] = {"task": "query", "text_input": "good", "max_tokens": 3, "temperature": 0}
LONG: dict[str, Any] = {**GOOD, "max_tokens": 700, "stream": True}

# The front end's model.py, with one bug for each word that a question may be.
FAULTY = """
SECRET = "a secret of the server"

class TritonPythonModel:
    def initialize(self, args):
        from photon_backend.frontend import handler, session

        def breaks(word, what, when=lambda self, *arguments: True):
            def broken(self, *arguments):
                if getattr(self, "word", None) == word and when(self, *arguments):
                    raise RuntimeError(SECRET)
                return what(self, *arguments)
            return broken

        open_session, write = session.FrontEnd.open, handler.triton_response

        def opened(self, raw, request_id):
            if raw.text_input == "open":
                raise RuntimeError(SECRET)
            opened = open_session(self, raw, request_id)
            opened.word = raw.text_input
            return opened

        def written(response):
            if response.text is not None and words.get(id(response)) == "write":
                raise RuntimeError(SECRET)
            return write(response)

        words = {}
        feed = session.Session.feed

        def fed(self, events):
            responses = feed(self, events)
            words.clear()
            words.update({id(response): self.word for response in responses})
            return responses

        session.FrontEnd.open = opened
        session.Session.picture = breaks("picture", session.Session.picture)
        session.Session.feed = breaks("feed", breaks("late", fed, lambda self, events: self._answer.num_tokens > 4))
        handler.triton_response = written
        self._handler = handler.Handler(args["model_instance_name"])

    def execute(self, requests):
        self._handler.accept(requests)

    def finalize(self):
        self._handler.close()
"""
WORDS = ("open", "picture", "feed", "late", "write")


@pytest.fixture(scope="module")
def faulty(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("faulty")
    repository = shutil.copytree(layout.REPOSITORY, directory / "models", ignore=shutil.ignore_patterns("__pycache__"))
    for model in ("photon", "photon_unary"):
        (repository / model / "1" / "model.py").write_text(FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "REPOSITORY", repository)
        with start_server(checkpoint, settings={"PHOTON_THREADS": "1"}, log=directory / "log") as server:
            yield server


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("word", WORDS)
def test_a_bug_costs_its_request_only(faulty: Server, pictures: list[bytes], word: str, door: str) -> None:
    """One sentence, and the next one is answered; nothing stays open. Every picture is new to the engine."""
    picture = draw_new(len(WORDS) * list(DOORS).index(door) + WORDS.index(word))
    with pytest.raises(ServerError) as caught:
        DOORS[door](faulty, image=picture, **{**GOOD, "max_tokens": 30, "text_input": word})
    message = str(caught.value).split('"}')[
        0
    ]  # Triton answers a stream that never began with one JSON line, status 500
    assert "[INTERNAL] Inside the server " in message and message.endswith("its log says why.")
    assert "secret" not in message and ".py" not in message and "Traceback" not in message
    assert DOORS[door](faulty, image=pictures[0], **GOOD).finish_reason == "length"
    wait_until(lambda: doors.idle(faulty), 60, "given up by the engine too")


def draw_new(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 40), (number, 7, 99)).save(file, "PNG")
    return file.getvalue()


def open_stream(server: Server, request: dict[str, Any]) -> tuple[http.client.HTTPResponse, dict[str, Any]]:
    """generate_stream with its first event read."""
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
    connection.request("POST", "/v2/models/photon/generate_stream", json.dumps(doors.body(request)))
    reply = connection.getresponse()
    assert reply.status == 200
    return reply, next(events(reply))


def events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := reply.readline():
        if line.strip():
            assert line.startswith(b"data: ")
            yield json.loads(line.removeprefix(b"data: "))


def test_a_bug_after_the_first_byte(faulty: Server, pictures: list[bytes]) -> None:
    """The status is 200 already: the error is one more line, and the last one."""
    reply, first = open_stream(faulty, {**LONG, "text_input": "late", "image": pictures[1]})
    *between, last = events(reply)
    assert "text_output" in first and all("text_output" in event for event in between)
    assert set(last) == {"error"} and last["error"].startswith("[INTERNAL] Inside the server ")
    wait_until(lambda: doors.idle(faulty), 60, "given up by the engine too")


def test_an_engine_that_dies_in_the_middle(faulty: Server, pictures: list[bytes]) -> None:
    """Streams of both doors end with a sentence; meanwhile the server is alive and photon is not ready."""
    reply, _ = open_stream(faulty, {**LONG, "image": pictures[2]})
    with Client(faulty.grpc_url) as client:
        stream = iter(client.query(pictures[3], "good", stream=True, max_tokens=700, temperature=0)["answer"])
        assert next(stream)
        os.kill(doors.status(faulty)["pid"], signal.SIGKILL)
        with pytest.raises(Unavailable, match="retry after 5 s"):
            for _ in stream:
                pass
        *_, last = events(reply)
        assert set(last) == {"error"} and last["error"].startswith("[UNAVAILABLE] ")
    wait_until(lambda: not faulty.is_ready(), 60, "photon unloaded")
    with doors.OPENER.open(f"{faulty.http_url}/v2/health/live") as alive:
        assert alive.status == 200
    faulty.wait_ready(120)
    assert doors.generate(faulty, image=pictures[2], **GOOD).finish_reason == "length"
