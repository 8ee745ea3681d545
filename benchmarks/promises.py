"""What docs/operations.md promises in milliseconds, measured on a real server: `python -m benchmarks.promises`

Without a load and under one of endless streams: how long probes take, how long a refusal takes when the engine or the
front ends are full, and how long after a client has left its row is free. Random weights of the bundled model's shape,
so that no answer ends by itself (DEVICE, DTYPE and FRONT_ENDS as for `make serve`). The last line is JSON.

Tests count steps and wait for values; a wall clock says something about one machine and its other load, so it is here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from photon_client import Client, PhotonError

from benchmarks.checkpoints import write_checkpoint
from benchmarks.traffic import Ask, Traffic, make_pictures
from photon_backend.protocol import Beat, Hello, Status, decode_from_engine, encode
from photon_backend.serve import Server, start_server

ENDLESS = {"max_tokens": 700, "temperature": 0}
ROWS, WAITING = 32, 32  # of the engine
OPEN = 16  # of each front end of the second server, which is full before its engine is
RETRY_S = 0.2  # of a worker of the load that was refused
PATHS = ("/v2/health/live", "/v2/health/ready", "/v2/models/photon/ready")
LEAVER = """
import sys
from photon_client import Client
for piece in Client(sys.argv[1]).caption(sys.argv[2], stream=True, max_tokens=700, temperature=0)["caption"]:
    print(piece, flush=True)
"""


class Watch:
    """Asks the engine itself, past Triton: its status is at most 20 ms and one step old."""

    def __init__(self, server: Server) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(f"ipc://{server.layout.run_dir}/engine-0.sock")

    def now(self) -> Status:
        while self._socket.poll(0):
            self._socket.recv()
        self._socket.send(encode([Hello()]))
        (beat,) = decode_from_engine(self._socket.recv())
        assert isinstance(beat, Beat)
        return beat.status

    def wait(self, condition: Callable[[Status], bool], seconds: float = 120) -> Status:
        end = time.monotonic() + seconds
        while not condition(status := self.now()):
            if time.monotonic() > end:
                raise RuntimeError(f"never came: {status}")
            time.sleep(0.002)
        return status


def run_load(grpc: str, http_: str, streams: int) -> None:
    """Endless streams, begun again when they end, in a process of its own."""
    pictures, _ = make_pictures(16)

    async def worker(traffic: Traffic, number: int) -> None:
        while True:
            outcome = await traffic.ask("grpc", Ask("caption", number % len(pictures), None, ENDLESS))
            if outcome.answer is None:
                await asyncio.sleep(RETRY_S)

    async def run() -> None:
        async with Traffic(grpc, http_, pictures) as traffic:
            await asyncio.gather(*(worker(traffic, number) for number in range(streams)))

    asyncio.run(run())


@contextlib.contextmanager
def load(server: Server, watch: Watch, streams: int, wanted: int) -> Iterator[None]:
    """`streams` clients ask within the block, which begins when the engine has `wanted` of their requests."""
    arguments = (server.grpc_url, server.http_url.removeprefix("http://"), streams)
    process = multiprocessing.get_context("spawn").Process(target=run_load, args=arguments)
    process.start()
    try:
        watch.wait(lambda status: status.running + status.waiting >= wanted)
        yield
    finally:
        process.kill()
        process.join()
        watch.wait(lambda status: status.running + status.waiting + status.zombies == 0)


def probe(server: Server, path: str) -> float:
    """Seconds of one probe over a connection of its own, as a kubelet asks. Raises RuntimeError unless it is 200."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise RuntimeError(f"{path}: {status}")
    return time.perf_counter() - begun


def refusal(client: Client, picture: bytes) -> float | None:
    """Seconds until a request is refused; None when it was taken after all, which happens when a place came free."""
    begun = time.perf_counter()
    try:
        client.caption(picture, max_tokens=1, max_time_ms=1)
    except PhotonError as error:
        if error.code != "UNAVAILABLE" or "retry after" not in error.message:
            raise
        return time.perf_counter() - begun
    return None


# each begins a request, waits for the first part of its answer, leaves, and returns when it left


def leave_grpc(server: Server, picture: Path) -> float:
    with Client(server.grpc_url) as client:
        stream = client.caption(picture, stream=True, **ENDLESS)["caption"]
        next(iter(stream))
        begun = time.perf_counter()
        stream.close()
        return begun


def leave_by_kill(server: Server, picture: Path) -> float:
    command = [sys.executable, "-c", LEAVER, server.grpc_url, str(picture)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    begun = time.perf_counter()
    process.kill()
    process.wait()
    return begun


def leave_http(server: Server, picture: Path) -> float:
    traffic = Traffic(server.grpc_url, "", [picture.read_bytes()])
    data = json.dumps(traffic.body(Ask("caption", 0, None, ENDLESS), stream=True)).encode()
    with socket.create_connection((server.host, server.http_port)) as connection:
        head = f"POST /v2/models/photon/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        connection.recv(1)
        return time.perf_counter()


WAYS = {"gRPC stream cancelled": leave_grpc, "client killed (-9)": leave_by_kill, "HTTP closed": leave_http}


def freed(server: Server, watch: Watch, leave: Callable[[Server, Path], float], picture: Path) -> tuple[float, int]:
    """Seconds, and steps of the engine, from the client's leaving until its row and pages are free."""
    cancelled = watch.now().cancelled
    begun = leave(server, picture)
    steps = watch.now().steps
    status = watch.wait(lambda status: status.cancelled > cancelled and status.zombies == 0)
    return time.perf_counter() - begun, status.steps - steps


def row(name: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    """Prints and returns one line: milliseconds at the 50th, 90th and 99th percentile, and the most."""
    values = [float(value) for value in np.percentile(np.array(seconds) * 1e3, (50, 90, 99, 100))] if seconds else []
    extra = "".join(f", {key} {value}" for key, value in more.items())
    print(f"{name:62}{len(seconds):5}" + "".join(f"{value:10.1f}" for value in values) + extra, flush=True)
    return {"what": name, "times": len(seconds), "ms": values, **more}


def measure(server: Server, picture: Path, repeat: int) -> Iterator[dict[str, Any]]:
    watch = Watch(server)
    for streams in (0, ROWS - 1, ROWS + WAITING):
        with load(server, watch, streams, streams) if streams else contextlib.nullcontext():
            for path in PATHS:
                yield row(f"{path}, {streams} streams", [probe(server, path) for _ in range(5 * repeat)])
            for name, leave in WAYS.items() if streams < ROWS else ():
                times = [freed(server, watch, leave, picture) for _ in range(repeat)]
                steps = int(np.median([number for _, number in times]))
                yield row(f"row free after {name}, {streams} streams", [time for time, _ in times], steps=steps)
    yield refusals("engine full", server, picture, repeat, ROWS + WAITING)


def refusals(why: str, server: Server, picture: Path, repeat: int, places: int) -> dict[str, Any]:
    """While more clients ask than there are places."""
    with load(server, Watch(server), places + 8, places), Client(server.grpc_url) as client:
        found = [refusal(client, picture.read_bytes()) for _ in range(5 * repeat)]
    times = [seconds for seconds in found if seconds is not None]
    return row(f"refused, {why}, {places + 8} clients", times, taken=len(found) - len(times))


def server_of(checkpoint: Path, front_ends: int, **settings: int) -> contextlib.AbstractContextManager[Server]:
    return start_server(
        checkpoint=checkpoint,
        device=os.environ.get("DEVICE") or "cpu",
        dtype=os.environ.get("DTYPE") or "float32",
        front_ends=front_ends,
        settings={"PHOTON_ROWS": str(ROWS), **{name: str(value) for name, value in settings.items()}},
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--repeat", type=int, default=20, help="of each way to leave; probes 5 times that [%(default)s]"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    front_ends = int(os.environ.get("FRONT_ENDS") or 2)
    print(f"{'':62}{'n':>5}{'p50 ms':>10}{'p90':>10}{'p99':>10}{'most':>10}")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, picture = Path(directory) / "checkpoint", Path(directory) / "picture.png"
        checkpoint.mkdir()
        write_checkpoint(checkpoint, "tiny", "cpu", "float32")
        picture.write_bytes(make_pictures(17)[0][-1])
        with server_of(checkpoint, front_ends, PHOTON_MAX_WAITING=WAITING) as server:
            rows += measure(server, picture, options.repeat)
        with server_of(checkpoint, front_ends, PHOTON_MAX_OPEN_REQUESTS=OPEN) as server:
            rows.append(refusals("front ends full", server, picture, options.repeat, OPEN * front_ends))
    print(json.dumps({"benchmark": "promises", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
