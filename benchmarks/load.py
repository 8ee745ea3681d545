"""Load test of the real server: `make load`, or `python -m benchmarks.load [--seconds S] [--concurrency 1,8,64] ...`

Without --grpc and --http it starts a server of its own (CHECKPOINT, DEVICE, DTYPE and FRONT_ENDS as for `make serve`).
First every request is asked alone. Then our own generator asks them in closed loop, `concurrency` at a time for
`seconds` a row, and in open loop, Poisson arrivals at a share of the rate that the closed loop reached, with times
counted from the arrival that was due. Every answer must be the one that its request got alone. Triton's perf_analyzer
follows. A table is printed and written to out/ with a plot; the last line is JSON.

Exit status 1: an answer belongs to another picture, a request got no answer, or (on a CPU, where a batch changes no
bit) an answer differs from the one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.perf import DOORS as PERF_DOORS
from benchmarks.perf import perf_analyzer
from benchmarks.traffic import DOORS, Answer, Ask, Outcome, Traffic, make_asks, make_pictures, quantiles
from photon_backend.config import TINY_CHECKPOINT
from photon_backend.serve import start_server

NUM_PICTURES = 16
OUT = Path(__file__).resolve().parent.parent / "out"
START_S = 0.5  # between the call of a row and its first request, for every process to be ready


@dataclass(frozen=True)
class Row:
    """What one row of the table asks of one generator process. `rate` 0 is the closed loop."""

    door: str
    seconds: float
    concurrency: int = 0
    rate: float = 0.0  # arrivals per second
    first_number: int = 0
    stride: int = 1


@dataclass(frozen=True)
class Target:
    grpc: str
    http: str
    pictures: list[bytes]
    asks: list[Ask]


async def closed_loop(traffic: Traffic, asks: list[Ask], row: Row) -> list[Outcome]:
    """Every worker sends its next request when it has the answer to the one before."""
    numbers = itertools.count(row.first_number, row.stride)
    end = time.perf_counter() + row.seconds

    async def worker() -> list[Outcome]:
        outcomes = []
        while time.perf_counter() < end:
            outcomes.append(await traffic.ask(row.door, asks[next(numbers) % len(asks)]))
        return outcomes

    parts = await asyncio.gather(*(worker() for _ in range(row.concurrency)))
    return [outcome for part in parts for outcome in part]


async def open_loop(traffic: Traffic, asks: list[Ask], row: Row) -> list[Outcome]:
    """Requests arrive as they would from many independent clients, whether or not the server keeps up."""
    numbers = itertools.count(row.first_number, row.stride)
    clock = random.Random(row.first_number)
    begun, due, waiting = time.perf_counter(), 0.0, []
    while (due := due + clock.expovariate(row.rate)) < row.seconds:
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        ask = asks[next(numbers) % len(asks)]
        waiting.append(asyncio.create_task(traffic.ask(row.door, ask, begun + due)))
    return await asyncio.gather(*waiting)


def run_process(target: Target, row: Row, start: float) -> tuple[float, list[Outcome]]:
    """The share of one process; runs in it. Returns seconds from the first request to the last answer."""

    async def run() -> tuple[float, list[Outcome]]:
        async with Traffic(target.grpc, target.http, target.pictures) as traffic:
            await asyncio.sleep(max(0.0, start - time.time()))
            begun = time.perf_counter()
            loop = open_loop if row.rate else closed_loop
            outcomes = await loop(traffic, target.asks, row)
            return time.perf_counter() - begun, outcomes

    return asyncio.run(run())


class Generator:
    """Our own generator, in as many processes as it takes not to be the bottleneck."""

    def __init__(self, target: Target, processes: int) -> None:
        self._target = target
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def close(self) -> None:
        self._pool.shutdown()

    def alone(self) -> list[Answer]:
        """The answer to every request with nothing else running. Raises RuntimeError when one fails."""
        outcomes = self._pool.submit(ask_alone, self._target).result()
        for outcome in outcomes:
            if outcome.answer is None:
                raise RuntimeError(f"{outcome.ask}: [{outcome.code}] {outcome.message}")
        return [outcome.answer for outcome in outcomes if outcome.answer is not None]

    def run(self, door: str, seconds: float, concurrency: int = 0, rate: float = 0.0) -> tuple[float, list[Outcome]]:
        processes = min(self._processes, concurrency or self._processes)
        start = time.time() + START_S
        jobs = [
            self._pool.submit(
                run_process,
                self._target,
                Row(door, seconds, concurrency // processes, rate / processes, part, processes),
                start,
            )
            for part in range(processes)
        ]
        results = [job.result() for job in jobs]
        return max(taken for taken, _ in results), [outcome for _, part in results for outcome in part]


def ask_alone(target: Target) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with Traffic(target.grpc, target.http, target.pictures) as traffic:
            return [await traffic.ask("grpc", ask) for ask in target.asks]

    return asyncio.run(run())


def judge(outcomes: list[Outcome], asks: list[Ask], alone: list[Answer]) -> dict[str, int]:
    """Counts: refused (UNAVAILABLE), errors, different (not the answer got alone), foreign (another picture's)."""
    number_of = {id_of(ask): number for number, ask in enumerate(asks)}
    counts = dict.fromkeys(("refused", "errors", "different", "foreign"), 0)
    for outcome in outcomes:
        if outcome.answer is None:
            counts["refused" if outcome.code == "UNAVAILABLE" else "errors"] += 1
        elif not outcome.answer.same(alone[number_of[id_of(outcome.ask)]]):
            counts["different"] += 1
            others = (alone[n] for n, ask in enumerate(asks) if ask.task == outcome.ask.task)
            counts["foreign"] += any(outcome.answer.same(other) for other in others)
    return counts


def id_of(ask: Ask) -> tuple[str, int]:
    return ask.task, ask.picture


def measure(seconds: float, outcomes: list[Outcome]) -> dict[str, Any]:
    """Rates, and quantiles in milliseconds of the answered requests; [] where there is nothing to measure."""
    answered = [outcome for outcome in outcomes if outcome.answer is not None]
    tokens = [outcome.answer.tokens for outcome in answered if outcome.answer]
    streamed = [(o, n) for o, n in zip(answered, tokens, strict=True) if o.streamed]
    return {
        "requests": len(outcomes),
        "requests_per_s": len(answered) / seconds,
        "tokens_per_s": sum(tokens) / seconds,
        "first_ms": quantiles([o.first - o.due for o, _ in streamed]),
        "inter_token_ms": quantiles([(o.end - o.first) / (n - 1) for o, n in streamed if n > 1]),
        "whole_ms": quantiles([o.end - o.due for o in answered]),
    }


COUNTS = ("refused", "errors", "different", "foreign")
HEAD = (
    f"{'generator':14}{'door':17}{'loop':8}{'load':>7}{'req/s':>8}{'tok/s':>8}"
    + "".join(f"{name:>23}" for name in ("first ms 50/90/99", "inter-token ms", "whole ms"))
    + "".join(f"{name:>10}" for name in COUNTS)
)


def line(row: dict[str, Any]) -> str:
    load = f"{row['load']:.0f}" if row["loop"] == "closed" else f"{row['load']:.1f}/s"
    cells = f"{row['generator']:14}{row['door']:17}{row['loop']:8}{load:>7}{row['requests_per_s']:8.1f}"
    cells += f"{row['tokens_per_s']:8.0f}" if "tokens_per_s" in row else " " * 8
    for name in ("first_ms", "inter_token_ms", "whole_ms"):
        cells += f"{' / '.join(f'{value:.0f}' if value >= 100 else f'{value:.3g}' for value in row.get(name, [])):>23}"
    return cells + "".join(f"{row[name]:10}" if name in row else " " * 10 for name in COUNTS)


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


class Table:
    """The rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(HEAD, flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(line(row), flush=True)

    def write(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "load.txt").write_text("\n".join([HEAD, *map(line, self.rows)]) + "\n")
        (directory / "load.json").write_text(json.dumps(self.rows, indent=1))
        plot(self.rows, directory / "load.png")


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Requests per second and the whole time against the load, closed loop; and the whole time in open loop."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    rate, closed, opened = figure.subplots(1, 3)
    ours = [row for row in rows if row["whole_ms"]]
    for name in dict.fromkeys((row["generator"], row["door"]) for row in ours):
        of_door = [row for row in ours if (row["generator"], row["door"]) == name]
        for loop, axes in (("closed", closed), ("open", opened)):
            points = sorted((row["load"], row["whole_ms"]) for row in of_door if row["loop"] == loop)
            if points:
                label = ": ".join(name)
                (median,) = axes.plot([x for x, _ in points], [y[0] for _, y in points], "o-", label=label)
                axes.plot([x for x, _ in points], [y[2] for _, y in points], "--", color=median.get_color())
        points = sorted((row["load"], row["requests_per_s"]) for row in of_door if row["loop"] == "closed")
        rate.plot([x for x, _ in points], [y for _, y in points], "o-", label=": ".join(name))
    rate.set(title="throughput, closed loop", xlabel="requests at once", ylabel="requests/s", xscale="log", ylim=0)
    closed.set(title="whole time, closed loop: p50, p99 dashed", xlabel="requests at once", ylabel="ms")
    closed.set(xscale="log", yscale="log")
    opened.set(title="whole time, open loop: p50, p99 dashed", xlabel="arrivals/s", ylabel="ms", yscale="log")
    levels = sorted({row["load"] for row in ours if row["loop"] == "closed"})
    for axes in (rate, closed):
        axes.set_xticks(levels, [f"{level:.0f}" for level in levels])
        axes.minorticks_off()
    for axes in (rate, closed, opened):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def run(options: argparse.Namespace, grpc: str, http: str) -> Table:
    pictures, kinds = make_pictures(NUM_PICTURES)
    target = Target(grpc, http, pictures, make_asks(kinds))
    levels = [int(level) for level in options.concurrency.split(",")]
    generator = Generator(target, options.processes)
    try:
        alone = generator.alone()
        table = Table()

        def ours(door: str, loop: str, load: float, **what: Any) -> dict[str, Any]:
            seconds, outcomes = generator.run(door, options.seconds, **what)
            row = {"generator": "ours", "door": door, "loop": loop, "load": load, **measure(seconds, outcomes)}
            table.add(row | judge(outcomes, target.asks, alone))
            return row

        for door in DOORS:
            best = max(ours(door, "closed", level, concurrency=level)["requests_per_s"] for level in levels)
            for share in [float(share) for share in options.rates.split(",") if share]:
                ours(door, "open", share * best, rate=share * best)
    finally:
        generator.close()
    with tempfile.TemporaryDirectory() as directory:
        for door, (_, protocol) in PERF_DOORS.items():
            for level in levels:
                url = http if protocol == "http" else grpc
                requests = max(options.perf_requests, 2 * level)
                table.add(perf_analyzer(door, url, target.asks, pictures, level, requests, Path(directory)))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4, help="of each row of our generator [%(default)s]")
    parser.add_argument("--concurrency", default="1,8,64", help="requests at once, a list [%(default)s]")
    parser.add_argument("--rates", default="0.5,0.9", help="open loop, shares of the best closed rate [%(default)s]")
    parser.add_argument("--perf-requests", type=int, default=64, help="of each perf_analyzer row [%(default)s]")
    parser.add_argument("--processes", type=int, default=1, help="of our own generator [%(default)s]")
    parser.add_argument("--grpc", help="host:port of a running server")
    parser.add_argument("--http", help="host:port of the same")
    options = parser.parse_args()
    with addresses(options) as (grpc, http):
        table = run(options, grpc, http)
    table.write(OUT)
    total = {name: sum(row.get(name, 0) for row in table.rows) for name in COUNTS}
    print(f"out/load.txt, out/load.json and out/load.png are written; {total}", file=sys.stderr)
    print(json.dumps({"benchmark": "load", "total": total, "rows": table.rows}))
    on_cpu = (os.environ.get("DEVICE") or "cpu") == "cpu"
    return int(bool(total["errors"] or total["foreign"] or (on_cpu and total["different"])))


if __name__ == "__main__":
    sys.exit(main())
