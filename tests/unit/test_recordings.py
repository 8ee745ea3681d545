"""Traces that wait at a supervisor, with a scripted engine process: each is answered once, whatever happens."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

import msgspec
import pytest
from test_supervisor import GOOD_ENGINE, Stage, stage, wait  # noqa: F401

from photon_backend import draining
from photon_backend import supervisor as module
from photon_backend.protocol import PhotonError, Record, decode_to_engine, encode
from photon_backend.supervisor import Supervisor

# answers a recording of one tick, keeps one of two for ever, refuses all others
RECORDER = """
import os, zmq
from photon_backend.protocol import *
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(f"ipc://{os.environ['PHOTON_RUN_DIR']}/engine-{index}.sock")
while True:
    client, frame = socket.recv_multipart()
    for message in decode_to_engine(frame):
        answer = [Beat(Status())]
        if isinstance(message, Record) and message.ticks == 1:
            answer = [Recorded(message.request_id, [Span("launch", 7, 1.0, 1.5)])]
        elif isinstance(message, Record) and message.ticks == 2:
            continue
        elif isinstance(message, Record):
            answer = [Failed(message.request_id, "UNAVAILABLE", "another trace")]
        socket.send_multipart([client, encode(answer)])
"""

Answers = queue.SimpleQueue[Any]


def up(stage: Stage, script: str = RECORDER, **kinds: int) -> Supervisor:  # noqa: F811
    supervisor = stage.start(script, **kinds)
    wait(lambda: supervisor.status()["up"])
    return supervisor


def only(answers: Answers) -> Any:
    answer = answers.get(timeout=60)
    assert answers.empty()
    return answer


def test_each_gets_its_own_answer(stage: Stage) -> None:  # noqa: F811
    supervisor = up(stage)
    recorded, refused, open_ = Answers(), Answers(), Answers()
    supervisor.trace(0, 2, 1.0, open_.put)
    supervisor.trace(0, 3, 1.0, refused.put)
    supervisor.trace(0, 1, 1.0, recorded.put)
    events = msgspec.json.decode(only(recorded))["traceEvents"]
    assert [e["args"] for e in events if e["ph"] == "X"] == [{"tick": 7}]
    assert str(only(refused)) == "[UNAVAILABLE] another trace"
    assert open_.empty()
    (stage.run_dir / draining.DRAINING).touch()
    assert str(only(open_)) == "[UNAVAILABLE] the server is stopping; retry after 5 s"


def test_an_engine_that_dies(stage: Stage) -> None:  # noqa: F811
    supervisor = up(stage)
    answers = Answers()
    supervisor.trace(0, 2, 1.0, answers.put)
    os.kill(supervisor.status()["pid"], signal.SIGKILL)  # type: ignore[arg-type]
    assert only(answers).code == "UNAVAILABLE"  # in so many words, whether the engine had heard of it or not


def test_an_engine_that_is_not_up(stage: Stage) -> None:  # noqa: F811
    supervisor = up(stage, GOOD_ENGINE, engines=2)
    answers = Answers()
    supervisor.trace(1, 2, 1.0, answers.put)
    assert str(only(answers)) == "[UNAVAILABLE] engine 1 is not up; retry after 5 s"


def test_a_server_that_drains_refuses(stage: Stage) -> None:  # noqa: F811
    supervisor = up(stage)
    (stage.run_dir / draining.DRAINING).touch()
    answers = Answers()
    supervisor.trace(0, 1, 1.0, answers.put)
    assert "the server is stopping" in str(only(answers))


def test_an_instance_that_is_removed_with_one_open(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Triton takes no answer any more: it is not sent, the engine ends, and the process without saying good-bye."""
    supervisor = up(stage)
    pid, answers, ends = supervisor.status()["pid"], Answers(), []
    supervisor.trace(0, 2, 1.0, answers.put)
    monkeypatch.setattr(module.os, "_exit", ends.append)
    supervisor.close()
    stage.supervisors.remove(supervisor)
    assert ends == [1] and answers.empty()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # type: ignore[arg-type]


def test_an_answer_that_raises_hurts_nobody(stage: Stage) -> None:  # noqa: F811
    supervisor = up(stage)

    def broken(outcome: object) -> None:
        raise RuntimeError("Triton says no")

    answers = Answers()
    supervisor.trace(0, 1, 1.0, broken)
    supervisor.trace(0, 1, 1.0, answers.put)
    assert isinstance(only(answers), bytes)


@pytest.mark.parametrize(
    ("engine", "ticks", "seconds", "name"),
    [(1, 1, 1.0, "engine"), (-1, 1, 1.0, "engine"), (0, 0, 1.0, "ticks"), (0, 2001, 1.0, "ticks")]
    + [(0, 1, seconds, "seconds") for seconds in (0.0, -1.0, 60.5, float("nan"), float("inf"))],
)
def test_what_is_out_of_range_is_refused_at_once(
    stage: Stage,  # noqa: F811
    engine: int,
    ticks: int,
    seconds: float,
    name: str,
) -> None:
    supervisor = stage.start(GOOD_ENGINE)
    with pytest.raises(PhotonError, match=rf"^\[INVALID_ARG\] {name} must be"):
        supervisor.trace(engine, ticks, seconds, lambda outcome: None)


@pytest.mark.parametrize(("ticks", "seconds"), [(0, 1.0), (2001, 1.0), (1, 0.0), (1, 61.0), (1, float("nan"))])
def test_the_engine_reads_no_unbounded_one(ticks: int, seconds: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(encode([Record("r", ticks, seconds)]))
