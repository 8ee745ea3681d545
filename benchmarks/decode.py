"""Decode speed of the engine alone: blocking against pipelined, in one run.

    python -m benchmarks.decode [--device cpu|cuda] [--batch 1,4,16] [--context N] [--tokens N] [--random-weights]
                                [--no-overlap] [--no-graphs] [--no-kernels] [--no-prefix-cache] [--trace FILE]

Every request is a free-text query that may not end before N tokens, so there is no picture and `--no-prefix-cache` has
no effect. Prefill is left out: the clock runs from the tick in which every row has its first token to the last one.
Prints the ceiling, weights and KV read once from memory, then a table with the share of it that each step reaches; the
last line is JSON.

What to expect (the design's model): blocking = forward + sampling + bookkeeping, pipelined = forward + sampling. So the
gain that bookkeeping predicts is `host / (step - host)` with step and host of the blocking run; a measured gain far
below it means a hidden wait. On a CPU the worker that plays the device competes with the engine thread for cores, so a
gain needs a second idle core, and only ratios of one run mean anything: the modes take turns, and each row is a median
of its runs.

`--trace out/trace` writes a trace of both modes and their picture too, at the first batch size (benchmarks/trace.py).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ceilings import bytes_per_s, decode_bytes
from benchmarks.garbage import frozen
from photon_backend.config import TINY_CHECKPOINT, Settings
from photon_backend.engine.engine import Engine
from photon_backend.model.config import ModelConfig
from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import load_model, random_model
from photon_backend.protocol import FromEngine, Sampling, Submit, Tokens, unpacked


class Load:
    """An engine driven in this thread, with one request per row."""

    def __init__(self, settings: Settings, model: Moondream, context: int) -> None:
        self.engine = Engine(settings, self._emit, model)
        self.context = context
        self.started: set[str] = set()
        # N tokens each, whatever the model says
        self.engine.stepper.runner.rows.forbid(self.engine.config.tokenizer.eos_id)

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        self.started.update(m.request_id for m in unpacked(messages) if isinstance(m, Tokens))

    def submit(self, batch: int, tokens: int) -> None:
        ids = self.engine.config.tokenizer
        assert ids.templates.query is not None
        prompt = [ids.bos_id, *ids.templates.query.prefix, *ids.templates.query.suffix * 2]
        prompt[1:1] = [40] * (self.context - len(prompt))
        for i in range(batch):
            sampling = Sampling(max_tokens=tokens, temperature=0.5, top_p=0.3, seed=i)
            self.engine.post(b"bench", Submit(f"r{i}", "query", prompt, sampling=sampling))

    @torch.inference_mode()
    def measure(self, batch: int, tokens: int) -> dict[str, float]:
        """One run of `batch` rows for `tokens` tokens each; times in milliseconds per decode step."""
        self.engine.stepper.compute.adopt()  # as the engine's own thread does
        self.started.clear()
        self.submit(batch, tokens)
        while len(self.started) < batch:
            self.engine.tick()
        begin, before = time.perf_counter(), self.engine.snapshot()
        in_flight = len(self.engine.pipeline)  # launched before the clock began, run while it does
        while self.engine.tick():
            pass
        seconds, after = time.perf_counter() - begin, self.engine.snapshot()
        launched = after.steps - before.steps
        steps = launched + in_flight
        overlapped = after.steps_overlapped - before.steps_overlapped
        return {
            "step_ms": 1e3 * seconds / steps,
            "tokens_per_s": (after.tokens - before.tokens) / seconds,
            "host_ms": (after.host_ms - before.host_ms) / (after.ticks - before.ticks),
            "idle_ms": (after.device_idle_ms - before.device_idle_ms) / steps,
            "overlapped": overlapped / launched,
        }

    def close(self) -> None:
        self.engine.stepper.close()


def measure_modes(
    options: argparse.Namespace, model: Moondream, batch: int, modes: list[bool]
) -> list[dict[str, float]]:
    """The median run of each mode; the modes take turns, so a busy machine hits all of them."""
    loads = [Load(load_settings(options, batch, overlap), model, options.context) for overlap in modes]
    for load in loads:
        load.measure(batch, 8)  # warm-up
    with frozen():
        runs = [[load.measure(batch, options.tokens) for load in loads] for _ in range(options.repeat)]
    for load in loads:
        load.close()
    by_mode = zip(*runs, strict=True)
    return [sorted(of_mode, key=lambda r: r["step_ms"])[options.repeat // 2] for of_mode in by_mode]


def settings_of(options: argparse.Namespace, rows: int, **changes: Any) -> Settings:
    """Of an engine with so many rows, by the options of `parser_of`; `changes` are fields of Settings."""
    of_options: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "device": options.device,
        "dtype": options.dtype,
        "overlap": not options.no_overlap,
        "graphs": not options.no_graphs,
        "kernels": not options.no_kernels,
        "prefix_cache": not options.no_prefix_cache,
    }
    return Settings(rows=rows, **(of_options | changes))


def load_settings(options: argparse.Namespace, batch: int, overlap: bool) -> Settings:
    """Of a `Load`: all its requests are prefilled in one step."""
    tokens = max(4096, batch * options.context)
    return settings_of(options, batch, overlap=overlap, max_waiting=batch, prefill_tokens=tokens)


def floors_ms(options: argparse.Namespace, model: Moondream, batches: list[int]) -> dict[int, float]:
    """Milliseconds of a step by batch: no decode step is faster than memory. Prints them."""
    rate, context = bytes_per_s(options.device), options.context + options.tokens // 2
    floors = {batch: 1e3 * decode_bytes(model, batch, context) / rate for batch in batches}
    of_batch = ", ".join(f"{floor:.3f} ms at B = {batch}" for batch, floor in floors.items())
    print(f"ceiling: weights and KV read once at {rate / 1e9:,.1f} GB/s: {of_batch}", flush=True)
    return floors


def line(batch: int, overlap: bool, result: dict[str, float], gain: float, predicted: float) -> str:
    mode = "pipelined" if overlap else "blocking"
    text = f"{batch:>5} {mode:>10} {result['step_ms']:>8.3f} {result['tokens_per_s']:>9.0f}"
    text += f" {result['of_ceiling']:>10.0%} {result['host_ms']:>8.3f} {result['idle_ms']:>8.3f}"
    return text + (f" {result['overlapped']:>10.0%} {gain:>7.1%} {predicted:>9.1%}" if overlap else "")


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Options of every engine benchmark."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(TINY_CHECKPOINT))
    parser.add_argument("--random-weights", action="store_true", help="Moondream 2's shape instead of a checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU; one leaves a core to the host side")
    parser.add_argument("--no-kernels", action="store_true", help="torch operations; a CPU has no others")
    add_ablations(parser)
    return parser


def add_ablations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-overlap", action="store_true", help="the blocking loop only")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs; a CPU has none")
    parser.add_argument("--no-prefix-cache", action="store_true", help="every picture anew; without pictures no effect")


def load_any(options: argparse.Namespace) -> Moondream:
    """The checkpoint of the options, or Moondream 2's shape with random weights."""
    dtype = getattr(torch, options.dtype)
    if options.random_weights:
        return random_model(ModelConfig(), options.device, dtype, seed=0).requires_grad_(False)
    return load_model(Path(options.checkpoint), options.device, dtype)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", default="1,4,16,64", help="rows, a comma between them")
    parser.add_argument("--context", type=int, default=160, help="positions before the first new token")
    parser.add_argument("--tokens", type=int, default=96, help="per row")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--trace", type=Path, help="and trace both modes into this file .json and .png")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    modes = [False] if options.no_overlap else [False, True]
    model = load_any(options)
    results: list[dict[str, Any]] = []
    floors = floors_ms(options, model, [int(batch) for batch in options.batch.split(",")])
    print("batch       mode  step ms  tokens/s of ceiling  host ms  idle ms overlapped    gain predicted")
    for batch, floor in floors.items():
        measured = measure_modes(options, model, batch, modes)
        blocking = measured[0]
        predicted = blocking["host_ms"] / (blocking["step_ms"] - blocking["host_ms"])
        for overlap, result in zip(modes, measured, strict=True):
            gain = blocking["step_ms"] / result["step_ms"] - 1
            result |= {"floor_ms": floor, "of_ceiling": floor / result["step_ms"]}
            print(line(batch, overlap, result, gain, predicted), flush=True)
            results.append({"batch": batch, "overlap": overlap, "gain": gain, "predicted_gain": predicted} | result)
    if options.trace is not None:
        from benchmarks.trace import trace_modes  # matplotlib is slow to import

        trace_modes(options, model, next(iter(floors)), options.trace)
    name = "moondream2, random" if options.random_weights else Path(options.checkpoint).name
    print(json.dumps({"benchmark": "decode", "device": options.device, "model": name, "results": results}))


if __name__ == "__main__":
    main()
