"""The marks by which a server ends, and the end of a group of processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from photon_backend import alive, draining
from photon_backend.processes import end_group

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"


def never() -> bool:
    return False


def test_waits_for_everybody_who_has_something_open(tmp_path: Path) -> None:
    signs = [alive.Sign(str(tmp_path), name) for name in ("photon_0_0", "photon_0_1", "photon_engine_0")]
    for sign in signs[:2]:
        sign.set_open(True)
    drained = threading.Event()
    waiting = threading.Thread(target=lambda: draining.drain(tmp_path, 600, never) and drained.set())
    waiting.start()
    signs[0].set_open(False)
    signs[0].set_open(False)
    assert not drained.wait(0.2) and draining.marked(str(tmp_path))
    assert not draining.marked(str(tmp_path), draining.ENDING)
    signs[1].set_open(False)
    assert drained.wait(60)
    waiting.join()


def test_its_directory_was_removed(tmp_path: Path) -> None:
    """Who shows a sign goes on, and the marks are there to be found."""
    run_dir = tmp_path / "photon" / "run"
    run_dir.mkdir(parents=True)
    sign = alive.Sign(str(run_dir), "photon_engine_0")
    shutil.rmtree(tmp_path / "photon")
    sign.set_open(True)
    assert draining.drain(run_dir, 600, never) and draining.answer_rest(run_dir) == []
    assert draining.marked(str(run_dir)) and draining.marked(str(run_dir), draining.ENDING)
    sign.withdraw()


def test_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive.Sign(str(tmp_path), "photon_0_0").set_open(True)
    assert not draining.drain(tmp_path, 0.1, never)
    assert not draining.drain(tmp_path, 600, lambda: True)
    monkeypatch.setattr(draining, "ANSWER_S", 0.1)
    assert draining.answer_rest(tmp_path) == ["photon_0_0"]
    assert draining.marked(str(tmp_path), draining.ENDING)


def test_who_died_is_not_waited_for(tmp_path: Path) -> None:
    code = f"from photon_backend.alive import Sign; Sign({str(tmp_path)!r}, 'photon_0_0').set_open(True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert alive.dead(tmp_path) == ["photon_0_0"] and draining.answer_rest(tmp_path) == []


def start(code: str) -> subprocess.Popen[bytes]:
    """In a group of its own; returns when the innermost process has said that it runs."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()  # type: ignore[union-attr]
    return process


def test_a_group_ends_whole_and_alone(tmp_path: Path) -> None:
    """Stopped or deaf to SIGTERM, the leader not waited for; and nobody else."""
    process, bystander = start(WITH_CHILD), start(STUBBORN)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGSTOP)
    assert end_group(process.pid, 60) == []
    for pid in (process.pid, int(child)):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert process.wait() == -signal.SIGKILL and bystander.poll() is None
    assert end_group(bystander.pid, 60) == []
    bystander.wait()


def test_who_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a driver that hangs."""
    process = start(STUBBORN)
    with monkeypatch.context() as patch:
        patch.setattr("photon_backend.processes.os.killpg", lambda group, number: None)
        assert end_group(process.pid, 0.1) == [process.pid]
    process.kill()
    process.wait()
