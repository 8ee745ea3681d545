"""Signs of life: a file that a process keeps locked. The kernel drops the lock when the process ends, however it ends.

Triton never restarts a stub that died; its requests hang and its model stays ready. So every stub shows a sign of life
beside the sockets, and the launcher ends the server when one is there without its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

SUFFIX = ".alive"
OPEN = ".open"


class Sign:
    """Shown until `withdraw`, which an orderly end calls. While Triton reloads a model, the old and the new stub have
    the same name; their signs have not."""

    def __init__(self, run_dir: str, name: str) -> None:
        self._path = Path(run_dir) / f"{name}@{os.getpid()}{SUFFIX}"
        unlocked = self._path.with_suffix(".new")
        self._fd = lock(unlocked)
        unlocked.rename(self._path)  # never seen unlocked

    def set_open(self, is_open: bool) -> None:
        """Says whether requests are open here or may still come, so that the end must wait for them: draining.py."""
        if is_open:
            with contextlib.suppress(OSError):  # full, or removed by something that tidies up: nobody will wait then
                self._path.with_suffix(OPEN).touch()
        else:
            self._path.with_suffix(OPEN).unlink(missing_ok=True)

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def dead(run_dir: Path) -> list[str]:
    """Names of those that ended without withdrawing their sign."""
    return [path.name.split("@")[0] for path in sorted(run_dir.glob(f"*{SUFFIX}")) if is_free(path)]


def with_open(run_dir: Path) -> list[str]:
    """Names of those that live and have requests open, or may still get some."""
    paths = [path for path in sorted(run_dir.glob(f"*{SUFFIX}")) if path.with_suffix(OPEN).exists()]
    return [path.name.split("@")[0] for path in paths if not is_free(path)]


def living(run_dir: Path) -> list[int]:
    """Process ids of those that show a sign."""
    return [int(path.stem.split("@")[1]) for path in run_dir.glob(f"*{SUFFIX}") if not is_free(path)]


def lock(path: Path) -> int:
    """Creates and locks a file. Returns the descriptor, which holds the lock in every process that inherits it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def is_free(path: Path) -> bool:
    """Whether the file is there and nobody holds its lock."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
