"""Loading, unloading and reloading photon while it is used."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import ServerError, wait_until

from photon_backend import alive
from photon_backend.serve import Server, start_server

ENDLESS: dict[str, Any] = {"task": "caption", "max_tokens": 700, "temperature": 0}
SHORT: dict[str, Any] = {"task": "caption", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def own(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(checkpoint, settings={"PHOTON_THREADS": "1"}, log=log) as server:
        yield server
    print(log.read_text())


class Traffic:
    """Three threads that ask for captions until the end, and what became of every question."""

    def __init__(self, server: Server, pictures: list[bytes]) -> None:
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._end = threading.Event()
        names = ("grpc_stream", "generate_stream", "generate")
        self._threads = [threading.Thread(target=self._ask, args=(server, name, pictures[0])) for name in names]

    def _ask(self, server: Server, door: str, picture: bytes) -> None:
        while not self._end.is_set():
            try:
                self.ended.put(str(doors.DOORS[door](server, image=picture, **SHORT).finish_reason))
            except ServerError as error:
                self.ended.put(str(error))
                self._end.wait(0.05)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.expect("length")
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def expect(self, what: str) -> None:
        """Waits for a question that ended so from now on."""
        while not self.ended.empty():
            self.ended.get()
        while what not in self.ended.get(timeout=120):
            pass


def repository(server: Server, verb: str, document: object = ()) -> None:
    doors.post(server, f"/v2/repository/models/photon/{verb}", document or {}, server.operator_headers)


def test_unload_and_load_under_traffic(own: Server, pictures: list[bytes]) -> None:
    """Requests in flight end in one way or the other, those that come meanwhile are refused, and it goes on after."""
    with Traffic(own, pictures) as traffic:
        for _ in range(2):
            repository(own, "unload")
            wait_until(lambda: not own.is_ready(), 60, "unloaded")
            traffic.expect("no available versions")
            repository(own, "load")
            wait_until(own.is_ready, 60, "loaded")
            traffic.expect("length")
    wait_until(lambda: doors.idle(own), 60, "nothing is left at the engine")
    assert own.problem() is None


def set_count(server: Server, count: int) -> None:
    """Changes the number of photon's instances as Triton allows it while the model is loaded."""
    file = server.layout.models / "photon" / "config.pbtxt"
    file.write_text(re.sub(r"count: \d+", f"count: {count}", file.read_text()))
    repository(server, "load")


def test_more_instances_under_traffic(own: Server, pictures: list[bytes]) -> None:
    """Triton starts new stubs beside the old ones; every request is answered."""
    with Traffic(own, pictures) as traffic:
        set_count(own, 3)
        traffic.expect("length")
        assert own.is_ready()
    wait_until(lambda: doors.idle(own), 60, "nothing is left at the engine")
    assert own.problem() is None


def test_fewer_instances_at_rest(own: Server, pictures: list[bytes]) -> None:
    set_count(own, 1)

    def signs() -> list[str]:
        """Which of several equal instances Triton keeps, and so their numbers, is its own affair."""
        return sorted(path.name.rsplit("_", 1)[0] for path in own.layout.run_dir.glob(f"*{alive.SUFFIX}"))

    wait_until(lambda: signs() == ["photon_0", "photon_engine", "photon_unary_0"], 60, "old stubs are gone")
    assert doors.grpc_stream(own, image=pictures[0], **SHORT).text
    assert own.problem() is None


def test_fewer_instances_with_open_requests_end_the_server(own: Server, pictures: list[bytes]) -> None:
    """Triton takes no response of an instance that it removes. Its clients would wait for ever; so the launcher, which
    sees the problem, ends the server. Last in this file: the server is of no use after."""
    set_count(own, 4)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(doors.grpc_stream, own, image=pictures[i], **ENDLESS) for i in range(8)]
        wait_until(lambda: doors.status(own)["running"] == 8, 60, "running")
        set_count(own, 1)
        wait_until(lambda: own.problem() is not None, 60, "a front end went with its requests")
        assert "died" in str(own.problem())
        own.stop()
        ends = [future.exception() or future.result() for future in asked]
    assert any("UNAVAILABLE" in repr(getattr(end, "code", "")) or "closed" in str(end).lower() for end in ends), ends
