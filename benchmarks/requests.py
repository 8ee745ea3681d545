"""Requests per second and latency of the engine alone, over a workload like a benchmark of questions about charts.

    python -m benchmarks.requests [--device cpu|cuda] [--random-weights] [--workload direct|reasoning] [--rate R]
                                  [--clients 1,16,64] [--requests N] [--no-overlap] [--no-graphs] [--no-prefix-cache]

Each request asks about an 850 x 600 picture with a short prompt and gets 4 tokens (direct) or 30 (reasoning). Pictures
come in pairs: two requests share one, so half of them can find its prefix. Closed loop: `--clients` requests are always
open. Open loop (`--rate` per second, Poisson): arrivals do not wait for answers, and latency includes the queue. Crops
are cut once, outside the clock: that is the front ends' work.

Prints the ceiling first, requests per second of a device that does nothing but arithmetic at its full rate (encoder and
prefill, of every second request without its picture) and reads weights and KV once a step of all clients. The table
says how many requests found their prefix: a half, none with `--no-prefix-cache`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.ceilings import bytes_per_s, decode_bytes, flop_per_s, tflop_per_crop, tflop_per_token
from benchmarks.decode import load_any, parser_of, settings_of
from benchmarks.garbage import frozen
from photon_backend.engine.engine import Engine
from photon_backend.model.crops import make_crops
from photon_backend.model.moondream import Moondream
from photon_backend.protocol import Done, Failed, FromEngine, NeedPicture, Picture, Sampling, Submit

CLIENT = b"bench"
TOKENS = {"direct": 4, "reasoning": 30}
PROMPT_WORDS = 32
PICTURE = (600, 850)  # height, width


def wait_for(arrived: Callable[[], bool], engine: Engine) -> None:
    """`arrived` waits a second at most for what the engine does. Raises when it failed: nothing would come any more."""
    while not arrived():
        if engine.failure is not None:
            raise RuntimeError("the engine failed") from engine.failure


class Workload:
    """Sends requests to a running engine and notes when each began and ended."""

    def __init__(self, options: argparse.Namespace, model: Moondream, rows: int) -> None:
        settings = settings_of(options, rows, max_waiting=options.requests)
        self.engine = Engine(settings, self._emit, model)
        special = self.engine.config.tokenizer
        self.engine.stepper.runner.rows.forbid(special.eos_id)
        assert special.templates.query is not None
        self.prompt = special.templates.query.prefix + [40] * PROMPT_WORDS + special.templates.query.suffix * 2
        pixels = np.random.default_rng(0).integers(0, 256, (*PICTURE, 3), dtype=np.uint8)
        self.pixels, self.tiling = make_crops(pixels, self.engine.config.vision)
        self.tokens = TOKENS[options.workload]
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._done = threading.Semaphore(0)

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, NeedPicture):
                self.engine.post(CLIENT, Picture(message.request_id, self.tiling), self.pixels)
            elif isinstance(message, Done):
                self.ended[message.request_id] = time.perf_counter()
                self._done.release()
            elif isinstance(message, Failed):
                raise RuntimeError(f"{message.request_id}: {message.message}")

    def send(self, number: int) -> None:
        name = f"r{number}"
        self.begun[name] = time.perf_counter()
        digest = (number // 2).to_bytes(16, "little")
        sampling = Sampling(temperature=0.0, max_tokens=self.tokens, seed=number)
        self.engine.post(CLIENT, Submit(name, "query", self.prompt, digest, sampling=sampling))

    def closed(self, number: int, clients: int, first: int = 0) -> float:
        """Seconds for `number` requests with `clients` of them always open."""
        begun = time.perf_counter()
        for i in range(number):
            if i >= clients:
                wait_for(lambda: self._done.acquire(timeout=1), self.engine)
            self.send(first + i)
        for _ in range(min(clients, number)):
            wait_for(lambda: self._done.acquire(timeout=1), self.engine)
        return time.perf_counter() - begun

    def open(self, number: int, rate: float, first: int = 0) -> float:
        """Seconds for `number` requests that arrive at `rate` per second."""
        chance, begun = random.Random(0), time.perf_counter()
        due = begun
        for i in range(number):
            due += chance.expovariate(rate)
            time.sleep(max(0.0, due - time.perf_counter()))
            self.send(first + i)
        for _ in range(number):
            wait_for(lambda: self._done.acquire(timeout=1), self.engine)
        return time.perf_counter() - begun

    def measure(self, number: int, clients: int, rate: float) -> dict[str, float]:
        warm = max(4, clients)
        self.closed(warm, clients, first=1 << 20)
        before = self.engine.status()
        self.begun.clear()
        self.ended.clear()
        seconds = self.open(number, rate) if rate else self.closed(number, clients)
        latency = sorted(self.ended[name] - self.begun[name] for name in self.ended)
        status = self.engine.status()
        hits = status.prefix_hits - before.prefix_hits
        return {
            "requests_per_s": number / seconds,
            "p50_ms": 1e3 * latency[len(latency) // 2],
            "p99_ms": 1e3 * latency[len(latency) * 99 // 100],
            "hit_rate": hits / max(1, hits + status.prefix_misses - before.prefix_misses),
        }


def ceilings(options: argparse.Namespace, model: Moondream, batches: list[int]) -> dict[int, float]:
    """Requests per second by clients. Prints them."""
    config, cached = model.config, 0.0 if options.no_prefix_cache else 0.5
    crops, _ = make_crops(np.zeros((*PICTURE, 3), np.uint8), config.vision)
    tokens, steps = config.prefix_len * (1 - cached) + PROMPT_WORDS, TOKENS[options.workload] - 1
    tflop = len(crops) * tflop_per_crop(config.vision) * (1 - cached) + tokens * tflop_per_token(config)
    flops, rate, context = flop_per_s(options.device, options.dtype), bytes_per_s(options.device), config.prefix_len
    limits = {n: 1 / (1e12 * tflop / flops + steps * decode_bytes(model, n, context) / rate / n) for n in batches}
    by_clients = ", ".join(f"{limit:.1f} /s with {n}" for n, limit in limits.items())
    print(f"ceiling at {flops / 1e12:.3g} TFLOP/s and {rate / 1e9:,.1f} GB/s, by clients: {by_clients}", flush=True)
    return limits


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", choices=sorted(TOKENS), default="direct")
    parser.add_argument("--clients", default="1,16,64", help="open requests of the closed loop")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second of an open loop instead")
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, results = load_any(options), []
    limits = ceilings(options, model, [int(clients) for clients in options.clients.split(",")])
    print(f"{options.workload}: {TOKENS[options.workload]} tokens out, picture {PICTURE[1]} x {PICTURE[0]}")
    for clients, limit in limits.items():
        load = Workload(options, model, rows=clients)
        load.engine.start()
        with frozen():
            result = load.measure(options.requests, clients, options.rate)
        load.engine.stop()
        del load
        gc.collect()  # its pages are the next one's
        results.append({"clients": clients, "rate": options.rate, "ceiling_requests_per_s": limit} | result)
        print(
            f"clients {clients:>3}  {result['requests_per_s']:>7.1f} requests/s  p50 {result['p50_ms']:>7.1f} ms  "
            f"p99 {result['p99_ms']:>7.1f} ms  prefix hits {result['hit_rate']:.0%}",
            flush=True,
        )
    print(json.dumps({"benchmark": "requests", "workload": options.workload, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
