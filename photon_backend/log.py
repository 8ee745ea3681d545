"""Log lines of all our processes: to stderr, with the process's name in front."""

from __future__ import annotations

import logging

# in Triton's words, from the least that is printed to the most
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "verbose": logging.DEBUG}

progress = logging.getLogger("photon.progress")  # what takes seconds at a start: wanted wherever warnings are


def set_up_logging(name: str, level: str) -> None:
    """`level` is one of Triton's words: error, warning, info, verbose. Triton's own logger costs 40-130 us a line."""
    logging.basicConfig(
        level=LEVELS.get(level, logging.WARNING), format=f"%(asctime)s {name} %(levelname).1s %(message)s", force=True
    )
    if level != "error":
        progress.setLevel(logging.INFO)
