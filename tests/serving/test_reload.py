"""Loading, unloading and reloading photon while it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import ServerError, wait_until

from photon_backend import alive
from photon_backend.serve import Server, start_server

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


def test_reload_under_traffic(own: Server, pictures: list[bytes]) -> None:
    """A changed configuration makes Triton start new stubs beside the old ones; every request is answered."""
    config = (own.layout.models / "photon" / "config.pbtxt").read_text()
    with Traffic(own, pictures) as traffic:
        for count in (1, 2):
            (own.layout.models / "photon" / "config.pbtxt").write_text(config.replace("count: 2", f"count: {count}"))
            repository(own, "load")
            traffic.expect("length")
            assert own.is_ready()

    def signs() -> list[str]:
        """Which of two equal instances Triton keeps, and so their numbers, is its own affair."""
        return sorted(path.name.rsplit("_", 1)[0] for path in own.layout.run_dir.glob(f"*{alive.SUFFIX}"))

    wait_until(lambda: signs() == ["photon_0", "photon_0", "photon_engine", "photon_unary_0"], 60, "old stubs are gone")
    assert own.problem() is None
    wait_until(lambda: doors.idle(own), 60, "nothing is left at the engine")
