"""The link against scripted engines on real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from photon_backend.config import Settings
from photon_backend.frontend import link as link_module
from photon_backend.frontend.link import EnginePeer, Link
from photon_backend.protocol import (
    REQUEST_ID_BYTES,
    Beat,
    Cancel,
    Done,
    Hello,
    PhotonError,
    Status,
    StepTokens,
    Tokens,
    Usage,
    decode_to_engine,
    encode,
)


class ScriptedEngine:
    """Binds as an engine does and keeps what it hears."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(f"ipc://{run_dir}/engine-{index}.sock")
        self.client = b""
        self.heard: list[object] = []

    def listen(self) -> None:
        while self.socket.poll(0):
            self.client, frame = self.socket.recv_multipart()
            self.heard += decode_to_engine(frame)

    def say(self, *messages: object) -> None:
        self.socket.send_multipart([self.client, encode(list(messages))])  # type: ignore[arg-type]

    def die(self) -> None:
        self.socket.close(linger=0)


def step_tokens(**ids: int) -> StepTokens:
    """A token of each request."""
    names = b"".join(name.encode().ljust(REQUEST_ID_BYTES, b"\0") for name in ids)
    return StepTokens(names, np.array(list(ids.values()), np.int32).tobytes())


def turns(link: Link, engines: list[ScriptedEngine], until: Callable[[], object]) -> list[EnginePeer]:
    """Lets both sides work until a condition holds; returns the engines that were lost meanwhile."""
    lost: list[EnginePeer] = []
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        for engine in engines:
            if not engine.socket.closed:
                engine.listen()
        for _ in link.receive():
            pass
        lost += link.tend()
        time.sleep(0.001)
    return lost


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[ScriptedEngine]]:
    engines = [ScriptedEngine(tmp_path, index) for index in range(3)]
    yield engines
    for engine in engines:
        engine.die()


@pytest.fixture
def link(tmp_path: Path, engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """All three engines are up and idle. They say so once, so silence means nothing here."""
    monkeypatch.setattr(link_module, "SILENCE_S", 600)
    link = Link(Settings(run_dir=str(tmp_path), max_waiting=4), zmq.Poller(), range(3))
    turns(link, engines, lambda: all(engine.client for engine in engines))
    for engine in engines:
        engine.say(Beat(Status()))
    turns(link, engines, lambda: all(peer.up for peer in link.peers))
    yield link
    link.close()


DIGESTS = [bytes([number]) * 16 for number in range(60)]


def test_greets_before_anything_else(link: Link, engines: list[ScriptedEngine]) -> None:
    assert all(isinstance(engine.heard[0], Hello) for engine in engines)


def test_a_picture_has_its_engine(link: Link) -> None:
    chosen = [link.choose(digest) for digest in DIGESTS]
    assert chosen == [link.choose(digest) for digest in DIGESTS]
    assert {peer.index for peer in chosen} == {0, 1, 2}


def test_only_the_pictures_of_a_lost_engine_move(link: Link, engines: list[ScriptedEngine]) -> None:
    before = [link.choose(digest) for digest in DIGESTS]
    engines[1].die()
    assert turns(link, engines, lambda: not link.peers[1].up) == [link.peers[1]]
    for digest, peer in zip(DIGESTS, before, strict=True):
        now = link.choose(digest)
        assert now is peer if peer is not link.peers[1] else now in (link.peers[0], link.peers[2])


def test_a_full_engine_is_passed_over(link: Link) -> None:
    favourite = link.choose(DIGESTS[0])
    favourite.status = Status(waiting=4)
    assert link.choose(DIGESTS[0]) is not favourite


def test_when_all_are_full_it_says_so_itself(link: Link) -> None:
    for peer in link.peers:
        peer.status = Status(waiting=4)
    for digest in (None, DIGESTS[0]):
        with pytest.raises(PhotonError, match=r"^\[UNAVAILABLE\] 4 requests are waiting already; retry after 1 s$"):
            link.choose(digest)
    link.peers[2].status = Status(waiting=3, running=9)
    assert link.choose(None) is link.choose(DIGESTS[0]) is link.peers[2]


def test_without_a_picture_the_least_loaded(link: Link) -> None:
    for peer, running in zip(link.peers, (3, 1, 1), strict=True):
        peer.status = Status(running=running)
    link.peers[1].load = 5
    assert link.choose(None) is link.peers[2]


def test_no_engine(link: Link, engines: list[ScriptedEngine]) -> None:
    for engine in engines:
        engine.die()
    turns(link, engines, lambda: not any(peer.up for peer in link.peers))
    for digest in (None, DIGESTS[0]):
        with pytest.raises(PhotonError, match=r"^\[UNAVAILABLE\] no engine is running .*; retry after 5 s$"):
            link.choose(digest)


def test_a_new_engine_never_hears_what_was_meant_for_the_old_one(
    link: Link, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    engines[0].die()
    link.peers[0].send([Cancel("for the old one")])
    turns(link, engines, lambda: not link.peers[0].up)
    engines[0] = ScriptedEngine(tmp_path, 0)
    turns(link, engines, lambda: engines[0].client)
    engines[0].say(Beat(Status()))
    turns(link, engines, lambda: link.peers[0].up)
    link.peers[0].send([Cancel("for the new one")])
    turns(link, engines, lambda: any(isinstance(message, Cancel) for message in engines[0].heard))
    assert [m for m in engines[0].heard if isinstance(m, Cancel)] == [Cancel("for the new one")]


def test_what_the_engine_said_before_its_end_is_heard(link: Link, engines: list[ScriptedEngine]) -> None:
    engines[0].say(step_tokens(a=1), step_tokens(a=2), Done("a", "stop", Usage()))
    engines[0].socket.close(linger=1000)
    heard: list[object] = []
    end = time.monotonic() + 60
    while link.peers[0] not in link.tend():
        assert time.monotonic() < end
        for peer, messages in link.receive():
            assert peer is link.peers[0]
            heard += messages
    assert heard == [Tokens("a", [1]), Tokens("a", [2]), Done("a", "stop", Usage())]


def test_silence_counts_as_death(link: Link, engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE_S", 0.05)
    assert link.peers[0] in turns(link, engines, lambda: not link.peers[0].up)


def test_a_pause_of_ours_is_no_silence_of_theirs(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still: nobody looked, so nobody was silent. From then on the seconds count again."""
    monkeypatch.setattr(link_module, "SILENCE_S", 4)
    link.tend()
    (peer, *_), now = link.peers, time.monotonic() + 100
    assert not peer.lost(now) and peer.up
    assert any(peer.lost(now + 0.5 * turn) for turn in range(1, 10)) and not peer.up


def test_messages_are_whole(link: Link, engines: list[ScriptedEngine]) -> None:
    """Heartbeats are taken out of a frame, everything else keeps its order."""
    engines[2].say(step_tokens(a=1), Beat(Status(running=7)), step_tokens(b=2, a=3))
    heard: list[object] = []
    end = time.monotonic() + 60
    while len(heard) < 3:
        assert time.monotonic() < end
        for _, messages in link.receive():
            heard += messages
    assert msgspec.to_builtins(heard) == msgspec.to_builtins([Tokens("a", [1]), Tokens("b", [2]), Tokens("a", [3])])
    assert link.peers[2].status == Status(running=7)
