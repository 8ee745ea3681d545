"""A line on stderr that shows a person that work is going on."""

from __future__ import annotations

import sys
import threading
import time


class Progress:
    """While entered: one line on stderr, from the first second on, rewritten every second. Only on a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Wipe the line away. Returns when nothing more will be written; may be called twice."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        begin, written = time.monotonic(), False
        while not self._stopped.wait(1.0):
            sys.stderr.write(f"\r{self._text} ({time.monotonic() - begin:.0f} s)")
            sys.stderr.flush()
            written = True
        if written:
            sys.stderr.write("\r\x1b[K")  # to the line's begin, and clear it
            sys.stderr.flush()
