"""What perf_analyzer leaves behind: it was seen to end with status 0 and an empty report, or half of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.perf import _report

REQUESTS = [{"timestamp": 1, "response_timestamps": [2, 3]}]
WHOLE = json.dumps({"experiments": [{"requests": REQUESTS}]})


@pytest.mark.parametrize("text", [None, "", WHOLE[:40], WHOLE[:-1], '{"experiments": []}'])
def test_a_report_that_is_not_whole_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "export.json").write_text(text)
    assert _report(tmp_path / "export.json") is None


def test_a_whole_report(tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(WHOLE)
    assert _report(tmp_path / "export.json") == REQUESTS
