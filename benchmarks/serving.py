"""What Triton costs: the same streams through the real server and straight into an engine on the same machine.

    python -m benchmarks.serving [--random-weights] [--device cpu|cuda] [--dtype T] [--streams 1,4,16,64]
                                 [--front-ends 1,2,4,8] [--tokens N] [--seconds S] [--no-overlap] [--no-graphs] ...

Every stream asks a question about one picture, whose prefix is cached after the first time, reads N tokens as they
come and asks again. The engine alone is the ceiling and is measured first: no Triton, no gRPC, no text. Then each
number of front ends, with our asyncio clients in processes of their own. Time to first token is counted from the
request at the client; `in engine` is what the engine had of it, from a Submit to the commit of the first token. Weights
are random (checkpoints.py), so an answer has N tokens. The last line is JSON. `--checkpoint` and `--threads` have no
effect: weights are written here, and both engines take the threads that an engine takes.

`--engine-python` is the interpreter of the engine process, when Triton's stubs cannot have its torch. On a machine
with few cores clients, front ends and engine compete: only where each has a core of its own do the ratios mean much.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.checkpoints import write_checkpoint
from benchmarks.decode import parser_of, settings_of
from benchmarks.garbage import frozen
from benchmarks.load import Generator, Target, measure
from benchmarks.requests import wait_for
from benchmarks.traffic import Ask, make_pictures
from photon_backend.config import Settings
from photon_backend.engine.engine import Engine
from photon_backend.frontend.session import FrontEnd, RawRequest
from photon_backend.protocol import Done, Failed, FromEngine, NeedPicture, Picture, Tokens, unpacked
from photon_backend.serve import start_server

QUESTION = "What is in the picture?"


class EngineAlone:
    """Closed-loop streams in this process; what they receive is handled on the engine thread, as it comes."""

    def __init__(self, settings: Settings, image: bytes, tokens: int) -> None:
        options = json.dumps({"max_tokens": tokens, "temperature": 0})
        raw = RawRequest("query", QUESTION, image, stream=True, sampling_parameters=options, parameters={})
        session = FrontEnd(settings).open(raw, "")
        self._submit = session.submit
        self._tiling, self._pixels = session.picture()
        self._begun: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._end = 0.0
        self._open = self._tokens = self._number = 0
        self._all_done = threading.Event()
        self.engine = Engine(settings, self._emit)
        self.engine.start()

    def run(self, streams: int, seconds: float) -> dict[str, float]:
        self._begun.clear()
        self._first.clear()
        self._tokens, self._open = 0, streams
        self._all_done.clear()
        begun = time.perf_counter()
        self._end = begun + seconds
        for _ in range(streams):
            self._ask()
        wait_for(lambda: self._all_done.wait(1), self.engine)
        taken = time.perf_counter() - begun
        first = [self._first[name] - self._begun[name] for name in self._first]
        return {"tokens_per_s": self._tokens / taken, "first_ms": 1e3 * statistics.median(first)}

    def _ask(self) -> None:
        self._number += 1
        name = str(self._number)
        self._begun[name] = time.perf_counter()
        self.engine.post(b"bench", msgspec.structs.replace(self._submit, request_id=name))

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        now = time.perf_counter()
        for message in unpacked(messages):
            if isinstance(message, Tokens):
                self._tokens += len(message.ids)
                self._first.setdefault(message.request_id, now)
            elif isinstance(message, NeedPicture):
                self.engine.post(client, Picture(message.request_id, self._tiling), self._pixels)
            elif isinstance(message, Done):
                self._next(now)
            elif isinstance(message, Failed):
                raise RuntimeError(f"{message.request_id}: {message.message}")

    def _next(self, now: float) -> None:
        if now < self._end:
            self._ask()
            return
        self._open -= 1
        if self._open == 0:
            self._all_done.set()


def engine_alone(options: argparse.Namespace, settings: Settings, image: bytes) -> dict[int, dict[str, float]]:
    """By number of streams. The engine and its memory are gone afterwards."""
    alone = EngineAlone(settings, image, options.tokens)
    alone.run(1, 0)  # warm-up, and the picture is cached
    results = {}
    with frozen():
        for streams in options.streams:
            results[streams] = alone.run(streams, options.seconds)
            print(line("engine alone", streams, results[streams]), flush=True)
    alone.engine.stop()
    del alone
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()
    return results


def through_triton(
    options: argparse.Namespace, settings: Settings, image: bytes, front_ends: int, alone: dict[int, dict[str, float]]
) -> list[dict[str, Any]]:
    names = ("rows", "pages", "overlap", "graphs", "kernels", "prefix_cache")
    variables = {f"PHOTON_{name.upper()}": str(getattr(settings, name)) for name in names}
    variables["PHOTON_ENGINE_PYTHON"] = options.engine_python
    ask = Ask("query", 0, QUESTION, {"max_tokens": options.tokens, "temperature": 0})
    results = []
    with start_server(
        settings.checkpoint, settings.device, settings.dtype, front_ends=front_ends, settings=variables
    ) as server:
        target = Target(server.grpc_url, server.http_url.removeprefix("http://"), [image], [ask])
        generator = Generator(target, options.processes)
        generator.run("grpc", 0.1, concurrency=max(options.streams))  # starts the processes and their connections
        for streams in options.streams:
            seconds, outcomes = generator.run("grpc", options.seconds, concurrency=streams)
            failed = [outcome for outcome in outcomes if outcome.answer is None]
            if failed:
                raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0].message}")
            measured = measure(seconds, outcomes)
            result = {"tokens_per_s": measured["tokens_per_s"], "first_ms": measured["first_ms"][0]}
            result["in_engine_ms"] = 1e3 * statistics.median(outcome.engine_s for outcome in outcomes)
            result["of_engine"] = result["tokens_per_s"] / alone[streams]["tokens_per_s"]
            result["first_more_ms"] = result["first_ms"] - alone[streams]["first_ms"]
            print(line(f"{front_ends} front ends", streams, result), flush=True)
            results.append({"front_ends": front_ends, "streams": streams} | result)
        generator.close()
    return results


def line(name: str, streams: int, result: dict[str, float]) -> str:
    text = f"{name:>14} {streams:>8} {result['tokens_per_s']:>10.0f} {result['first_ms']:>10.1f}"
    if "of_engine" not in result:
        return text
    return f"{text} {result['of_engine']:>10.2f} {result['first_more_ms']:>+10.1f} {result['in_engine_ms']:>10.1f}"


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--front-ends", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of an answer [%(default)s]")
    parser.add_argument("--seconds", type=float, default=5, help="of each line [%(default)s]")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="of clients")
    parser.add_argument("--engine-python", default="", help="interpreter of the engine process")
    return parser.parse_args()


def main() -> None:
    options = parse()
    (image,), _ = make_pictures(1)
    shape = "moondream2" if options.random_weights else "tiny"
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), shape, options.device, options.dtype)
        rows, positions = max(options.streams), 1024 if options.random_weights else 512  # of picture, prompt and answer
        settings = settings_of(options, rows, checkpoint=directory, pages=(rows + 1) * positions // 16)
        print("ceiling: the engine alone")
        print("                streams   tokens/s   first ms  of engine       more  in engine")
        alone = engine_alone(options, settings, image)
        for front_ends in options.front_ends:
            results += through_triton(options, settings, image, front_ends, alone)
    document = {"benchmark": "serving", "device": options.device, "model": f"{shape}, random", "alone": alone}
    print(json.dumps(document | {"results": results}))


if __name__ == "__main__":
    main()
