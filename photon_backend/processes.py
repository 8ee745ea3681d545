"""Processes that end with their parent, whatever ends it, or all together; and the stacks of tritonserver's threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3
# Triton 2.51 takes twice the size of a body from the stack of an HTTP thread when the client calls it a form, as
# `curl -d` does: 3 MB of picture ended the server with the usual 8 MiB. So does JSON nested 100,000 levels deep. Costs
# address space only, until somebody sends such a thing.
STACK_BYTES = 256 << 20
OPEN_FILES = 1 << 16


def end_with_parent(signal_number: int, parent: int) -> None:
    """The kernel sends this process `signal_number` when the thread that started it ends.

    `parent` is the process id that the caller expects its parent to have: when that parent died before this call,
    no signal would ever come, so the process exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"the parent process {parent} is gone")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """STOP_SIGNALS wait until the block is left, in this thread; a program started in it must take them again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_group(group: int, timeout_s: float) -> list[int]:
    """SIGKILL to all processes of a group, whose leader the caller has not waited for. Returns when they are gone, with
    their memory, on a GPU too; or after `timeout_s` those that are not."""
    os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + timeout_s
    while (left := _running(group)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _running(group: int) -> list[int]:
    """Process ids of a group. A zombie has ended, but not while a thread of it is left, which holds its memory."""
    running = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, group_of, num_threads = fields[0], int(fields[2]), int(fields[17])
        if group_of == group and (state not in "ZX" or num_threads > 1):
            running.append(int(path.parent.name))
    return running


def raise_limits() -> None:
    """Of what this process executes: threads have stacks of STACK_BYTES, and OPEN_FILES may be open, connections among
    them; less where a hard limit is less. A stack without limit would mean 2 MiB for a thread."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_within(STACK_BYTES, hard), hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:  # less than 0: no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (_within(OPEN_FILES, hard), hard))


def _within(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def return_memory() -> None:
    """What is freed in pieces of a mebibyte or more goes back to the system at once, in this process.

    glibc would keep up to 32 MiB each: a front end that had decoded a few pictures of 50 million pixels stayed at
    1.7 GB for ever. Costs fresh pages for each large picture.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def main() -> None:
    """`python -m photon_backend.processes PARENT COMMAND ...`: becomes COMMAND, which gets SIGTERM when PARENT dies.

    The settings survive exec, so a program that knows nothing of them, like tritonserver, can be tied to its launcher.
    """
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(signal.SIGTERM, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see signals_held
    raise_limits()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
