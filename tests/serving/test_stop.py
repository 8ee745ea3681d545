"""How a server ends: what is open is answered, and then nothing is waited for that Triton would wait for."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import doors
import pytest
import tritonclient.grpc as triton
from doors import wait_until
from test_processes import ENDLESS, GOOD, alive, ask, descendants, regions

from photon_backend.serve import Server, start_server

ONE_THREAD = {"PHOTON_THREADS": "1"}
STOPPING = "[UNAVAILABLE] the server is stopping; retry after 5 s"


def test_many_front_ends(checkpoint: Path, pictures: list[bytes], tmp_path: Path) -> None:
    """Triton 2.51 sleeps a second in the destructor of each instance, one after the other: eight of them always took
    longer than its exit time-out."""
    log = tmp_path / "log"
    with start_server(checkpoint, front_ends=8, settings=ONE_THREAD, log=log) as server:
        with ThreadPoolExecutor(16) as threads:
            request = {**GOOD, "image": pictures[0]}
            answers = [threads.submit(ask, server, "grpc_stream", request) for _ in range(16)]
            assert all(future.result(timeout=60).finish_reason == "length" for future in answers)  # type: ignore[union-attr]
        processes = [server.pid, *descendants(server.pid)]
        assert len(processes) == 15
    assert_gone(server, processes)
    assert "Exit timeout expired" not in log.read_text()


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    with start_server(checkpoint, front_ends=1, settings=ONE_THREAD, log=tmp_path / "log") as server:
        yield server


@pytest.mark.parametrize("engine", ["runs", "hangs"])
def test_what_is_open_is_answered(small: Server, pictures: list[bytes], engine: str) -> None:
    """At every door, whatever the engine does, although an idle HTTP connection would use up Triton's whole exit
    time-out, after which it answers nobody, and an idle gRPC stream would keep it for ever."""
    processes = [small.pid, *descendants(small.pid)]
    idle = http.client.HTTPConnection(small.host, small.http_port)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    with triton.InferenceServerClient(small.grpc_url) as client, ThreadPoolExecutor(8) as threads:
        client.start_stream(lambda result, error: None)
        asked = [threads.submit(ask, small, name, {**ENDLESS, "image": pictures[0]}) for name in doors.DOORS]
        wait_until(lambda: doors.status(small)["running"] == len(asked), 60, "all running")
        if engine == "hangs":
            os.kill(doors.status(small)["pid"], signal.SIGSTOP)
        small.stop()
        assert_gone(small, processes)
        answers = [str(future.result(timeout=60)) for future in asked]
        assert [answer for answer in answers if STOPPING not in answer] == []
    idle.close()


def test_a_front_end_that_hangs(small: Server, pictures: list[bytes]) -> None:
    """Its requests cannot be answered; those of the other one are, and it ends all the same."""
    processes = [small.pid, *descendants(small.pid)]
    stub = next(p for p in processes if "/models/photon_unary/1/model.py" in Path(f"/proc/{p}/cmdline").read_text())
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, small, "grpc_stream", {**ENDLESS, "image": pictures[0]})
        wait_until(lambda: doors.status(small)["running"] == 1, 60, "running")
        os.kill(stub, signal.SIGSTOP)
        small.stop()
        assert_gone(small, processes)
        assert STOPPING in str(asked.result(timeout=60))


@pytest.mark.parametrize("what", ["run", "."])
def test_its_directory_was_removed(small: Server, pictures: list[bytes], what: str) -> None:
    """By something that tidies up: the server goes on, what is open is answered at its end, and nothing stays."""
    processes = [small.pid, *descendants(small.pid)]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, small, name, {**ENDLESS, "image": pictures[0]}) for name in doors.DOORS]
        wait_until(lambda: doors.status(small)["running"] == len(asked), 60, "all running")
        shutil.rmtree(small.layout.directory / what)
        small.drain(60, threading.Event())
        small.stop()
        assert_gone(small, processes)
        answers = [str(future.result(timeout=60)) for future in asked]
        assert [answer for answer in answers if STOPPING not in answer] == []


def test_engine_comes_back_without_its_directory(small: Server, pictures: list[bytes]) -> None:
    """It made its socket in what was removed."""
    shutil.rmtree(small.layout.run_dir)
    os.kill(doors.status(small)["pid"], signal.SIGKILL)
    wait_until(lambda: doors.status(small)["restarts"] == 1, 60, "engine seen dead")
    wait_until(lambda: doors.status(small)["up"], 60, "engine up again")
    small.wait_ready(120)
    assert doors.generate(small, **{**GOOD, "image": pictures[0]}).finish_reason == "length"


def assert_gone(server: Server, processes: list[int]) -> None:
    """When `stop` returns, not some time later."""
    assert not any(map(alive, processes))
    assert not server.layout.directory.exists() and regions(server.layout.directory) == []
