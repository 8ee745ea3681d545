"""Host work of a tick, without a device: what the engine thread does while a step runs.

    python -m benchmarks.tick [--rows 1,16,64,256] [--clients N] [--tokens N] [--gc frozen|thawed|off]
                             [--no-overlap]

The streams do nothing and are always done, so what remains is the tick itself: intake, plan, launch, commit, emit.
Times are those of the processor for this thread: it never waits, and what else the machine does is left out.
Every row is a free-text query in its steady state. Prints ceiling and target first; the last line is JSON.
`--no-graphs` and `--no-prefix-cache` are accepted, as by every benchmark, and change nothing: nothing is replayed and
no row has a picture.

`--gc`: of the garbage collector, frozen after the start as in an engine process, thawed as Python has it, or off. `gc`
is what it took of all ticks, and of the tick in which it took longest.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.decode import add_ablations
from benchmarks.garbage import frozen
from photon_backend.config import Settings
from photon_backend.engine.engine import Engine
from photon_backend.protocol import Sampling, Submit


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


class Collections:
    """What the garbage collector did: microseconds of each collection."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._begun = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.times.append(1e6 * (time.thread_time() - self._begun))

    def close(self) -> None:
        gc.callbacks.remove(self)


def measure(rows: int, clients: int, tokens: int, mode: str, overlap: bool = True) -> dict[str, float]:
    """Microseconds per tick, median and 99th percentile, with `rows` rows decoding, dealt out to `clients`."""
    settings = Settings(rows=rows, max_waiting=rows, threads=1, prefill_tokens=1 << 20, overlap=overlap)
    engine = Engine(settings, lambda client, messages: None)
    engine.stepper.close()
    engine.stepper.compute = engine.stepper.copy = NoStream()
    for slot in engine.stepper.slots:
        slot.host_ids.fill(40)
    for i in range(rows):
        engine.post(
            b"%d" % (i % clients), Submit(f"r{i}", "query", [40] * 8, sampling=Sampling(max_tokens=tokens, seed=i))
        )
    times = []
    with frozen() if mode == "frozen" else nullcontext(), torch.inference_mode():
        if mode == "off":
            gc.disable()
        collections = Collections()
        busy = True
        while busy:
            begun = time.thread_time()
            busy = engine.tick()
            times.append(time.thread_time() - begun)
        collections.close()
        gc.enable()
    steady = sorted(times[tokens // 4 : -tokens // 4])
    return {
        "rows": rows,
        "median_us": 1e6 * steady[len(steady) // 2],
        "p99_us": 1e6 * steady[len(steady) * 99 // 100],
        "max_us": 1e6 * steady[-1],
        "collections": len(collections.times),
        "gc_us_per_tick": sum(collections.times) / len(times),
        "gc_max_us": max(collections.times, default=0.0),
        "target_us": 100 + 2 * rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--clients", type=int, default=8, help="front ends that the rows belong to")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--gc", choices=("frozen", "thawed", "off"), default="frozen")
    add_ablations(parser)
    options = parser.parse_args()
    results = []
    print("ceiling: the step that it hides behind, 0.7 ms and more on a GPU; target: 100 us and 2 us a row")
    for rows in map(int, options.rows.split(",")):
        result = measure(rows, options.clients, options.tokens, options.gc, not options.no_overlap)
        results.append(result)
        print(
            f"rows {rows:>4}  target {result['target_us']:>5.0f} us  "
            f"median {result['median_us']:>7.1f} us  p99 {result['p99_us']:>7.1f} us  max {result['max_us']:>7.1f} us  "
            f"gc {result['collections']:>3} times, {result['gc_us_per_tick']:>5.1f} us a tick, "
            f"{result['gc_max_us']:>7.1f} us at most",
            flush=True,
        )
    print(json.dumps({"benchmark": "tick", "gc": options.gc, "overlap": not options.no_overlap, "results": results}))


if __name__ == "__main__":
    main()
