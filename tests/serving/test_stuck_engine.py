"""An engine whose device hangs: its process lives, its I/O thread beats, but no step ever comes back."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from doors import ServerError, wait_until

from photon_backend.engine.exit_codes import EXIT_STUCK
from photon_backend.serve import start_server

ENDLESS: dict[str, Any] = {"task": "caption", "max_tokens": 700, "temperature": 0}

# The engine's interpreter, so to say: the same one, in which the read of a step waits while a file is there.
HANGING_ENGINE = """#!{python}
import runpy, sys, time
from pathlib import Path
from photon_backend.engine.stepper import Stepper

read = Stepper.read

def hang(self, *arguments):
    while Path({file!r}).exists():
        time.sleep(0.05)
    return read(self, *arguments)

Stepper.read = hang
del sys.argv[:2]
runpy.run_module("photon_backend.engine.server", run_name="__main__", alter_sys=True)
"""


def test_hung_device(checkpoint: Path, pictures: list[bytes], tmp_path: Path) -> None:
    """Open requests of every door are answered, the engine is replaced, and the log says where it hung."""
    hanging, program, log = tmp_path / "hang", tmp_path / "engine", tmp_path / "log"
    program.write_text(HANGING_ENGINE.format(python=sys.executable, file=str(hanging)))
    program.chmod(0o700)
    settings = {"PHOTON_ENGINE_PYTHON": str(program), "PHOTON_TICK_LIMIT_S": "5", "PHOTON_THREADS": "1"}
    with start_server(checkpoint, settings=settings, log=log) as server, ThreadPoolExecutor(5) as threads:
        before = doors.status(server)["pid"]
        asked = [threads.submit(door, server, image=pictures[0], **ENDLESS) for door in doors.DOORS.values()]
        wait_until(lambda: doors.status(server)["running"] == 5, 60, "running")
        hanging.touch()
        for future in asked:
            with pytest.raises(ServerError, match=r"\[UNAVAILABLE\]"):
                future.result(timeout=60)
        hanging.unlink()
        wait_until(lambda: doors.status(server)["up"] and doors.status(server)["pid"] != before, 120, "replaced")
        server.wait_ready(120)
        assert doors.generate(server, image=pictures[0], task="caption", max_tokens=3).text
    text = log.read_text()
    assert "stuck in one tick for 5 s" in text and f"ended with status {EXIT_STUCK}" in text
    assert " in hang\n" in text, "where every thread is"


def test_a_sleeping_engine_is_not_stuck(checkpoint: Path, pictures: list[bytes], tmp_path: Path) -> None:
    """Nothing to do for longer than a tick may take."""
    log = tmp_path / "log"
    with start_server(checkpoint, settings={"PHOTON_TICK_LIMIT_S": "3", "PHOTON_THREADS": "1"}, log=log) as server:
        pid = doors.status(server)["pid"]
        assert doors.generate(server, image=pictures[0], task="caption", max_tokens=3).text
        time.sleep(7)
        assert doors.status(server)["pid"] == pid and doors.status(server)["restarts"] == 0
    assert "stuck" not in log.read_text()
