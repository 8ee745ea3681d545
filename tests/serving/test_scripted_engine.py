"""Front ends of the real server behind an engine that is a script, so that it says what a good one never says, and
exactly when a test wants it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
from doors import DOORS, ServerError, wait_until

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.serve import Server, start_server

NO_TOKEN, NO_MESSAGE, BURST = 1, 2, 200  # what the script does, by max_tokens

# A burst is one word at once and 200 more, each in a message of its own, when the file `go` is there.
ENGINE = """#!{python}
import os, signal, sys, time
from pathlib import Path
import zmq
from photon_backend.processes import end_with_parent
from photon_backend.protocol import (
    REQUEST_ID_BYTES, Beat, Done, Hello, Status, StepTokens, Submit, Usage, decode_to_engine, encode
)

end_with_parent(signal.SIGKILL, int(sys.argv[-1]))
place = Path({place!r})
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://" + os.environ["PHOTON_RUN_DIR"] + "/engine-0.sock")
clients, bursts, next_beat = set(), [], 0.0

def say(client, *messages):
    socket.send_multipart([client, encode(list(messages))])

def tokens(name, token):
    return StepTokens(name.encode().ljust(REQUEST_ID_BYTES, b"\\0"), token.to_bytes(4, "little", signed=True))

def answer(client, request):
    if request.sampling.max_tokens == {no_token}:
        say(client, tokens(request.request_id, -1))
    elif request.sampling.max_tokens == {no_message}:
        socket.send_multipart([client, b"\\xc1"])
    else:
        say(client, tokens(request.request_id, {word}))
        bursts.append((client, request.request_id))

while True:
    if socket.poll(20):
        client, frame = socket.recv_multipart()
        clients.add(client)
        for message in decode_to_engine(frame):
            if isinstance(message, Hello):
                say(client, Beat(Status(rows=8)))
            elif isinstance(message, Submit):
                answer(client, message)
    while bursts and (place / "go").exists():
        client, name = bursts.pop()
        for _ in range({burst}):
            say(client, tokens(name, {word}))
        say(client, Done(name, "stop", Usage()))
        (place / "sent").touch()
    if time.monotonic() > next_beat:
        next_beat = time.monotonic() + 0.2
        for client in clients:
            say(client, Beat(Status(rows=8)))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the script, the log and the files by which test and script speak."""
    return tmp_path_factory.mktemp("scripted")


@pytest.fixture(scope="module")
def scripted(place: Path) -> Iterator[Server]:
    (word,) = TextTokenizer(TINY_CHECKPOINT / "tokenizer.json").encode("a")
    program = place / "engine"
    numbers = {"no_token": NO_TOKEN, "no_message": NO_MESSAGE, "burst": BURST}
    program.write_text(ENGINE.format(python=sys.executable, place=str(place), word=word, **numbers))
    program.chmod(0o700)
    settings = {"PHOTON_ENGINE_PYTHON": str(program)}
    with start_server(front_ends=1, settings=settings, log=place / "log") as server:
        yield server


@pytest.mark.parametrize("door", DOORS)
def test_what_python_said_is_for_the_log(scripted: Server, place: Path, door: str) -> None:
    """An id that no tokenizer has is our own fault, so the client is told that it was, and no more."""
    with pytest.raises(ServerError) as caught:
        DOORS[door](scripted, text_input="?", max_tokens=NO_TOKEN)
    sentence = "[INTERNAL] Inside the server the engine's answer could not be read; its log says why."
    assert str(caught.value).endswith(sentence) and "Error" not in str(caught.value)
    wait_until(lambda: "OverflowError" in (place / "log").read_text(), 60, "in the log")


@pytest.mark.parametrize("door", DOORS)
def test_a_turn_that_fails_answers_everything(scripted: Server, place: Path, door: str) -> None:
    """A message of the engine that cannot be read."""
    with pytest.raises(ServerError) as caught:
        DOORS[door](scripted, text_input="?", max_tokens=NO_MESSAGE)
    assert str(caught.value).endswith("[INTERNAL] The front end failed; its log says why.")


def test_a_front_end_that_fell_behind_catches_up_in_few_responses(scripted: Server, place: Path) -> None:
    (sign,) = scripted.layout.run_dir.glob("photon_0*.alive")
    front_end = int(sign.stem.split("@")[1])
    responses = doors.grpc_responses(scripted, {"text_input": "?", "max_tokens": BURST, "stream": True})
    first = next(responses)
    os.kill(front_end, signal.SIGSTOP)
    try:
        (place / "go").touch()
        wait_until((place / "sent").exists, 60, "the engine has said everything")
    finally:
        os.kill(front_end, signal.SIGCONT)
    rest = list(responses)
    assert first["text_output"] + "".join(values["text_output"] for values in rest) == "a" * (1 + BURST)
    assert len(rest) < BURST / 4
