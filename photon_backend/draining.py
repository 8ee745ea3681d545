"""An orderly end: new requests are refused, those that run finish within a bound, then everything stops.

Triton's own end does not do: on SIGTERM it unloads all models at once, and the supervisor takes the engine along while
front ends still wait for it. So the launcher, which gets the signal first, marks the private directory and waits. Front
ends refuse by that mark; whether anything is open the engines tell in their heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from photon_backend.config import Settings
from photon_backend.frontend.link import Link

MARK = "draining"
QUIET_S = 0.5  # two heartbeats without an open request, so that the last answer has left its front end too
FIRST_BEAT_S = 3.0  # an engine that has not answered by then is down and has no requests
TURN_MS = 50


def marked(run_dir: str) -> bool:
    """A look at the file system: 2 us."""
    return (Path(run_dir) / MARK).exists()


def drain(run_dir: Path, engines: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
    """Refuses new requests from now on; returns when none is open, or False after `timeout_s` or when `given_up()`."""
    (run_dir / MARK).touch()
    poller = zmq.Poller()
    link = Link(Settings(run_dir=str(run_dir)), poller, range(engines))
    begun = quiet_since = time.monotonic()
    try:
        while not given_up():
            poller.poll(TURN_MS)
            for _ in link.receive():
                pass  # heartbeats only; the peers keep them
            link.tend()
            now = time.monotonic()
            unknown = now - begun < FIRST_BEAT_S and not all(peer.up for peer in link.peers)
            if unknown or any(peer.status and peer.status.waiting + peer.status.running for peer in link.peers):
                quiet_since = now
            if now - quiet_since >= QUIET_S:
                return True
            if now - begun >= timeout_s:
                return False
        return False
    finally:
        link.close()
