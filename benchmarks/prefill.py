"""Encoding the crops of pictures, eager against CUDA graphs, and the launches of a whole prefill step.

    python -m benchmarks.prefill [--device cpu|cuda] [--dtype float32|bfloat16] [--random-weights] [--repeat N]
    python -m benchmarks.prefill --launches

For each number of crops that a picture can have: milliseconds from the first copy to the last kernel (CUDA events, so
what the GPU waits for between launches counts; wall time on a CPU), and host milliseconds until the call returns, when
the engine thread can do something else. Both include the copy of the pixels from ordinary memory, which the two ways
do differently; merging and projection, eager in both, are left out. Eager is torch's encoder, also where an engine
without graphs has its own kernel for sums and norms (fused_vision.py). The ceiling is the arithmetic of the encoder at
the rate that torch reaches on one H200. On a CPU there is only the eager half. The last line is JSON.

`--launches` counts instead: torch operations that would launch something on a GPU, and our kernels, on a CPU in
bfloat16, with Moondream 2's layers and positions and a small width, on which no count depends. A copy to the device is
one, and so is a replay: kernels and graphs are counted as if they were there. What an operation launches inside is not
seen, and some are too many: a copy of row numbers between two buffers of the host, and without graphs the GELUs of the
encoder, which a GPU has inside a product. With graphs one is missing for each piece, a copy from its staging buffer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ceilings import tflop_per_crop
from benchmarks.decode import load_any, parser_of
from photon_backend.engine import fused, fused_vision
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.prefill_graphs import PrefillGraphs
from photon_backend.engine.runner import PrefillRow, Runner
from photon_backend.engine.slots import DecodeSlot
from photon_backend.engine.vision_graphs import LEAST, PictureEncoder
from photon_backend.model.config import ModelConfig, RegionConfig, TextConfig, VisionConfig
from photon_backend.model.weights import random_model

WIDTH, HEADS = 32, 2  # of the model whose launches are counted
PAGE = 16
TFLOPS = 450.0  # what eager torch reaches on one H200, measured
NINE = (2, 4)  # tiles of a picture of 850 x 600, 9 crops with the global one
BATCHES = {
    "one picture of 9 crops": [(NINE, False)],
    "4 pictures of 9 crops": [(NINE, False)] * 4,
    "one with a cached prefix": [(NINE, True)],
    "4 with cached prefixes": [(NINE, True)] * 4,
}


class Launches(TorchDispatchMode):
    """Counts operations by name, but for those that only look at a tensor in another way or make room for one."""

    QUIET = ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.QUIET:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counted_as(self, name: str) -> Iterator[None]:
        """What happens inside counts as one launch."""
        before = self.counts.copy()
        yield
        self.counts = before + Counter({name: 1})


def row_of(number: int, config: ModelConfig, tiling: tuple[int, int], cached: bool) -> PrefillRow:
    """A question of 12 tokens about a picture, whose prefix is in the pages already if it is `cached`."""
    side, crops = config.vision.crop_size, 1 + tiling[0] * tiling[1]
    num_pages = -(-(config.prefix_len + 12) // PAGE)
    return PrefillRow(
        row=number, pages=list(range(number * num_pages, (number + 1) * num_pages)),
        cached_len=config.prefix_len if cached else 0, prefix_len=config.prefix_len, prompt_ids=[7] * 12,
        coords=[], sizes=[], pixels=None if cached else np.zeros((crops, side, side, 3), np.uint8), tiling=tiling,
        load_tail=None, save_tail=None, state=0, think_until=0, temperature=0.0, top_p=1.0, top_k=0, seed=0,
        automaton=(0, 0, 1),
    )  # fmt: skip


class Counted:
    """A runner on a CPU, with Moondream 2's layers, whose prefill steps are counted. Its kernels compute nothing."""

    KERNELS = ("add_norm", "linear", "spread", "attend")  # as `fused` calls them

    def __init__(self) -> None:
        self.config = config = ModelConfig(
            TextConfig(dim=WIDTH, ff_dim=WIDTH, n_heads=HEADS, n_kv_heads=HEADS, vocab_size=512),
            VisionConfig(enc_dim=WIDTH, enc_ff_dim=WIDTH, enc_n_heads=HEADS, proj_out_dim=WIDTH, proj_inner_dim=WIDTH),
            RegionConfig(dim=WIDTH, inner_dim=WIDTH),
        )
        cpu, dtype = torch.device("cpu"), torch.bfloat16
        model = random_model(config, "cpu", dtype, seed=0).requires_grad_(False)
        cache = KVCache(config.text, 256, PAGE, cpu, dtype)
        self.runner = runner = Runner(model, cache, 4, debug=False)
        self.slot = DecodeSlot(config, 4, cpu, dtype)
        self.mode = Launches()
        runner._fused = fused.FusedText(model.text, cache)
        runner._prefill = runner._prefill_fused
        runner._encode_crops = partial(fused_vision.encode_crops, model.vision)
        for module, name in [(fused_vision, "add_norm"), *((fused, name) for name in self.KERNELS)]:
            setattr(module, name, self._as_one(name, lambda *args, **kwargs: None))
        encoder, short = PictureEncoder(model.vision), PrefillGraphs(runner._fused, runner.rows.page_table, 4)
        encoder.run = self._as_one("replay", encoder.run)  # type: ignore[method-assign]
        short.run = self._as_one("replay", short.run)  # type: ignore[method-assign]
        runner._upload = self._as_one("to the device", runner._upload)  # type: ignore[method-assign]
        self._ways = {False: (runner._encode_pictures, None), True: (encoder.encode, short)}

    def _as_one(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same, counted as one launch of that name."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.mode.counted_as(name):
                return work(*args, **kwargs)

        return counted

    def launches(self, batch: list[tuple[tuple[int, int], bool]], graphs: bool) -> Counter[str]:
        """Of a step with such (tiling, cached), by operation."""
        self.mode = Launches()
        self.slot.loaded = []  # its rows go up anew
        self.runner._encode_pictures, self.runner._short = self._ways[graphs]
        with torch.no_grad(), self.mode:  # in inference mode a linear would not come apart
            self.runner.prefill(self.slot, [row_of(i, self.config, *of) for i, of in enumerate(batch)])
        return self.mode.counts


def count_launches() -> list[dict[str, object]]:
    counted, results = Counted(), []
    for what, batch in BATCHES.items():
        for graphs in (False, True):
            launches = counted.launches(batch, graphs)
            name = "graphs" if graphs else "eager"
            print(f"{what:<32} {name:>6} {launches.total():>5} launches", flush=True)
            results.append({"batch": what, "graphs": graphs, "launches": launches.total(), "by_name": launches})
    return results


def measure(work: Callable[[], object], on_gpu: bool, repeat: int) -> tuple[float, float]:
    """Median milliseconds of (the device, the host until the call returns); the device rests before each call."""
    work()
    device, host = [], []
    for _ in range(repeat):
        if on_gpu:
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        started = time.perf_counter()
        work()
        host.append(1e3 * (time.perf_counter() - started))
        if on_gpu:
            end.record()
            end.synchronize()
            device.append(begin.elapsed_time(end))
    return median(device or host), median(host)


@torch.inference_mode()
def measure_encoding(options: argparse.Namespace) -> list[dict[str, object]]:
    """Each number of crops, eager and, on a GPU, through graphs."""
    vision, on_gpu = load_any(options).vision, options.device != "cpu"
    side, channels = vision.config.crop_size, vision.config.in_channels
    encoder = PictureEncoder(vision)
    if fused_vision.supports(vision) and not options.no_kernels:
        encoder = PictureEncoder(vision, partial(fused_vision.encode_crops, vision))
    tflop = tflop_per_crop(vision.config)
    print(f"ceiling: {tflop:.3g} TFLOP a crop, {1e3 * tflop / TFLOPS:.3g} ms of one H200 at {TFLOPS:.0f} TFLOP/s")
    graphed = on_gpu and not options.no_graphs
    if graphed:
        begun = time.perf_counter()
        encoder.capture()
        print(f"graphs captured in {time.perf_counter() - begun:.1f} s")
    print("crops     way  device ms    host ms  TFLOP/s")
    results: list[dict[str, object]] = []
    for count in range(1, encoder.most + 1):
        pixels = np.random.RandomState(count).randint(0, 256, (count, side, side, channels), np.uint8)

        def eager(pixels: np.ndarray = pixels) -> torch.Tensor:
            host = torch.from_numpy(np.concatenate([pixels]))
            return vision.encode_crops(host.pin_memory().to(options.device, non_blocking=True) if on_gpu else host)

        def graphs(pixels: np.ndarray = pixels) -> None:
            encoder.run(encoder.load([pixels]))

        ways: dict[str, Callable[[], object]] = {"eager": eager}
        if graphed and count >= LEAST:
            ways["graphs"] = graphs
        for name, work in ways.items():
            device, host = measure(work, on_gpu, options.repeat)
            rate = 1e3 * tflop * count / device
            print(f"{count:>5} {name:>7} {device:>10.3f} {host:>10.3f} {rate:>8.3g}", flush=True)
            results.append({"crops": count, "way": name, "device_ms": device, "host_ms": host, "tflop_per_s": rate})
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--repeat", type=int, default=7, help="runs, of which the median counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = count_launches() if options.launches else measure_encoding(options)
    print(json.dumps({"benchmark": "prefill", "device": options.device, "results": results}))


if __name__ == "__main__":
    main()
