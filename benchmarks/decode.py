"""Decode speed of the engine alone: blocking against pipelined, in one run.

    python -m benchmarks.decode [--device cpu|cuda] [--batch 1,4,16] [--tokens N] [--no-overlap] [--no-prefix-cache]

Every request is a free-text query over its own picture that may not end before N tokens. Prefill is left out: the clock
runs from the tick in which every row has its first token to the last one. Prints a table; the last line is JSON.

What to expect (the design's model): blocking = forward + sampling + bookkeeping, pipelined = forward + sampling. So the
gain that bookkeeping predicts is `host / (step - host)` with step and host of the blocking run; a measured gain far
below it means a hidden wait. On a CPU the worker that plays the device competes with the engine thread for cores, so a
gain needs a second idle core, and only ratios of one run mean anything: the modes take turns, and each row is a median
of its runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from photon_backend.config import TINY_CHECKPOINT, Settings
from photon_backend.engine.engine import Engine
from photon_backend.protocol import FromEngine, NeedPicture, Picture, Sampling, Submit, Tokens


class Load:
    """An engine driven in this thread, with one request per row."""

    def __init__(self, settings: Settings) -> None:
        self.engine = Engine(settings, self._emit)
        self.started: set[str] = set()
        config = self.engine.config
        self.engine.stepper.runner.suppress[:, config.tokenizer.eos_id] = True  # N tokens each, whatever the model says
        side = config.vision.crop_size
        self.pixels = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, NeedPicture):
                self.engine.post(client, Picture(message.request_id, (1, 1)), self.pixels)
            elif isinstance(message, Tokens):
                self.started.add(message.request_id)

    def submit(self, batch: int, tokens: int) -> None:
        query = self.engine.config.tokenizer.templates.query
        assert query is not None
        prompt = query.prefix + [40] * 12 + query.suffix * 2
        for i in range(batch):
            sampling = Sampling(max_tokens=tokens, temperature=0.7, top_p=0.9, seed=i)
            digest = i.to_bytes(16, "little")
            self.engine.post(b"bench", Submit(f"r{i}", "query", prompt, digest, sampling=sampling))

    @torch.inference_mode()
    def measure(self, batch: int, tokens: int) -> dict[str, float]:
        """One run of `batch` rows for `tokens` tokens each; times in milliseconds per decode step."""
        self.started.clear()
        self.submit(batch, tokens)
        while len(self.started) < batch:
            self.engine.tick()
        begin, before = time.perf_counter(), self.engine.status()
        while self.engine.tick():
            pass
        seconds, after = time.perf_counter() - begin, self.engine.status()
        steps = after.steps - before.steps
        overlapped = after.steps_overlapped - before.steps_overlapped
        return {
            "step_ms": 1e3 * seconds / steps,
            "tokens_per_s": (after.tokens - before.tokens) / seconds,
            "host_ms": (after.host_ms - before.host_ms) / (after.ticks - before.ticks),
            "overlapped": overlapped / steps,
        }

    def close(self) -> None:
        self.engine.stepper.close()


def measure_modes(options: argparse.Namespace, batch: int, modes: list[bool]) -> list[dict[str, float]]:
    """The median run of each mode; the modes take turns, so a busy machine hits all of them."""
    loads = [Load(settings_of(options, batch, overlap)) for overlap in modes]
    for load in loads:
        load.measure(batch, 8)  # warm-up
    runs = [[load.measure(batch, options.tokens) for load in loads] for _ in range(options.repeat)]
    for load in loads:
        load.close()
    by_mode = zip(*runs, strict=True)
    return [sorted(of_mode, key=lambda r: r["step_ms"])[options.repeat // 2] for of_mode in by_mode]


def settings_of(options: argparse.Namespace, batch: int, overlap: bool) -> Settings:
    return Settings(
        checkpoint=options.checkpoint,
        device=options.device,
        dtype=options.dtype,
        rows=batch,
        overlap=overlap,
        prefix_cache=not options.no_prefix_cache,
    )


def line(batch: int, overlap: bool, result: dict[str, float], gain: float, predicted: float) -> str:
    mode = "pipelined" if overlap else "blocking"
    text = f"{batch:>5} {mode:>10} {result['step_ms']:>8.3f} {result['tokens_per_s']:>9.0f} {result['host_ms']:>8.3f}"
    return text + (f" {result['overlapped']:>10.0%} {gain:>7.1%} {predicted:>9.1%}" if overlap else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(TINY_CHECKPOINT))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", default="1,4,16", help="rows, a comma between them")
    parser.add_argument("--tokens", type=int, default=96, help="per row")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU; one leaves a core to the host side")
    parser.add_argument("--no-overlap", action="store_true", help="the blocking loop only")
    parser.add_argument("--no-prefix-cache", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    modes = [False] if options.no_overlap else [False, True]
    results = []
    print("batch       mode  step ms  tokens/s  host ms overlapped    gain predicted")
    for batch in map(int, options.batch.split(",")):
        measured = measure_modes(options, batch, modes)
        blocking = measured[0]
        predicted = blocking["host_ms"] / (blocking["step_ms"] - blocking["host_ms"])
        for overlap, result in zip(modes, measured, strict=True):
            gain = blocking["step_ms"] / result["step_ms"] - 1
            print(line(batch, overlap, result, gain, predicted), flush=True)
            results.append({"batch": batch, "overlap": overlap, "gain": gain, "predicted_gain": predicted} | result)
    model = Path(options.checkpoint).name
    print(json.dumps({"benchmark": "decode", "device": options.device, "model": model, "results": results}))


if __name__ == "__main__":
    main()
