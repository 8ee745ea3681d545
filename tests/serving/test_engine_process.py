"""The engine process by itself, over its socket: what one client does wrong costs nobody else anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from doors import wait_until

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.engine.exit_codes import EXIT_STOPPED, EXIT_UNUSABLE
from photon_backend.model.config import load_config
from photon_backend.protocol import (
    Beat,
    Cancel,
    Done,
    Failed,
    FromEngine,
    Hello,
    NeedPicture,
    Picture,
    Sampling,
    Status,
    StepTokens,
    Submit,
    decode_from_engine,
    encode,
)

VISION = load_config(TINY_CHECKPOINT).vision
ENDLESS = Sampling(temperature=0, max_tokens=900)
PATIENCE, START_S = 60, 240  # seconds, for a busy machine; loading torch is what takes longest there


class Peer:
    """A client of the engine that says what it is told, right or wrong."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.status = Status()
        self.ends: dict[str, Done | Failed] = {}
        self.socket.send(encode([Hello()]))
        self.receive(Beat)

    def send(self, *messages: object, frames: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart([encode(list(messages)), *frames])  # type: ignore[arg-type]

    def receive(self, *kinds: type) -> FromEngine:
        """The next message of these kinds; others are dropped."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.socket.poll(100):
                for message in self._hear():
                    if isinstance(message, kinds):
                        return message
        raise AssertionError(f"no {[kind.__name__ for kind in kinds]} within {PATIENCE} s")

    def now(self) -> Status:
        """The status, no older than 20 ms. What came before it is dropped."""
        while self.socket.poll(0):
            self._hear()
        self.send(Hello())
        self.receive(Beat)
        return self.status

    def _hear(self) -> list[FromEngine]:
        messages = decode_from_engine(self.socket.recv())
        for message in messages:
            if isinstance(message, Beat):
                self.status = message.status
            elif isinstance(message, Done | Failed):
                self.ends[message.request_id] = message
        return messages


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(checkpoint, run_dir)
    wait_until(
        lambda: (run_dir / "engine-0.sock").exists() or process.poll() is not None, START_S, "the engine listens"
    )
    yield process
    process.terminate()
    assert process.wait(PATIENCE) == EXIT_STOPPED


@pytest.fixture
def peer(engine: subprocess.Popen[bytes], run_dir: Path) -> Iterator[Peer]:
    peer = Peer(f"ipc://{run_dir}/engine-0.sock")
    yield peer
    peer.socket.close(linger=0)


@pytest.fixture
def bystander(engine: subprocess.Popen[bytes], run_dir: Path) -> Iterator[Peer]:
    """Has a request running meanwhile, which ends as if nobody else were there."""
    bystander = Peer(f"ipc://{run_dir}/engine-0.sock")
    wait_until(lambda: bystander.now().rows_in_use == 0, PATIENCE, "what was before has ended")
    bystander.send(Submit("mine", "query", [0, 1, 11, 2, 40, 3, 3], sampling=ENDLESS))
    bystander.receive(StepTokens)
    yield bystander
    bystander.send(Cancel("mine"))
    wait_until(lambda: bystander.now() and "mine" in bystander.ends, PATIENCE, "its request ends")
    assert bystander.ends["mine"].reason in ("cancelled", "length")  # type: ignore[union-attr]
    bystander.socket.close(linger=0)


def start(checkpoint: Path, run_dir: Path, **settings: str) -> subprocess.Popen[bytes]:
    variables = {"PHOTON_CHECKPOINT": str(checkpoint), "PHOTON_RUN_DIR": str(run_dir), **settings}
    return subprocess.Popen(
        [sys.executable, "-m", "photon_backend.engine.server"], env={**os.environ, **variables}, stderr=subprocess.PIPE
    )


def pixels(tiles: int) -> bytes:
    return np.zeros((1 + tiles, VISION.crop_size, VISION.crop_size, 3), np.uint8).tobytes()


MALFORMED = {
    "no messagepack": [b"\xc1\xc1"],
    "not a list": [msgspec.msgpack.encode({"type": "hello"})],
    "unknown message": [msgspec.msgpack.encode([{"type": "explode"}])],
    "wrong field": [msgspec.msgpack.encode([{"type": "submit", "request_id": 5, "task": "query", "prompt_ids": []}])],
    "empty": [b""],
    "extra frame": [encode([Hello()]), b"x"],
    "picture without pixels": [encode([Picture("bad", (1, 1))])],
    "too few pixels": [encode([Picture("bad", (1, 2))]), pixels(1)],
    "too many tiles": [encode([Picture("bad", (3, 3))]), pixels(9)],
    "no tile": [encode([Picture("bad", (0, 5))]), pixels(0)],
    "negative tiles": [encode([Picture("bad", (-1, -1))]), pixels(1)],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_message_costs_its_sender_only(peer: Peer, bystander: Peer, name: str) -> None:
    cancelled = bystander.now().cancelled
    peer.send(Submit("bad", "query", [0, 1, 11, 2, 41, 3, 3], sampling=ENDLESS))
    peer.receive(StepTokens)
    peer.socket.send_multipart(MALFORMED[name])
    wait_until(lambda: bystander.now().cancelled == cancelled + 1, PATIENCE, "the sender's request is cancelled")


def test_client_that_falls_silent_is_dropped(checkpoint: Path, tmp_path: Path) -> None:
    """Its connection stays open, as that of a process that hangs would."""
    process = start(checkpoint, tmp_path, PHOTON_CLIENT_SILENCE_S="1")
    wait_until(lambda: (tmp_path / "engine-0.sock").exists(), START_S, "the engine listens")
    silent, other = (Peer(f"ipc://{tmp_path}/engine-0.sock") for _ in range(2))
    silent.send(Submit("a", "detect", [0, 1, 12, 2, 41, 3], digest=b"s" * 16))  # waits for its picture for ever
    silent.receive(NeedPicture)
    wait_until(lambda: silent.now().waiting == 1, PATIENCE, "its request is counted")  # asking keeps it alive
    wait_until(lambda: other.now().waiting == 0, PATIENCE, "dropped")
    assert other.now().cancelled == 1
    silent.socket.close(linger=0)
    other.socket.close(linger=0)
    process.terminate()
    assert process.wait(PATIENCE) == EXIT_STOPPED


def test_a_paused_machine_drops_nobody(checkpoint: Path, tmp_path: Path) -> None:
    """The engine stands still for longer than a client may be silent, as all do when a container is paused."""
    process = start(checkpoint, tmp_path, PHOTON_CLIENT_SILENCE_S="3")
    wait_until(lambda: (tmp_path / "engine-0.sock").exists(), START_S, "the engine listens")
    peer = Peer(f"ipc://{tmp_path}/engine-0.sock")
    peer.send(Submit("a", "detect", [0, 1, 12, 2, 41, 3], digest=b"s" * 16))  # waits for its picture for ever
    peer.receive(NeedPicture)
    wait_until(lambda: peer.now().waiting == 1, PATIENCE, "its request is counted")
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    while peer.socket.poll(0):
        peer.socket.recv()
    process.send_signal(signal.SIGCONT)
    peer.receive(Beat, Done)
    assert not peer.ends and (peer.now().waiting, peer.status.cancelled) == (1, 0)
    peer.socket.close(linger=0)
    process.terminate()
    assert process.wait(PATIENCE) == EXIT_STOPPED


def test_client_that_is_gone_is_dropped(run_dir: Path, bystander: Peer) -> None:
    cancelled = bystander.now().cancelled
    gone = Peer(f"ipc://{run_dir}/engine-0.sock")
    gone.send(Submit("a", "query", [0, 1, 11, 2, 41, 3, 3], sampling=ENDLESS))
    gone.receive(StepTokens)
    gone.socket.close(linger=0)
    wait_until(lambda: bystander.now().cancelled == cancelled + 1, PATIENCE, "its request is cancelled")


def test_message_for_an_unknown_request_is_ignored(peer: Peer, bystander: Peer) -> None:
    peer.send(Cancel("never heard of"))
    peer.send(Picture("never heard of", (1, 1)), frames=(pixels(1),))
    peer.send(Submit("good", "query", [0, 1, 11, 2, 41, 3, 3], sampling=Sampling(temperature=0, max_tokens=2)))
    assert peer.receive(Done, Failed).request_id == "good"  # type: ignore[union-attr]


def test_unusable_checkpoint_is_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes(b"not tensors")
    process = start(broken, tmp_path)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == EXIT_UNUSABLE
    assert b"Traceback" not in errors and str(broken).encode() in errors
