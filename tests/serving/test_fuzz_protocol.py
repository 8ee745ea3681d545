"""Nonsense of every kind at the engine's socket: it costs its sender, never the engine and never another client.

The engine process is the real one. Frames come from four sources: random bytes, msgpack of anything, messages that are
nearly right (a field changed, bytes damaged), and messages of the right types with values that no front end sends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_engine_process as parts
import zmq
from doors import wait_until
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as some

from photon_backend.engine.exit_codes import EXIT_STOPPED
from photon_backend.protocol import (
    TASKS,
    Cancel,
    Done,
    Failed,
    GrammarSpec,
    Hello,
    Picture,
    Sampling,
    Stop,
    Submit,
    encode,
)

KINDS = ("json_schema", "regex", "choice", "lark")
# what failed once fails for good when it has hurt the engine, so there is nothing to shrink
SHORT = settings(
    max_examples=100,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],  # never by the clock
)
PROMPT = [0, 1, 11, 2, 40, 3, 3]
VALID = [
    Submit("x", "query", PROMPT, sampling=Sampling(temperature=0, max_tokens=3)),
    Submit("x", "detect", [0, 1, 12, 2, 41, 3], digest=b"d" * 16),
    Submit("x", "query", PROMPT, reasoning=True, grammar=GrammarSpec("regex", "a+"), name="n", max_time_ms=5.0),
    Picture("x", (1, 1)),
    Cancel("x"),
    Stop("x"),
    Hello(),
]


@pytest.fixture(scope="module")
def address(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run_dir = tmp_path_factory.mktemp("run")
    process = parts.start(checkpoint, run_dir, PHOTON_LOG_LEVEL="error")
    drain = subprocess.Popen(["cat"], stdin=process.stderr)  # into the test's output
    wait_until(
        lambda: (run_dir / "engine-0.sock").exists() or process.poll() is not None,
        parts.START_S,
        "the engine listens",
    )
    yield f"ipc://{run_dir}/engine-0.sock"
    process.terminate()
    assert process.wait(parts.PATIENCE) == EXIT_STOPPED
    drain.wait(parts.PATIENCE)


@pytest.fixture(scope="module")
def bystander(address: str) -> Iterator[parts.Peer]:
    """A good client, which asks for something after every piece of nonsense."""
    peer = parts.Peer(address)
    yield peer
    peer.socket.close(linger=0)


anything = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**63), 2**64 - 1) | some.floats() | some.text() | some.binary(),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@some.composite
def nearly_right(draw: Any) -> bytes:
    message = msgspec.to_builtins(draw(some.sampled_from(VALID)), builtin_types=(bytes,))
    for _ in range(draw(some.integers(0, 3))):
        message[draw(some.sampled_from([*message, "unknown"]))] = draw(anything)
    frame = bytearray(msgspec.msgpack.encode([message]))
    for _ in range(draw(some.integers(0, 2))):
        frame[draw(some.integers(0, len(frame) - 1))] = draw(some.integers(0, 255))
    return bytes(frame[: draw(some.integers(len(frame) // 2, len(frame)))] if draw(some.booleans()) else frame)


wild = some.integers(-(2**63), 2**63 - 1)
odd_samplings = some.builds(
    Sampling,
    temperature=some.just(0.0) | some.floats(),
    top_p=some.just(1.0) | some.floats(),
    top_k=some.integers(0, 9) | wild,
    max_tokens=some.integers(1, 4) | wild,
    seed=some.integers(0, 9) | wild,
)
odd_submits = some.builds(
    Submit,
    request_id=some.text(max_size=3),
    task=some.sampled_from(TASKS),
    prompt_ids=some.just(PROMPT) | some.lists(some.integers(0, 255), max_size=8) | some.lists(wild, max_size=3),
    digest=some.none() | some.binary(min_size=16, max_size=16) | some.binary(max_size=20),
    coords=some.just([]) | some.lists(some.floats(), max_size=3),
    sizes=some.just([]) | some.lists(some.tuples(some.floats(), some.floats()), max_size=2),
    reasoning=some.booleans(),
    max_objects=some.integers(1, 3) | wild,
    max_time_ms=some.just(0.0) | some.floats(),
    sampling=some.just(Sampling(temperature=0, max_tokens=2)) | odd_samplings,
    grammar=some.none() | some.builds(GrammarSpec, kind=some.sampled_from(KINDS), text=some.text(max_size=12)),
    name=some.text(max_size=3),
)
odd_messages = some.lists(odd_submits | some.builds(Stop, some.text(max_size=3)), max_size=3).map(encode)
frames = some.binary(max_size=64) | anything.map(msgspec.msgpack.encode) | nearly_right() | odd_messages


# a deadline further off than a lock can wait, found here
@example(message=encode([Submit("x", "point", [81], digest=b"d" * 16, max_time_ms=1e300)]))
@given(message=odd_messages)
@SHORT
def test_odd_values_cost_their_request_only(address: str, bystander: parts.Peer, message: bytes) -> None:
    """Of the right types, so the engine has to look at them."""
    sender = zmq.Context.instance().socket(zmq.DEALER)
    sender.connect(address)
    sender.send(message)
    bystander.send(Submit("good", "query", PROMPT, sampling=Sampling(temperature=0, max_tokens=2)))
    assert isinstance(bystander.receive(Done, Failed), Done)
    sender.close(linger=1000)


@given(some.lists(some.lists(frames, min_size=1, max_size=3), min_size=1, max_size=4))
@SHORT
def test_nonsense_costs_its_sender_only(address: str, bystander: parts.Peer, messages: list[list[bytes]]) -> None:
    sender = zmq.Context.instance().socket(zmq.DEALER)
    sender.connect(address)
    for message in messages:
        sender.send_multipart(message)
    bystander.send(Submit("good", "query", PROMPT, sampling=Sampling(temperature=0, max_tokens=2)))
    assert isinstance(bystander.receive(Done, Failed), Done)
    sender.close(linger=1000)


def test_afterwards_nothing_is_left(address: str, bystander: parts.Peer) -> None:
    """What nonsense has opened ended with its connection; rows and pages are as at the start."""

    def is_as_at_the_start() -> bool:
        status = bystander.now()
        ended = status.done + status.failed + status.cancelled
        return status.running + status.waiting + status.rows_in_use + status.zombies == 0 and ended == status.submitted

    wait_until(is_as_at_the_start, parts.PATIENCE, "nothing is left")
