"""Processes that end with their parent, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


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


def main() -> None:
    """`python -m photon_backend.processes PARENT COMMAND ...`: becomes COMMAND, which gets SIGTERM when PARENT dies.

    The setting survives exec, so a program that knows nothing of it, like tritonserver, can be tied to its launcher.
    """
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(signal.SIGTERM, parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
