"""Reports of front ends: increments that add up whenever the publisher comes."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from photon_backend.numbers import Receiver, Sender, Tally


def test_nothing_is_lost_before_the_publisher_is_there(tmp_path: Path) -> None:
    tally, sender = Tally(), Sender(str(tmp_path))
    for _ in range(5):
        tally.start()
        sender.send(tally, running=3)
    receiver, heard, end = Receiver(str(tmp_path)), [], time.monotonic() + 60
    while sum(report.started for report in heard) < 5:
        assert time.monotonic() < end
        sender.send(tally, running=3)
        heard += receiver.receive()
    assert (sum(report.started for report in heard), sum(report.running for report in heard)) == (5, 3)
    receiver.close()
    sender.close()


def test_a_publisher_that_goes_at_any_moment(tmp_path: Path) -> None:
    """Sending neither blocks nor raises: it would cost the front end all its open requests."""
    tally, sender = Tally(), Sender(str(tmp_path))
    for _ in range(20):
        receiver = Receiver(str(tmp_path))
        end = time.monotonic() + 60
        while not receiver.receive():
            assert time.monotonic() < end
            sender.send(tally, running=0)
        receiver.close()
        for _ in range(200):
            sender.send(tally, running=0)
    sender.close()


def test_no_room_is_no_error(tmp_path: Path) -> None:
    """What a poll said a moment ago need not hold: the socket is asked itself."""
    tally, sender = Tally(), Sender(str(tmp_path))
    sender._socket.poll = lambda *_: zmq.POLLOUT  # type: ignore[method-assign]
    tally.start()
    sender.send(tally, running=1)
    sender.close()
