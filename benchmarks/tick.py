"""Host work of a tick, without a device: what the engine thread does while a step runs.

    python -m benchmarks.tick [--rows 1,16,64,256] [--tokens N]

The streams do nothing and are always done, so what remains is the tick itself: intake, plan, launch, commit, emit.
Every row is a free-text query in its steady state. Prints the target first; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from photon_backend.config import Settings
from photon_backend.engine.engine import Engine
from photon_backend.protocol import FromEngine, Sampling, Submit


class DoneEvent:
    def wait(self) -> None:
        pass

    def ms_since(self, earlier: Any) -> float:
        return 0.0


class NoStream:
    """Takes work and forgets it."""

    def run(self, work: Callable[..., None], *args: Any) -> None:
        pass

    def record(self) -> DoneEvent:
        return DoneEvent()

    def wait(self, event: DoneEvent) -> None:
        pass

    def close(self) -> None:
        pass


def measure(rows: int, tokens: int) -> dict[str, float]:
    """Microseconds per tick, median and 99th percentile, with `rows` rows decoding."""
    emitted = 0

    def emit(client: bytes, messages: list[FromEngine]) -> None:
        nonlocal emitted
        emitted += len(messages)

    engine = Engine(Settings(rows=rows, max_waiting=rows, threads=1, prefill_tokens=1 << 20), emit)
    engine.stepper.close()
    engine.stepper.compute = engine.stepper.copy = NoStream()
    for slot in engine.stepper.slots:
        slot.host_ids.fill_(40)
    for i in range(rows):
        engine.post(b"tick", Submit(f"r{i}", "query", [40] * 8, sampling=Sampling(max_tokens=tokens, seed=i)))
    times = []
    gc.collect()
    gc.freeze()
    with torch.inference_mode():
        busy = True
        while busy:
            begun = time.perf_counter()
            busy = engine.tick()
            times.append(time.perf_counter() - begun)
    steady = sorted(times[tokens // 4 : -tokens // 4])
    return {
        "rows": rows,
        "median_us": 1e6 * steady[len(steady) // 2],
        "p99_us": 1e6 * steady[len(steady) * 99 // 100],
        "target_us": 100 + 2 * rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    results = []
    for rows in map(int, options.rows.split(",")):
        result = measure(rows, options.tokens)
        results.append(result)
        print(
            f"rows {rows:>4}  target {result['target_us']:>5.0f} us  "
            f"median {result['median_us']:>7.1f} us  p99 {result['p99_us']:>7.1f} us",
            flush=True,
        )
    print(json.dumps({"benchmark": "tick", "results": results}))


if __name__ == "__main__":
    main()
