"""The soak in its short form; `make soak` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.soak import Soak, settings
from photon_backend.model.config import load_config
from photon_backend.serve import start_server

REQUESTS = 100
PICTURES = 9  # the KV pages hold six prefixes at most


def test_mixed_traffic_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    config = load_config(checkpoint)
    log = tmp_path / "log"
    with start_server(checkpoint, settings=settings(config) | {"PHOTON_THREADS": "1"}, log=log) as server:
        soak = Soak(server, config, PICTURES, max_tokens=8, seed=1)
        report = asyncio.run(soak.run(REQUESTS, concurrency=12))
    report.print()
    assert report.problems == []
    assert sum(report.outcomes.values()) == REQUESTS
    assert report.outcomes["whole: right"] > REQUESTS // 3 and report.outcomes["bad: refused"] > 0
    assert report.status["prefix_misses"] > PICTURES, "no prefix was ever evicted"
    for name, (first, last, _) in report.slopes().items():  # loosely: the run is short
        assert last - first < (20 if "open files" in name else 64), name
    assert "Traceback" not in log.read_text()
