"""What is printed at which level, in a process of its own: the set-up is the whole process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

SPEAKS = """
import logging, sys
from photon_backend.log import progress, set_up_logging
set_up_logging("engine-0", sys.argv[1])
logging.getLogger("photon.engine").info("detail")
progress.info("capturing")
logging.getLogger("photon.engine").error("wrong")
"""


@pytest.mark.parametrize(
    ("level", "printed"),
    [("error", ["wrong"]), ("warning", ["capturing", "wrong"]), ("info", ["detail", "capturing", "wrong"])],
)
def test_progress_of_a_start_is_printed_wherever_warnings_are(level: str, printed: list[str]) -> None:
    said = subprocess.run([sys.executable, "-c", SPEAKS, level], capture_output=True, text=True, check=True).stderr
    assert [line.split()[-1] for line in said.splitlines()] == printed
    assert all("engine-0" in line for line in said.splitlines())
