"""An orderly end: new requests are refused, those that run finish within a bound, the rest is answered.

Triton's own end (2.51) does not do: on SIGTERM it unloads all models at once, and the supervisor takes the engine along
while front ends still wait for it; an idle HTTP connection uses up its exit time-out, after which nobody is answered;
it sleeps for a second in the destructor of each instance, one after the other; and an open gRPC stream keeps it for
ever. So the launcher, which gets the signal first, leaves two marks in the private directory, one after the other:

- DRAINING: who takes requests refuses new ones from now on;
- ENDING: and answers those that are open, UNAVAILABLE, without waiting for any engine.

Front ends show from their start on that requests may be open there (`Sign.set_open`), until after DRAINING none is;
supervisors show it while somebody waits for a trace. When nobody does any more, nothing in any of these processes is
needed, and the launcher kills them (serve.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from photon_backend.alive import with_open

DRAINING = "draining"
ENDING = "ending"
ANSWER_S = 5.0  # from ENDING to the last answer; only who hangs needs more
LOOK_S = 0.05


def marked(run_dir: str, mark: str = DRAINING) -> bool:
    """A look at the file system: 2 us."""
    return (Path(run_dir) / mark).exists()


def _mark(run_dir: Path, mark: str) -> None:
    """Makes the directory anew when somebody removed it, who tidied up: the signs are lost with it, so nobody waits for
    the answers, but who looks for the marks still finds them and answers."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / mark).touch()


def drain(run_dir: Path, timeout_s: float, given_up: Callable[[], bool]) -> bool:
    """Refuses new requests from now on; returns when none is open, or False after `timeout_s` or when `given_up()`."""
    _mark(run_dir, DRAINING)
    end = time.monotonic() + timeout_s
    while with_open(run_dir):
        if given_up() or time.monotonic() >= end:
            return False
        time.sleep(LOOK_S)
    return True


def answer_rest(run_dir: Path) -> list[str]:
    """Has what is open answered. Returns the names of those that did not do it within `ANSWER_S`."""
    _mark(run_dir, ENDING)
    drain(run_dir, ANSWER_S, lambda: False)
    return with_open(run_dir)
