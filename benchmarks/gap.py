"""How long running streams wait for prefills: time between two tokens of a stream while pictures keep coming.

    python -m benchmarks.gap [--device cpu|cuda] [--random-weights] [--bounds 0,50,1000000] [--streams 16]
                             [--clients 16] [--requests N] [--no-overlap]

`--streams` text requests run all the while; `--clients` requests about a new 850 x 600 picture each, 4 tokens long, are
always open beside them. For each value of `max_decode_gap_ms` prints the time between two tokens of the streams, 50th
and 99th percentile and the longest, the longest prefill step of the device, and how many pictures a second remain. The
engine warms up with such requests first, so the cost of a prefill is known. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import threading
import time

import numpy as np
import torch

from benchmarks.decode import load_any, parser_of, settings_of
from benchmarks.garbage import frozen
from benchmarks.requests import CLIENT, PICTURE, PROMPT_WORDS, wait_for
from photon_backend.engine.engine import Engine
from photon_backend.model.crops import make_crops
from photon_backend.model.moondream import Moondream
from photon_backend.protocol import (
    Cancel,
    Done,
    Failed,
    FromEngine,
    NeedPicture,
    Picture,
    Sampling,
    Submit,
    Tokens,
    unpacked,
)

STREAM_TOKENS = 1900  # or what the context leaves; a stream that ends is started again


class Mix:
    def __init__(self, options: argparse.Namespace, model: Moondream, bound_ms: float) -> None:
        settings = settings_of(options, options.streams + options.clients, max_decode_gap_ms=bound_ms)
        self.engine = Engine(settings, self._emit, model)
        self.pixels, self.tiling = make_crops(np.zeros((*PICTURE, 3), np.uint8), self.engine.config.vision)
        self.prefills: list[float] = []  # ms of the device
        observe = self.engine.scheduler.cost.observe

        def note(crops: int, tokens: int, ms: float) -> None:
            self.prefills.append(ms)
            observe(crops, tokens, ms)

        self.engine.scheduler.cost.observe = note  # type: ignore[method-assign]
        self.gaps: list[float] = []  # seconds
        self._last: dict[str, float] = {}  # by stream: when its last token came
        self._ended = threading.Semaphore(0)
        self._numbers = itertools.count(1)
        self._over = False

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        now = time.perf_counter()
        for message in unpacked(messages):
            if isinstance(message, NeedPicture):
                self.engine.post(CLIENT, Picture(message.request_id, self.tiling), self.pixels)
            elif isinstance(message, Tokens) and message.request_id in self._last:
                self.gaps.append(now - self._last[message.request_id])
                self._last[message.request_id] = now
            elif isinstance(message, Failed):
                raise RuntimeError(f"{message.request_id}: {message.message}")
            elif isinstance(message, Done) and message.request_id in self._last:
                del self._last[message.request_id]
                if not self._over:
                    self.stream()
            elif isinstance(message, Done):
                self._ended.release()

    def stream(self) -> None:
        self._last[self._send(STREAM_TOKENS, None)] = time.perf_counter()

    def picture(self) -> None:
        self._send(4, next(self._numbers).to_bytes(16, "little"))

    def _send(self, tokens: int, digest: bytes | None) -> str:
        special = self.engine.config.tokenizer
        assert special.templates.query is not None
        prompt = special.templates.query.prefix + [40] * PROMPT_WORDS + special.templates.query.suffix * 2
        prompt = prompt if digest else [special.bos_id, *prompt]
        room = self.engine.config.text.max_context - len(prompt)
        sampling = Sampling(temperature=0.0, max_tokens=tokens if digest else min(tokens, room))
        name = f"r{next(self._numbers)}"
        self.engine.post(CLIENT, Submit(name, "query", prompt, digest, sampling=sampling))
        return name

    def pictures(self, number: int, clients: int) -> float:
        """Seconds for so many pictures."""
        begun = time.perf_counter()
        for i in range(number):
            if i >= clients:
                wait_for(lambda: self._ended.acquire(timeout=1), self.engine)
            self.picture()
        for _ in range(min(clients, number)):
            wait_for(lambda: self._ended.acquire(timeout=1), self.engine)
        return time.perf_counter() - begun

    def measure(self, streams: int, number: int, clients: int) -> dict[str, float]:
        self.engine.stepper.runner.rows.forbid(self.engine.config.tokenizer.eos_id)
        self.engine.start()
        for _ in range(streams):
            self.stream()
        self.pictures(2 * clients, clients)
        self.gaps.clear()
        self.prefills.clear()
        seconds = self.pictures(number, clients)
        gaps, longest = sorted(self.gaps), max(self.prefills)
        self._over = True
        for name in list(self._last):
            self.engine.post(CLIENT, Cancel(name))
        self.engine.stop()
        return {
            "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "gap_p99_ms": 1e3 * gaps[len(gaps) * 99 // 100],
            "gap_max_ms": 1e3 * gaps[-1],
            "prefill_max_ms": longest,
            "pictures_per_s": number / seconds,
        }


def measure(options: argparse.Namespace, model: Moondream, bound_ms: float) -> dict[str, float]:
    """Of one bound, with an engine that is gone afterwards: its pages are the next one's."""
    mix = Mix(options, model, bound_ms)
    with frozen():
        result = mix.measure(options.streams, options.requests, options.clients)
    del mix
    gc.collect()
    return result


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--bounds", default="0,50,1000000", help="values of max_decode_gap_ms")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200, help="pictures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, results = load_any(options), []
    for bound in map(float, options.bounds.split(",")):
        result = measure(options, model, bound)
        results.append({"max_decode_gap_ms": bound} | result)
        print(
            f"bound {bound:>9.0f} ms  gap p50 {result['gap_p50_ms']:>7.1f}  p99 {result['gap_p99_ms']:>7.1f}  "
            f"max {result['gap_max_ms']:>7.1f} ms  longest prefill {result['prefill_max_ms']:>7.1f} ms  "
            f"{result['pictures_per_s']:>6.1f} pictures/s",
            flush=True,
        )
    print(json.dumps({"benchmark": "gap", "streams": options.streams, "clients": options.clients, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
