"""The garbage collector stays out of the tick of an engine process."""

from __future__ import annotations

import pytest

from benchmarks import tick


@pytest.mark.parametrize(("mode", "collects"), [("thawed", True), ("frozen", False)])
def test_ticks_of_many_rows(mode: str, collects: bool) -> None:
    """More objects than Python's own threshold are made as they are admitted; as Python has it, the test can tell."""
    assert bool(tick.measure(256, 8, 40, mode)["collections"]) == collects
