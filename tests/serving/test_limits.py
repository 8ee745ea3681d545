"""A server with two engines and one front end that takes three requests."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import ServerError, wait_until
from test_pressure import Asked, takes

from photon_backend.serve import Server, start_server

ENDLESS: dict[str, Any] = {"task": "caption", "max_tokens": 700, "temperature": 0}
GOOD: dict[str, Any] = {"task": "caption", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"PHOTON_MAX_OPEN_REQUESTS": "3", "PHOTON_MAX_IMAGE_BYTES": "4000", "PHOTON_THREADS": "1"}
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(checkpoint, front_ends=1, engines=2, settings=settings, log=log) as server:
        wait_until(lambda: sum(metric(server, "up").values()) == 2, 60, "both engines up")
        yield server


def metric(server: Server, name: str) -> dict[int, float]:
    """Values by engine."""
    with doors.OPENER.open(server.metrics_url) as reply:
        text = reply.read().decode()
    return {int(n): float(value) for n, value in re.findall(rf'photon_{name}{{engine="(\d)"}} (\S+)', text)}


def status_of(server: Server, engine: int) -> dict[str, Any]:
    """photon_engine has one instance per engine and any of them may answer."""
    while (status := doors.status(server))["engine"] != engine:
        time.sleep(0.01)
    return status


def test_pictures_are_spread_and_come_back(small: Server, pictures: list[bytes]) -> None:
    """Each picture goes to one engine, the same the second time, where its prefix is cached."""
    first = [doors.grpc_stream(small, image=picture, **GOOD) for picture in pictures]
    again = [doors.grpc_stream(small, image=picture, **GOOD) for picture in pictures]
    assert all(b.usage["cached_tokens"] > 0 and b.same_result(a) for a, b in zip(first, again, strict=True))  # type: ignore[index]
    wait_until(lambda: sum(metric(small, "done_total").values()) == 2 * len(pictures), 60, "counted")
    assert all(count > 0 for count in metric(small, "done_total").values())


def test_more_requests_than_a_front_end_takes(small: Server, pictures: list[bytes]) -> None:
    endless = [{**ENDLESS, "stream": True, "image": picture} for picture in pictures[:3]]
    with Asked(small, endless) as asked:
        for _ in endless:
            assert not isinstance(asked.replies.get(timeout=60), Exception)
        with pytest.raises(ServerError, match=r"^\[UNAVAILABLE\] .*3 requests"):
            doors.grpc_stream(small, image=pictures[4], **GOOD)
    wait_until(lambda: takes(small, pictures[4]), 60, "taken again")


def test_picture_larger_than_the_limit(small: Server) -> None:
    for door in doors.DOORS.values():
        with pytest.raises(ServerError, match=r"\[INVALID_ARG\] .*image"):
            door(small, image=b"\x89PNG\r\n\x1a\n" + bytes(10_000), **GOOD)


def home(server: Server, picture: bytes) -> int:
    """The engine that gets all requests with a picture; what a heartbeat still has to tell of others is less."""
    before = {n: status_of(server, n)["submitted"] for n in (0, 1)}
    for _ in range(5):
        doors.grpc_stream(server, image=picture, **GOOD)
    found: list[int] = []

    def grown() -> bool:
        found[:] = [n for n in before if status_of(server, n)["submitted"] >= before[n] + 5]
        return bool(found)

    wait_until(grown, 60, "counted")
    return found[0]


def test_one_engine_of_two_dies(small: Server, pictures: list[bytes]) -> None:
    """Its requests end at once, the other one's go on, and it answers everything meanwhile; photon stays ready."""
    homes: dict[int, bytes] = {}
    for picture in pictures:
        homes.setdefault(home(small, picture), picture)
        if len(homes) == 2:
            break
    with ThreadPoolExecutor(2) as threads:
        asked = {n: threads.submit(doors.grpc_stream, small, image=homes[n], stream=True, **ENDLESS) for n in homes}
        wait_until(lambda: all(status_of(small, n)["running"] == 1 for n in homes), 60, "one running at each")
        os.kill(status_of(small, 1)["pid"], signal.SIGKILL)
        with pytest.raises(ServerError, match=r"^\[UNAVAILABLE\] .* retry after"):
            asked[1].result(timeout=60)
        assert small.is_ready()
        assert asked[0].result().usage["output_tokens"] > 600  # type: ignore[index]
    for picture in pictures:
        assert doors.grpc_stream(small, image=picture, **GOOD).text
        assert small.is_ready()
    wait_until(lambda: status_of(small, 1)["up"], 60, "back")
    assert status_of(small, 1)["restarts"] == 1 and status_of(small, 0)["restarts"] == 0
