"""ZeroMQ link to the engines, of a front end or a supervisor. Everything here belongs to one thread.

An engine is up from its first heartbeat on a connection until that connection breaks or heartbeats stay away for
`SILENCE_S`. Both end in `lost()`, which throws the socket away: messages that were queued for the old engine must never
reach its successor, which knows nothing of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from photon_backend.config import Settings
from photon_backend.protocol import (
    Beat,
    Heard,
    Hello,
    Status,
    ToEngine,
    decode_from_engine,
    encode,
    unavailable,
    unpacked,
)

SILENCE_S = 4.0  # without a heartbeat an engine counts as dead; room for a machine with more to do than cores
LOOK_S = 1.0  # a longer time between two looks is one in which this process did not run
HELLO_S = 1.0  # how often the engine hears that we are alive


class EnginePeer:
    """One engine, seen from here. `load` is the number of our own requests at it; its user keeps it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, run_dir: str, index: int) -> None:
        self.index = index
        self.load = 0
        self.status: Status | None = None  # of the last heartbeat; None: not up
        self._context = context
        self._poller = poller
        self._address = f"ipc://{Path(run_dir) / f'engine-{index}.sock'}"
        self._connect()

    @property
    def up(self) -> bool:
        return self.status is not None

    def _connect(self) -> None:
        self.status = None
        self._broken = False
        self._last_beat = self._last_look = time.monotonic()
        self._next_hello = 0.0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # bounded by the number of open requests instead
        self._socket.linger = 0
        self._socket.reconnect_ivl = 50
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def send(self, messages: list[ToEngine], pixels: memoryview | None = None) -> None:
        """`pixels` goes along as a second frame without being copied; its memory must not change afterwards."""
        if pixels is None:
            self._socket.send(encode(messages))
        else:
            self._socket.send_multipart([encode(messages), pixels], copy=False)

    def receive(self) -> list[Heard]:
        """All messages that have come, heartbeats taken out. Raises what decoding raises: the engine is our own."""
        received: list[Heard] = []
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:  # first: what came before the break is then here to read
            recv_monitor_message(self._monitor)
            self._broken = True
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return received
            for message in unpacked(decode_from_engine(frame)):
                if isinstance(message, Beat):
                    self._last_beat = time.monotonic()
                    self.status = message.status
                else:
                    received.append(message)

    def greet(self, now: float) -> None:
        """Says Hello once in a while: the engine drops a client that it has not heard for some seconds."""
        if now >= self._next_hello:
            self._next_hello = now + HELLO_S
            self._socket.send(encode([Hello()]))

    def lost(self, now: float) -> bool:
        """Whether `receive` saw the connection break or heartbeats stayed away; if so, connects anew.

        Only time counts in which somebody looked: a machine that was paused is no engine that died.
        """
        self._last_beat = min(now, self._last_beat + max(0.0, now - self._last_look - LOOK_S))
        self._last_look = now
        lost = self._broken or (self.up and now - self._last_beat > SILENCE_S)
        if lost:
            self.close()
            self._connect()
        return lost


class Link:
    """The engines of `indices`, all on one poller."""

    def __init__(self, settings: Settings, poller: zmq.Poller, indices: range) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._max_waiting = settings.max_waiting
        self.peers = [EnginePeer(self._context, poller, settings.run_dir, index) for index in indices]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self._context.term()

    def receive(self) -> Iterator[tuple[EnginePeer, list[Heard]]]:
        """What has come, by engine. Drained whole, so that tokens that piled up leave in one response."""
        for peer in self.peers:
            messages = peer.receive()
            if messages:
                yield peer, messages

    def send_all(self, messages: list[ToEngine]) -> None:
        """To every engine that is up."""
        for peer in self.peers:
            if peer.up:
                peer.send(messages)

    def tend(self) -> list[EnginePeer]:
        """Greets every engine; returns those that were lost since the last call, already connecting anew."""
        now = time.monotonic()
        lost = [peer for peer in self.peers if peer.lost(now)]
        for peer in self.peers:
            peer.greet(now)
        return lost

    def choose(self, digest: bytes | None) -> EnginePeer:
        """The engine for a picture, always the same while the same engines are up, so that its prefix is found again.

        Without a picture, or when that engine's waiting list is full, the least loaded one. Raises PhotonError
        UNAVAILABLE when no engine is up, or when all were full at their last heartbeat: an engine refuses by itself
        too, but not before its next tick. Price: the refusals go on for a heartbeat after a place became free.
        """
        live = [peer for peer in self.peers if peer.up]
        if not live:
            raise unavailable("no engine is running at the moment", 5)
        with_room = [peer for peer in live if _status(peer).waiting < self._max_waiting]
        if not with_room:
            raise unavailable(f"{self._max_waiting} requests are waiting already", 1)
        if digest is not None:
            favourite = max(live, key=lambda peer: hashlib.blake2b(digest, key=b"%d" % peer.index).digest())
            if favourite in with_room:
                return favourite
        return min(with_room, key=lambda peer: (_status(peer).waiting + _status(peer).running, peer.load))


def _status(peer: EnginePeer) -> Status:
    assert peer.status is not None
    return peer.status
