"""The supervisor with a scripted engine process and without Triton."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from photon_backend import alive, draining
from photon_backend import supervisor as module
from photon_backend.config import Settings
from photon_backend.engine.exit_codes import EXIT_UNUSABLE
from photon_backend.supervisor import FRONT_ENDS, Supervisor

GOOD_ENGINE = """
import os, zmq
from photon_backend.protocol import Beat, Status, encode
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(f"ipc://{os.environ['PHOTON_RUN_DIR']}/engine-{index}.sock")
while True:
    client = socket.recv_multipart()[0]
    socket.send_multipart([client, encode([Beat(Status(model="scripted"))])])
"""


class Stage:
    """Makes supervisors whose engine is a script, and records what they ask of Triton."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self.asked: list[str] = []
        self.failing_loads = 0
        self.supervisors: list[Supervisor] = []
        monkeypatch.setenv("PHOTON_RUN_DIR", str(run_dir))

    def start(self, script: str, index: int = 0, engines: int = 1) -> Supervisor:
        program = self.run_dir / f"engine-{index}"
        program.write_text(f"#!{sys.executable}\nimport sys\nindex = {index}\n{script}")
        program.chmod(0o700)
        settings = Settings(run_dir=str(self.run_dir), engine_python=str(program), engines=engines)
        supervisor = Supervisor(settings, index, self._load, lambda name: self.asked.append(f"unload {name}"))
        supervisor.start()
        self.supervisors.append(supervisor)
        return supervisor

    def _load(self, name: str) -> None:
        if self.failing_loads:
            self.failing_loads -= 1
            raise RuntimeError("Triton says no")
        self.asked.append(f"load {name}")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "TURN_MS", 5)
    monkeypatch.setattr("photon_backend.frontend.link.SILENCE_S", 600)  # a busy machine may keep a script from beating
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    for supervisor in stage.supervisors:
        supervisor.close()


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


LOADED = [f"load {name}" for name in FRONT_ENDS]
UNLOADED = [f"unload {name}" for name in FRONT_ENDS]


def test_front_ends_follow_the_engine(stage: Stage) -> None:
    supervisor = stage.start(GOOD_ENGINE)
    wait(lambda: stage.asked == LOADED)
    status = supervisor.status()
    assert status["up"] and status["model"] == "scripted" and status["restarts"] == 0 and status["problem"] is None
    os.kill(status["pid"], signal.SIGKILL)  # type: ignore[arg-type]
    wait(lambda: stage.asked == LOADED + UNLOADED + LOADED)
    assert supervisor.status()["restarts"] == 1 and supervisor.status()["pid"] != status["pid"]


def test_end_waits_for_a_trace_asked_for_while_models_load(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, loaded = threading.Event(), threading.Event()
    monkeypatch.setattr(stage, "_load", lambda name: (loading.set(), loaded.wait(60)))
    supervisor = stage.start(GOOD_ENGINE)
    assert loading.wait(60)
    outcomes: list[object] = []
    supervisor.trace(0, 1, 1.0, outcomes.append)
    assert alive.with_open(tmp_path) == ["photon_engine_0"]
    threading.Timer(0.1, loaded.set).start()
    assert draining.answer_rest(tmp_path) == []
    assert "[UNAVAILABLE] the server is stopping" in str(outcomes)


def test_close_ends_the_engine(stage: Stage) -> None:
    supervisor = stage.start(GOOD_ENGINE)
    wait(lambda: supervisor.status()["up"])
    pid = supervisor.status()["pid"]
    supervisor.close()
    stage.supervisors.remove(supervisor)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # type: ignore[arg-type]


def test_gives_up_after_failures_in_a_row(stage: Stage) -> None:
    supervisor = stage.start("sys.exit(1)")
    wait(lambda: supervisor.problem)
    assert (
        supervisor.problem == f"Engine 0 ended with status 1, {module.MAX_FAILURES} times in a row; its log says why."
    )
    assert (stage.run_dir / "problem").read_text() == supervisor.problem
    assert supervisor.restarts == module.MAX_FAILURES - 1 and stage.asked == []


def test_gives_up_at_once_when_another_try_would_end_the_same(stage: Stage) -> None:
    supervisor = stage.start(f"sys.exit({EXIT_UNUSABLE})")
    wait(lambda: supervisor.problem)
    assert supervisor.restarts == 0 and supervisor.status()["pid"] is None


def test_loading_the_front_ends_is_tried_again(stage: Stage) -> None:
    stage.failing_loads = module.MAX_LOAD_FAILURES - 1
    supervisor = stage.start(GOOD_ENGINE)
    wait(lambda: stage.asked == LOADED)
    assert supervisor.problem is None


def test_front_ends_that_cannot_be_loaded(stage: Stage) -> None:
    stage.failing_loads = module.MAX_LOAD_FAILURES
    supervisor = stage.start(GOOD_ENGINE)
    wait(lambda: supervisor.problem)
    assert supervisor.problem == "Triton could not load the model photon; its log says why."
    assert stage.asked == []


def test_only_the_first_of_several_loads_and_unloads(stage: Stage) -> None:
    second = stage.start(GOOD_ENGINE, index=1, engines=2)
    wait(lambda: second.status()["up"])
    assert stage.asked == []
    first = stage.start("sys.exit(1)", index=0, engines=2)
    wait(lambda: stage.asked == LOADED)  # engine 1 is enough
    wait(lambda: first.problem)
    assert stage.asked == LOADED
