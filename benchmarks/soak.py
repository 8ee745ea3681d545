"""Soak of the real server: `make soak`, or `python -m benchmarks.soak [--requests N] [--concurrency C] [--pictures P]`

Requests of every task through every door, mixed at random with clients that leave a gRPC stream, drop an HTTP
connection before or after its first byte, set a short deadline, or send what is wrong. There are more pictures than the
KV pages can hold, so prefixes are evicted all the time. The answers, the engine's counters, its rows and pages, and the
memory, /dev/shm and open files of every process are looked at. Exit status 1 when `Report.problems` is not empty.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from photon_client import PhotonError

from benchmarks.traffic import DOORS, Answer, Ask, Traffic, make_asks, make_pictures
from photon_backend.config import TINY_CHECKPOINT, Settings
from photon_backend.model.config import ModelConfig, load_config
from photon_backend.serve import Server, start_server

LAPS = 20  # samples of the processes; the first quarter is warm-up
ROWS = 8
PREFIXES = 6  # that the KV pages would hold if no row used any
# kind of behaviour: how often
KINDS = {"whole": 60, "leave": 12, "disconnect": 10, "abort": 5, "deadline": 5, "bad": 8}
ABORT_S = 0.02  # after which an HTTP client drops a request that has no first byte yet
TIME_LIMIT_MS = 3000  # of those requests: Triton does not tell that their client has gone
DEADLINE_MS = 40
SETTLE_S = 10.0  # the longest time limit of a request whose client left, and more
PAGE = os.sysconf("SC_PAGESIZE")


@dataclass
class Report:
    requests: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, float]] = field(default_factory=list)  # by lap: "what of process" to its value

    def slopes(self) -> dict[str, tuple[float, float, float]]:
        """After warm-up, of each sampled number: first value, last value, growth per 1,000 requests."""
        warm = self.samples[len(self.samples) // 4 :]
        done = np.linspace(0, self.requests * len(warm) / len(self.samples), len(warm)) / 1000
        return {
            name: (warm[0][name], warm[-1][name], float(np.polyfit(done, [sample[name] for sample in warm], 1)[0]))
            for name in warm[0]
            if all(name in sample for sample in warm)
        }

    def print(self) -> None:
        rate = self.requests / self.seconds
        print(f"{self.requests} requests in {self.seconds:.0f} s ({rate:.1f}/s): {dict(sorted(self.outcomes.items()))}")
        print(f"{'after warm-up':44}{'first':>10}{'last':>10}{'per 1,000 requests':>20}")
        for name, (first, last, slope) in self.slopes().items():
            print(f"{name:44}{first:10.1f}{last:10.1f}{slope:20.2f}")
        print("problems: " + ("; ".join(self.problems[:10]) or "none"))


def settings(config: ModelConfig) -> dict[str, str]:
    """Few rows and so few pages that pictures push each other out."""
    return {"PHOTON_ROWS": str(ROWS), "PHOTON_PAGES": str(PREFIXES * pages_of_prefix(config))}


def pages_of_prefix(config: ModelConfig) -> int:
    return math.ceil(config.prefix_len / Settings().page_size)


def bad_asks(asks: list[Ask], no_picture: int, half_picture: int) -> list[Ask]:
    """One of each kind of mistake; every one must be answered INVALID_ARG. The two numbers are of bad pictures."""
    caption = next(ask for ask in asks if ask.task == "caption")
    query = next(ask for ask in asks if ask.task == "query")
    return [
        replace(caption, picture=no_picture),
        replace(caption, picture=half_picture),
        replace(caption, options={"length": "huge"}),
        replace(caption, text="not used"),
        replace(query, text=" "),
        replace(query, text="why " * 3000),
        replace(query, options={"max_tokens": -1}),
        replace(query, options={"temperature": "warm"}),
        replace(query, options={"no_such_option": 1}),
        replace(query, options={"length": "short"}),
    ]


class Soak:
    """One run against a server that nobody else uses."""

    def __init__(self, server: Server, config: ModelConfig, num_pictures: int, max_tokens: int, seed: int) -> None:
        good, kinds = make_pictures(num_pictures)
        self._server = server
        self._config = config
        self._random = random.Random(seed)
        self._asks = make_asks(kinds, max_tokens)
        self._alone: list[Answer] = []
        pictures = [*good, b"GIF89a is how it starts", good[0][: len(good[0]) // 2]]
        self._mistakes = bad_asks(self._asks, num_pictures, num_pictures + 1)
        self._traffic = Traffic(server.grpc_url, server.http_url.removeprefix("http://"), pictures)

    async def run(self, requests: int, concurrency: int) -> Report:
        report = Report(requests)
        async with self._traffic:
            for ask in self._asks:
                outcome = await self._traffic.ask("grpc", ask)
                if outcome.answer is None:
                    raise RuntimeError(f"{ask}: [{outcome.code}] {outcome.message}")
                self._alone.append(outcome.answer)
            begun = time.monotonic()
            for lap in range(LAPS):
                numbers = iter(range(requests * lap // LAPS, requests * (lap + 1) // LAPS))
                await asyncio.gather(*(self._worker(numbers, report) for _ in range(concurrency)))
                report.samples.append(sample(self._server))
                done, taken = requests * (lap + 1) // LAPS, time.monotonic() - begun
                print(f"{done} of {requests} requests, {taken:.0f} s, {len(report.problems)} problems", file=sys.stderr)
            report.seconds = time.monotonic() - begun
            await self._settle(report)
        return report

    async def _worker(self, numbers: Any, report: Report) -> None:
        for _ in numbers:
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            result = await getattr(self, f"_{kind}")()
            report.outcomes[f"{kind}: {result}"] += 1
            if result.startswith("!"):
                report.problems.append(f"{kind}{result}")

    # one method for each kind; what starts with "!" is a problem

    async def _whole(self) -> str:
        number = self._random.randrange(len(self._asks))
        outcome = await self._traffic.ask(self._random.choice(DOORS), self._asks[number])
        if outcome.answer is None:
            return f"! {outcome.code} {outcome.message}"
        return "right" if outcome.answer.same(self._alone[number]) else f"! wrong answer to {self._asks[number]}"

    async def _deadline(self) -> str:
        ask = self._random.choice(self._asks)
        ask = replace(ask, options={**ask.options, "max_time_ms": DEADLINE_MS})
        outcome = await self._traffic.ask(self._random.choice(DOORS), ask)
        return outcome.answer.finish_reason if outcome.answer else f"! {outcome.code} {outcome.message}"

    async def _bad(self) -> str:
        outcome = await self._traffic.ask(self._random.choice(DOORS), self._random.choice(self._mistakes))
        return "refused" if outcome.code == "INVALID_ARG" else f"! {outcome.ask}: {outcome.code} {outcome.message}"

    async def _abort(self) -> str:
        ask = self._random.choice(self._asks)
        body = {**self._traffic.body(ask, stream=False), "max_time_ms": TIME_LIMIT_MS}
        url = f"http://{self._traffic.http}/v2/models/photon/generate"
        try:
            reply = await asyncio.wait_for(self._traffic.session.post(url, json=body), ABORT_S)
        except asyncio.TimeoutError:
            return "left"
        reply.close()
        return "was over"

    async def _leave(self) -> str:
        return await self._leave_early("grpc")

    async def _disconnect(self) -> str:
        return await self._leave_early("generate_stream")

    async def _leave_early(self, door: str) -> str:
        """Takes one to three parts, then closes."""
        take = self._random.randint(1, 3)
        parts = self._traffic.parts(door, self._random.choice(self._asks))
        try:
            async for _, end in parts:
                take -= 1
                if end is not None:
                    return "was over"
                if take == 0:
                    return "left"
        except PhotonError as error:
            return f"! {error}"
        finally:
            await parts.aclose()
        return "! lost"

    async def _settle(self, report: Report) -> None:
        """Waits until nothing is open and compares the engine's counters, rows and pages with what they must be."""
        end = time.monotonic() + SETTLE_S
        while True:
            status = report.status = await self._traffic.client.status()
            ended = status["done"] + status["failed"] + status["cancelled"]
            held = status["prefix_entries"] * pages_of_prefix(self._config)
            balance = {
                "requests without an end": status["submitted"] - ended,
                "rows in use": status["rows_in_use"],
                "requests waiting": status["waiting"],
                "zombies": status["zombies"],
                "pages held by no prefix": status["pages_in_use"] - held,
            }
            if not any(balance.values()) or time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
        report.problems += [f"{count} {name} at the end" for name, count in balance.items() if count]
        if status["restarts"]:
            report.problems.append(f"{status['restarts']} restarts of the engine")


def sample(server: Server) -> dict[str, float]:
    """Resident memory and open files of tritonserver and every process below it, and /dev/shm of this server."""
    numbers = {"MiB in /dev/shm": shared_memory(server) / 2**20}
    for pid, name in family(server.pid).items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            numbers[f"MiB of {name}"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20
            numbers[f"open files of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
    return numbers


def shared_memory(server: Server) -> int:
    """Bytes that its regions take up."""
    return sum(file.stat().st_blocks * 512 for file in Path("/dev/shm").glob(f"{server.layout.directory.name}*"))


def family(pid: int) -> dict[int, str]:
    """Process ids of `pid` and all below it, with a name that tells them apart."""
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = [pid], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return {member: process_name(member) for member in found}


def process_name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return f"ended {pid}"
    if "photon_backend.engine.server" in words:
        return "engine " + words[words.index("--index") + 1]
    if words[0].endswith("stub"):
        return next((word for word in reversed(words) if word.startswith("photon_")), f"stub {pid}")
    return Path(words[0]).name


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000, help="[%(default)s]")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once [%(default)s]")
    parser.add_argument("--pictures", type=int, default=48, help="different ones [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=32, help="of a text [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the mixture [%(default)s]")
    options = parser.parse_args()
    environ = os.environ
    checkpoint = Path(environ.get("CHECKPOINT") or TINY_CHECKPOINT)
    config = load_config(checkpoint)
    with start_server(
        checkpoint=checkpoint,
        device=environ.get("DEVICE") or "cpu",
        dtype=environ.get("DTYPE") or "float32",
        front_ends=int(environ.get("FRONT_ENDS") or 2),
        settings=settings(config),
    ) as server:
        soak = Soak(server, config, options.pictures, options.max_tokens, options.seed)
        report = asyncio.run(soak.run(options.requests, options.concurrency))
    report.print()
    fields = {name: getattr(report, name) for name in ("requests", "seconds", "outcomes", "problems", "status")}
    print(json.dumps({"benchmark": "soak", **fields, "slopes": report.slopes()}))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
