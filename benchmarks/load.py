"""Load test of the real server: many clients at once, through gRPC streams and through perf_analyzer.

    python -m benchmarks.load [--concurrency 1,8,32] [--requests N] [--processes N] [--grpc host:port --http host:port]

Without --grpc and --http it starts a server of its own (CHECKPOINT, DEVICE, DTYPE and FRONT_ENDS as for `make serve`).
Prints a table; the last line is JSON. Columns: requests and tokens per second, time to first part, whole time.

The first rows are our own generator: streamed captions and questions over pictures of the bundled model's kind, each
request its own gRPC stream, from as many processes as it takes not to be the bottleneck. perf_analyzer then asks
photon_unary over HTTP and gRPC; it counts whole answers only.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import csv
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photon_client import AsyncClient
from PIL import Image

from photon_backend import layout
from photon_backend.config import TINY_CHECKPOINT
from photon_backend.serve import start_server
from photon_backend.tiny.scenes import make_scene

NUM_PICTURES = 16
OPTIONS = {"temperature": 0, "max_tokens": 64}
PERF_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


@dataclass
class Timing:
    """Of one request, in seconds since it was sent."""

    first: float
    whole: float
    tokens: int


def pictures() -> list[bytes]:
    """PNG files of scenes like those the bundled model was trained on."""
    files = []
    for seed in range(NUM_PICTURES):
        file = io.BytesIO()
        Image.fromarray(make_scene(seed).pixels).save(file, "PNG")
        files.append(file.getvalue())
    return files


async def ask(client: AsyncClient, number: int, images: list[bytes]) -> Timing:
    """One request: captions and questions by turns, every picture by both."""
    image = images[number // 2 % len(images)]
    sent = time.perf_counter()
    if number % 2:
        stream = (await client.query(image, "What is in the picture?", stream=True, **OPTIONS))["answer"]
    else:
        stream = (await client.caption(image, stream=True, **OPTIONS))["caption"]
    first = None
    async for _ in stream:
        first = first or time.perf_counter() - sent
    whole = time.perf_counter() - sent
    return Timing(first or whole, whole, stream.usage["output_tokens"])


async def run_clients(url: str, concurrency: int, numbers: list[int]) -> list[Timing]:
    """The requests of one process, `concurrency` at a time."""
    images = pictures()
    client = AsyncClient(url)
    waiting = iter(numbers)

    async def worker() -> list[Timing]:
        return [await ask(client, number, images) for number in waiting]

    try:
        parts = await asyncio.gather(*(worker() for _ in range(concurrency)))
    finally:
        await client.close()
    return [timing for part in parts for timing in part]


def _process(url: str, concurrency: int, numbers: list[int]) -> tuple[float, float, list[Timing]]:
    begun = time.time()
    timings = asyncio.run(run_clients(url, concurrency, numbers))
    return begun, time.time(), timings


def generate(url: str, concurrency: int, requests: int, processes: int) -> dict[str, Any]:
    """One row of the table from our own generator."""
    processes = min(processes, concurrency)
    with ProcessPoolExecutor(processes) as pool:
        jobs = [
            pool.submit(_process, url, concurrency // processes, list(range(part, requests, processes)))
            for part in range(processes)
        ]
        results = [job.result() for job in jobs]
    seconds = max(end for _, end, _ in results) - min(begun for begun, _, _ in results)
    timings = [timing for _, _, part in results for timing in part]
    first = sorted(1e3 * timing.first for timing in timings)
    whole = sorted(1e3 * timing.whole for timing in timings)
    return {
        "door": "gRPC stream",
        "concurrency": concurrency,
        "requests_per_s": len(timings) / seconds,
        "tokens_per_s": sum(timing.tokens for timing in timings) / seconds,
        "first_p50_ms": quantile(first, 0.5),
        "first_p99_ms": quantile(first, 0.99),
        "p50_ms": quantile(whole, 0.5),
        "p99_ms": quantile(whole, 0.99),
    }


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]


def perf_analyzer(url: str, protocol: str, concurrency: int, requests: int, directory: Path) -> dict[str, Any]:
    """One row from Triton's own load generator. Raises RuntimeError with what it printed."""
    data, table = directory / "data.json", directory / f"{protocol}-{concurrency}.csv"
    options = json.dumps(OPTIONS)
    steps = [
        {"task": ["caption"], "image": [base64.b64encode(image).decode()], "sampling_parameters": [options]}
        for image in pictures()
    ]
    data.write_text(json.dumps({"data": steps}))
    command = [str(Path(sys.executable).parent / "perf_analyzer"), "-m", "photon_unary", "-u", url, "-i", protocol]
    command += ["--input-data", str(data), "-f", str(table)]
    command += ["--concurrency-range", str(concurrency), "--request-count", str(requests)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(perf_libraries(directory))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or not table.exists():
        raise RuntimeError(f"perf_analyzer failed: {(done.stderr or done.stdout).strip()[-400:]}")
    row = next(csv.DictReader(table.open()))
    return {
        "door": f"perf_analyzer {protocol}",
        "concurrency": concurrency,
        "requests_per_s": float(row["Inferences/Second"]),
        "p50_ms": float(row["p50 latency"]) / 1e3,
        "p99_ms": float(row["p99 latency"]) / 1e3,
    }


def perf_libraries(directory: Path) -> Path:
    """perf_analyzer needs two libraries that the wheel of tritonserver brings under other names."""
    libraries = directory / "lib"
    libraries.mkdir(exist_ok=True)
    for name, pattern in PERF_LIBRARIES.items():
        if not (libraries / name).is_symlink():
            (libraries / name).symlink_to(next(layout.triton_libraries().glob(pattern)))
    return libraries


COLUMNS = ("requests_per_s", "tokens_per_s", "first_p50_ms", "first_p99_ms", "p50_ms", "p99_ms")
HEAD = "door                 at once     req/s  tokens/s first p50 first p99    p50 ms    p99 ms"


def line(row: dict[str, Any]) -> str:
    cells = (f"{row[name]:9.1f}" if name in row else f"{'':9}" for name in COLUMNS)
    return f"{row['door']:20} {row['concurrency']:7} " + " ".join(cells)


@contextlib.contextmanager
def addresses(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """gRPC and HTTP address, host:port each."""
    if options.grpc and options.http:
        yield options.grpc, options.http
        return
    environ = os.environ
    with start_server(
        checkpoint=environ.get("CHECKPOINT") or TINY_CHECKPOINT,
        device=environ.get("DEVICE") or "cpu",
        dtype=environ.get("DTYPE") or "float32",
        front_ends=int(environ.get("FRONT_ENDS") or 2),
    ) as server:
        yield server.grpc_url, server.http_url.removeprefix("http://")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrency", default="1,8,32", help="requests at once, a list [%(default)s]")
    parser.add_argument("--requests", type=int, default=128, help="requests of each row [%(default)s]")
    parser.add_argument("--processes", type=int, default=1, help="of our own generator [%(default)s]")
    parser.add_argument("--grpc", help="host:port of a running server")
    parser.add_argument("--http", help="host:port of the same")
    options = parser.parse_args()
    levels = [int(level) for level in options.concurrency.split(",")]
    rows = []
    with addresses(options) as (grpc, http), tempfile.TemporaryDirectory() as directory:
        generate(grpc, 4, 2 * NUM_PICTURES, 1)  # warm: every picture cached
        print(HEAD, flush=True)
        for level in levels:
            rows.append(generate(grpc, level, options.requests, options.processes))
            print(line(rows[-1]), flush=True)
        for protocol, url in (("http", http), ("grpc", grpc)):
            for level in levels:
                rows.append(perf_analyzer(url, protocol, level, options.requests, Path(directory)))
                print(line(rows[-1]), flush=True)
    print(json.dumps({"benchmark": "load", "requests": options.requests, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
