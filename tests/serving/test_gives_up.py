"""An engine that does not come back: the server says so and ends, so that its orchestrator starts it anew."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import doors
import pytest
from doors import ServerError, wait_until

from photon_backend.serve import start_server

# The engine's interpreter: the real one, until a file is there.
ENGINE = """#!/bin/sh
[ -e {file} ] && exit 7
exec {python} "$@"
"""


def test_an_engine_that_fails_again_and_again(checkpoint: Path, pictures: list[bytes], tmp_path: Path) -> None:
    broken, program, log = tmp_path / "broken", tmp_path / "engine", tmp_path / "log"
    program.write_text(ENGINE.format(file=broken, python=sys.executable))
    program.chmod(0o700)
    settings = {"PHOTON_ENGINE_PYTHON": str(program), "PHOTON_THREADS": "1"}
    with start_server(checkpoint, front_ends=1, settings=settings, log=log) as server:
        assert doors.generate(server, image=pictures[0], task="caption", max_tokens=3).text
        broken.touch()
        os.kill(doors.status(server)["pid"], signal.SIGKILL)
        wait_until(lambda: not server.is_ready(), 60, "photon unloaded")
        with doors.OPENER.open(f"{server.http_url}/v2/health/live") as alive:
            assert alive.status == 200
        for door in doors.DOORS.values():  # no hang, whatever it is that refuses
            with pytest.raises(ServerError, match=r"no available versions|\[UNAVAILABLE\]"):
                door(server, image=pictures[0], task="caption", max_tokens=3)
        wait_until(server.problem, 120, "given up")
        assert server.problem() == "Engine 0 ended with status 7, 8 times in a row; its log says why."
        assert doors.status(server)["problem"] == server.problem()
    assert log.read_text().count("starting it again in") == 7
