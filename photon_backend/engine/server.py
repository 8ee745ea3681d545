"""Engine process: `python -m photon_backend.engine.server --index i`, started by the supervisor.

The engine runs on its own thread. The main thread is the I/O thread: it owns the ROUTER socket, hands what clients send
to the engine, and sends what the engine emits, everything for one client that has piled up in one message. A client is
a ZeroMQ identity: one connection of a front end or a supervisor. A client that says something that cannot be read, or
nothing for `client_silence_s`, is dropped with its requests; no other one notices. One whose process ended is dropped
at the next heartbeat, which cannot be sent.

The I/O thread also watches the engine thread: when one tick takes longer than `tick_limit_s`, the device hangs or a
loop has no end. Nothing on that thread can be answered or cleaned up any more, so the process prints where every thread
is and ends; the front ends see the connection break and answer what was open, the supervisor starts a new process.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from photon_backend.config import Settings, read_settings
from photon_backend.engine.engine import Engine
from photon_backend.engine.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_STUCK, EXIT_UNUSABLE
from photon_backend.log import set_up_logging
from photon_backend.model.config import VisionConfig, load_config
from photon_backend.model.weights import CheckpointError
from photon_backend.processes import end_with_parent
from photon_backend.protocol import Beat, FromEngine, Hello, Picture, decode_to_engine, encode

MESSAGES_PER_TURN = 256  # read before what the engine emitted is sent
YOUNG_OBJECTS = 50_000  # more of them than at the last collection start the next one

log = logging.getLogger("photon.engine")


class MalformedMessage(Exception):
    """What a client sent cannot be read. Costs that client its requests."""


class EngineServer:
    """The I/O thread of an engine process. `run` returns after `stop`, which a signal handler may call."""

    def __init__(self, settings: Settings, index: int) -> None:
        self._vision: VisionConfig = load_config(Path(settings.checkpoint)).vision
        self._beat_s = settings.beat_ms / 1000
        self._client_silence_s = settings.client_silence_s
        self._clients: dict[bytes, float] = {}  # to the time it was last heard
        self._outbox: deque[tuple[bytes, list[FromEngine]]] = deque()
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._engine = Engine(settings, self._emit)
        self._pulse: int | None = None  # of the engine thread, at the last heartbeat
        self._beats_at_pulse = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # what may pile up is bounded by max_waiting, rows and max_tokens
        self._socket.router_mandatory = True  # a client that is gone is an error, not a silent loss
        self._socket.bind(f"ipc://{Path(settings.run_dir) / f'engine-{index}.sock'}")

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def run(self) -> int:
        """Serves until `stop`, or until the engine fails or is stuck. Returns the exit status."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        self._engine.start()
        next_beat = time.monotonic()
        while not self._stopping and self._engine.failure is None:
            events = dict(poller.poll(max(0, round(1000 * (next_beat - time.monotonic())))))
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
            self._receive()
            self._send_outbox()
            now = time.monotonic()
            if now >= next_beat:
                late, next_beat = now - next_beat, now + self._beat_s
                if self._stuck():
                    log.error("the engine thread is stuck in one tick for %.0f s", self._engine.tick_limit_s)
                    return EXIT_STUCK
                self._drop_silent(now, late)
                self._beat(list(self._clients))
        self._engine.stop()
        self._send_outbox()
        self._context.destroy(linger=1000)
        return EXIT_STOPPED if self._engine.failure is None else EXIT_FAILED

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        """Called on the engine thread."""
        self._outbox.append((client, messages))
        os.eventfd_write(self._wake_fd, 1)

    def _stuck(self) -> bool:
        """Counts heartbeats and not seconds: a process that did not run itself has not waited."""
        pulse = self._engine.pulse()
        self._beats_at_pulse = self._beats_at_pulse + 1 if pulse == self._pulse else 0
        self._pulse = pulse
        return pulse is not None and self._beats_at_pulse * self._beat_s > self._engine.tick_limit_s

    # in

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(client.bytes, frames)

    def _take(self, client: bytes, frames: list[zmq.Frame]) -> None:
        self._clients[client] = time.monotonic()
        try:
            messages = decode_to_engine(frames[0].bytes) if frames else []
            pixels = self._pixels(messages[0], frames) if messages and isinstance(messages[0], Picture) else None
            if len(messages) > 1 and any(isinstance(message, Picture) for message in messages):
                raise MalformedMessage("a picture that is not alone in its message")
            if len(frames) != (1 if pixels is None else 2):
                raise MalformedMessage(f"a message of {len(frames)} frames")
        except (msgspec.MsgspecError, MalformedMessage) as error:
            log.error("client %s is dropped, it sent what cannot be read: %s", client.hex(), error)
            self._drop(client)
            return
        for message in messages:
            if isinstance(message, Hello):
                self._beat([client])
            else:
                self._engine.post(client, message, pixels)

    def _pixels(self, picture: Picture, frames: list[zmq.Frame]) -> np.ndarray:
        """uint8 [C, side, side, 3], read-only, in the memory of the message."""
        rows, columns = picture.tiling
        tiles, side = rows * columns, self._vision.crop_size
        if min(rows, columns) < 1 or tiles > self._vision.max_crops:
            raise MalformedMessage(f"a picture of {rows} x {columns} tiles")
        expected = (1 + tiles) * side * side * 3
        if len(frames) != 2 or len(frames[1]) != expected:
            raise MalformedMessage(f"a picture without its frame of {expected} bytes")
        return np.frombuffer(frames[1].buffer, dtype=np.uint8).reshape(1 + tiles, side, side, 3)

    # out

    def _send_outbox(self) -> None:
        """One message per client for all that has piled up, in order."""
        by_client: dict[bytes, list[FromEngine]] = {}
        while self._outbox:
            client, messages = self._outbox.popleft()
            by_client.setdefault(client, []).extend(messages)
        for client, messages in by_client.items():
            self._send(client, messages)

    def _beat(self, clients: list[bytes]) -> None:
        beat = Beat(self._engine.status())
        for client in clients:
            self._send(client, [beat])

    def _send(self, client: bytes, messages: list[FromEngine]) -> None:
        try:
            self._socket.send_multipart([client, encode(messages)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(client)

    def _drop_silent(self, now: float, late: float) -> None:
        """`late`: how long this process did not run, as on a machine that was paused; nobody was heard meanwhile."""
        self._clients = {client: min(now, heard + late) for client, heard in self._clients.items()}
        for client in [client for client, heard in self._clients.items() if now - heard > self._client_silence_s]:
            log.warning("client %s has been silent for %.0f s and is dropped", client.hex(), self._client_silence_s)
            self._drop(client)

    def _drop(self, client: bytes) -> None:
        if self._clients.pop(client, None) is not None:
            self._engine.drop_client(client)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m photon_backend.engine.server", description="The engine process.")
    parser.add_argument("--index", type=int, default=0, help="number of the engine, and of its GPU with several")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process id of the supervisor")
    options = parser.parse_args()
    end_with_parent(signal.SIGKILL, options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    try:
        settings = read_settings()
        set_up_logging(f"engine-{options.index}", settings.log_level)
        if settings.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"PHOTON_DEVICE is {settings.device}, but torch {torch.__version__} finds no CUDA device here"
            )
        server = EngineServer(_for_index(settings, options.index), options.index)
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        print(f"engine-{options.index}: {error}", file=sys.stderr, flush=True)
        return EXIT_UNUSABLE
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    freeze_garbage()
    status = server.run()
    if status == EXIT_STUCK:
        faulthandler.dump_traceback()
    # Everything is said and sent. The interpreter's own end would take torch apart, which costs seconds on a busy
    # machine, longer than Triton waits, and would wait for a thread or a device that hangs.
    sys.stderr.flush()
    os._exit(status)


def freeze_garbage() -> None:
    """Keeps the garbage collector out of the tick; called once everything is loaded.

    What lives now lives to the end and is not looked at again: a full collection of all of it was seen to stop a tick
    for 0.17 s. And requests that come make more objects than Python's own threshold for young ones (700), which would
    collect within their ticks, each time with what else came since. The loop makes no cycles but for errors; those wait
    for their turn.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _for_index(settings: Settings, index: int) -> Settings:
    """With several engines on `cuda`, each has the GPU of its number."""
    if settings.device == "cuda" and settings.engines > 1:
        return msgspec.structs.replace(settings, device=f"cuda:{index}")
    return settings


if __name__ == "__main__":
    sys.exit(main())
