"""Python's garbage collector in a benchmark as it is in an engine process: a full collection stops a tick for 25 ms and
more, which no server does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from photon_backend.engine.server import freeze_garbage


@contextmanager
def frozen() -> Iterator[None]:
    """To be entered when models and engines are loaded."""
    thresholds = gc.get_threshold()
    freeze_garbage()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
