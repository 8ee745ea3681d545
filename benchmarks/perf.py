"""Triton's own load generator, perf_analyzer, against the real server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.traffic import Ask, quantiles
from photon_backend import layout

LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
DOORS = {
    "gRPC stream": ("photon", "grpc"),
    "HTTP unary": ("photon_unary", "http"),
    "gRPC unary": ("photon_unary", "grpc"),
}
TIMEOUT_S = 300
ATTEMPTS = 3  # seen once each, on machines with more to do than cores: status 0 and an empty report, or half of one


def perf_analyzer(
    door: str, url: str, asks: list[Ask], pictures: list[bytes], concurrency: int, requests: int, directory: Path
) -> dict[str, Any]:
    """One row: `requests` of them, `concurrency` at a time. It counts whole answers and looks into none of them.

    Raises RuntimeError with what it printed when it fails, or reports nothing several times.
    """
    model, protocol = DOORS[door]
    data, export = directory / "data.json", directory / "export.json"
    data.write_text(json.dumps({"data": [_step(ask, pictures, stream=model == "photon") for ask in asks]}))
    command = [str(Path(sys.executable).parent / "perf_analyzer"), "-m", model, "-u", url, "-i", protocol]
    command += ["--streaming", "--async"] if model == "photon" else []
    command += ["--input-data", str(data), "--profile-export-file", str(export)]
    command += ["--concurrency-range", str(concurrency), "--request-count", str(max(requests, concurrency))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(_libraries(directory))}
    for _ in range(ATTEMPTS):
        export.unlink(missing_ok=True)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        report = _report(export) if done.returncode == 0 else None
        if report is not None:
            break
    else:
        raise RuntimeError(f"perf_analyzer failed: {(done.stderr or done.stdout).strip()[-800:]}")
    row = {"generator": "perf_analyzer", "door": door, "loop": "closed", "load": concurrency}
    return row | _measure(report, streamed=model == "photon")


def _report(export: Path) -> list[dict[str, Any]] | None:
    """The requests that it tells of; None when it has not told all, or nothing."""
    try:
        (experiment,) = json.loads(export.read_text())["experiments"]
    except (FileNotFoundError, ValueError):  # not JSON, which what is cut off never is
        return None
    requests: list[dict[str, Any]] = experiment["requests"]
    return requests


def _measure(requests: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
    """From its time stamps: the rate that it prints itself counts the time until it looked, whole seconds."""
    asked = [(request["timestamp"], request["response_timestamps"]) for request in requests]
    seconds = (max(replies[-1] for _, replies in asked) - min(sent for sent, _ in asked)) / 1e9
    return {
        "requests": len(asked),
        "requests_per_s": len(asked) / seconds,
        "first_ms": quantiles([(replies[0] - sent) / 1e9 for sent, replies in asked]) if streamed else [],
        "whole_ms": quantiles([(replies[-1] - sent) / 1e9 for sent, replies in asked]),
    }


def _step(ask: Ask, pictures: list[bytes], stream: bool) -> dict[str, Any]:
    options = {"sampling_parameters": [json.dumps(ask.options)]}
    image = base64.b64encode(pictures[ask.picture]).decode()
    text = {} if ask.text is None else {"text_input": [ask.text]}
    return {"task": [ask.task], "image": [image], **text, **options, **({"stream": [True]} if stream else {})}


def _libraries(directory: Path) -> Path:
    """perf_analyzer needs two libraries that the wheel of tritonserver brings under other names."""
    libraries = directory / "lib"
    libraries.mkdir(exist_ok=True)
    for name, pattern in LIBRARIES.items():
        if not (libraries / name).is_symlink():
            (libraries / name).symlink_to(next(layout.triton_libraries().glob(pattern)))
    return libraries
