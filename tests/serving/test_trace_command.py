"""`photon trace` against a real server with two engines: what is recorded, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import ServerError, wait_until
from photon_client import AsyncClient, Client, InvalidArgument, Unavailable

from photon_backend import alive
from photon_backend.engine.trace import DEVICE_LANES, HOST_LANES
from photon_backend.serve import Server, start_server

PHOTON = str(Path(sys.executable).parent / "photon")
SHORT = {"max_tokens": 6, "temperature": 0}
PATIENCE = 60  # seconds, for a machine that does other things too


@pytest.fixture(scope="module")
def traced(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(checkpoint, engines=2, front_ends=1, settings={"PHOTON_THREADS": "1"}, log=log) as server:
        wait_until(lambda: all(status_of(server, engine)["up"] for engine in (0, 1)), PATIENCE, "both engines up")
        yield server


@pytest.fixture
def client(traced: Server) -> Iterator[Client]:
    with Client(traced.grpc_url) as client:
        yield client


def status_of(server: Server, engine: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def asked() -> bool:
        found.update(doors.status(server))
        return bool(found["engine"] == engine)

    wait_until(asked, PATIENCE, "that engine's supervisor answers")
    return found


@pytest.fixture
def traffic(client: Client, pictures: list[bytes]) -> Iterator[None]:
    """Pictures one after the other, spread over both engines, some of them cached."""
    over = threading.Event()

    def ask(first: int) -> None:
        for number in itertools.count(first):
            if over.is_set():
                return
            client.caption(pictures[number % len(pictures)], **SHORT)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, 4 * number) for number in range(4)]
        yield
        over.set()
        for future in asked:
            future.result()


def lanes(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Events by lane, in order of time."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[names[event["pid"], event["tid"]]].append(event)
    return found


def ticks_of(emits: list[dict[str, Any]]) -> list[int]:
    """Those of a recording, in order: each emits once, or twice if it launches a prefill."""
    return sorted({event["args"]["tick"] for event in emits})


def engine_of(trace: dict[str, Any]) -> int:
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    numbers = {int(name.split(":")[0].removeprefix("engine ")) for name in names}
    assert len(numbers) == 1
    return numbers.pop()


def test_trace_of_an_engine_at_work(traced: Server, traffic: None, tmp_path: Path) -> None:
    """Through the command: all lanes, nothing at the same time in one of them, ticks and steps in order."""
    file = tmp_path / "out.json"
    command = [PHOTON, "trace", str(file), "--ticks", "80", "--seconds", "60", "--url", traced.grpc_url, "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=2 * PATIENCE).stdout)
    by_lane = lanes(json.loads(file.read_text()))
    assert set(by_lane) == {*HOST_LANES, *DEVICE_LANES}
    for lane, events in by_lane.items():
        for one, other in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.002, lane  # microseconds; a float of some minutes
        numbers = [event["args"]["tick" if lane in HOST_LANES else "step"] for event in events]
        assert numbers == sorted(numbers), lane
    ticks = ticks_of(by_lane["emit"])
    assert ticks == list(range(ticks[0], ticks[0] + 80))
    steps = {event["args"]["step"] for lane in DEVICE_LANES for event in by_lane[lane]}
    assert said == {"file": str(file), "ticks": 80, "steps": len(steps)}


def test_the_engine_that_was_asked_for(client: Client, traffic: None) -> None:
    for engine in (1, 0):
        assert engine_of(client.trace(ticks=5, seconds=60, engine=engine)) == engine


def test_the_asyncio_twin(traced: Server, traffic: None) -> None:
    async def ask() -> dict[str, Any]:
        async with AsyncClient(traced.grpc_url) as client:
            return await client.trace(ticks=5, seconds=60, engine=0)

    assert len(ticks_of(lanes(asyncio.run(ask()))["emit"])) == 5


def test_nobody_waits_for_a_trace(traced: Server, client: Client, pictures: list[bytes]) -> None:
    """Both supervisors' stubs have one to wait for, and answer status, requests and a refusal meanwhile."""
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(long_trace, client, engine) for engine in (0, 1)]
        for engine in (0, 1):
            wait_until(lambda e=engine: refused(client, e), PATIENCE, "recording")
        for engine in (0, 1):
            assert status_of(traced, engine)["up"]
        assert client.caption(pictures[0], **SHORT)["caption"]
        assert not any(future.done() for future in asked)
        documents = [future.result(timeout=2 * PATIENCE) for future in asked]
    assert [engine_of(document) for document in documents] == [0, 1]
    assert sum(len(lanes(document)["prefill"]) for document in documents) == 1


def long_trace(client: Client, engine: int) -> dict[str, Any]:
    while True:
        try:
            return client.trace(2000, 30.0, engine)
        except Unavailable as error:
            if "another trace" not in error.message:  # one of `refused` below
                raise


def refused(client: Client, engine: int) -> bool:
    try:
        client.trace(1, 0.1, engine)
    except Unavailable as error:
        assert "another trace is being recorded; retry after" in error.message
        return True
    return False


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ticks": 0}, "ticks"),
        ({"ticks": 2001}, "ticks"),
        ({"ticks": 1 << 40}, "ticks"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 61}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"engine": 2}, "engine"),
        ({"engine": -1}, "engine"),
    ],
)
def test_arguments_out_of_range(client: Client, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^\\[INVALID_ARG\\] {name}"):
        client.trace(**arguments)


def test_unknown_command(traced: Server) -> None:
    command = {"name": "command", "shape": [1], "datatype": "BYTES", "data": ["explode"]}
    with pytest.raises(ServerError, match=r"^\[INVALID_ARG\] command must be"):
        doors.post(traced, "/v2/models/photon_engine/infer", {"inputs": [command]})


def test_the_command_says_why_it_failed(traced: Server, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [PHOTON, "trace", str(file), "--engine", "9", "--url", traced.grpc_url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 2 and "engine must be below 2, got 9" in result.stderr
    assert not file.exists()


def test_an_engine_that_dies_meanwhile(traced: Server, client: Client) -> None:
    """Its trace ends, that of the other engine goes on."""
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(long_trace, client, engine) for engine in (0, 1)]
        for engine in (0, 1):
            wait_until(lambda e=engine: refused(client, e), PATIENCE, "recording")
        os.kill(status_of(traced, 1)["pid"], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"^\[UNAVAILABLE\] the engine ended while the trace was recorded"):
            asked[1].result(timeout=PATIENCE)
        assert engine_of(asked[0].result(timeout=2 * PATIENCE)) == 0
    wait_until(lambda: status_of(traced, 1)["up"], PATIENCE, "back")
    wait_until(lambda: not refused(client, 1), PATIENCE, "records again")


def test_a_server_that_stops(traced: Server, client: Client) -> None:
    """Really the last test: whoever waits for a trace is told at once, and then there is nothing to wait for."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(long_trace, client, 0)
        wait_until(lambda: refused(client, 0), PATIENCE, "recording")
        traced.drain(PATIENCE, threading.Event())
        with pytest.raises(Unavailable, match=r"^\[UNAVAILABLE\] the server is stopping; retry after"):
            asked.result(timeout=PATIENCE)
    assert alive.with_open(traced.layout.run_dir) == []
