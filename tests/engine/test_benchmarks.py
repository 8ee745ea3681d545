"""Benchmarks run from a bare shell, print their ceiling first and one line of JSON last, and take every ablation."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from benchmarks import gap
from benchmarks.decode import load_any, parser_of
from photon_backend.engine.engine import Engine

ABLATIONS = ["--no-overlap", "--no-graphs", "--no-prefix-cache"]


def run(command: str, *options: str) -> tuple[str, dict]:
    """The first line and the document of the last one."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), *options],
        cwd=Path(__file__).parents[2],
        env={"PATH": os.defpath},
        check=True,
        timeout=240,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    document = json.loads(lines[-1])
    assert document["results"] and not any(line.startswith("{") for line in lines[:-1])
    return lines[0], document


@pytest.mark.parametrize("ablated", [False, True])
def test_decode(ablated: bool) -> None:
    """Every step in the measured time is counted, those that were in flight when it began too."""
    options = ABLATIONS if ablated else []
    first, document = run("benchmarks.decode --batch 1,2 --tokens 6 --repeat 1", *options)
    assert first.startswith("ceiling") and "B = 2" in first
    assert [(r["batch"], r["overlap"]) for r in document["results"]] == [
        (batch, overlap) for batch in (1, 2) for overlap in (False, True) if not (ablated and overlap)
    ]
    for r in document["results"]:
        assert r["tokens_per_s"] * r["step_ms"] == pytest.approx(1e3 * r["batch"])
        assert r["of_ceiling"] == pytest.approx(r["floor_ms"] / r["step_ms"])


def test_decode_traced(tmp_path: Path) -> None:
    run("benchmarks.decode --batch 1 --tokens 4 --repeat 1 --trace", str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    for side, names in ((0, ("intake", "commit", "finalize", "launch")), (1, ("forward", "sampling", "copy"))):
        assert {(process, name) for process in (side, 2 + side) for name in names} <= lanes  # blocking, pipelined
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("options", "hits"), [(["--rate", "100"], 0.5), (ABLATIONS, 0.0)])
def test_requests(options: list[str], hits: float) -> None:
    """Open and closed loop; half of the requests find their prefix, or none."""
    first, document = run("benchmarks.requests --requests 8 --clients 2", *options)
    (result,) = document["results"]
    assert first.startswith("ceiling") and result["ceiling_requests_per_s"] > 0
    assert result["rate"] == (0.0 if "--rate" not in options else 100.0)
    assert result["hit_rate"] == hits and result["requests_per_s"] > 0


def test_tick() -> None:
    first, document = run("benchmarks.tick --rows 1,3 --tokens 16", *ABLATIONS)
    assert first.startswith("ceiling") and not document["overlap"]
    assert [(r["rows"], r["target_us"]) for r in document["results"]] == [(1, 102), (3, 106)]


def test_gap_leaves_no_engine_behind(monkeypatch) -> None:
    """The garbage collector, kept out of the loop, would hold it and its pages for ever."""
    options = argparse.Namespace(**vars(parser_of("").parse_args([])), streams=1, clients=1, requests=1)
    engines, stop, thresholds = [], Engine.stop, gc.get_threshold()

    def noting(engine: Engine) -> None:
        engines.append(weakref.ref(engine))
        stop(engine)

    monkeypatch.setattr(Engine, "stop", noting)
    result = gap.measure(options, load_any(options), 0.0)
    assert gc.get_threshold() == thresholds and result["pictures_per_s"] > 0
    assert [engine() for engine in engines] == [None]
