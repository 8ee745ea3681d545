"""The bubble, to be looked at: a trace of decode steps, blocking above pipelined.

    python -m benchmarks.trace [--device cpu|cuda] [--batch 4] [--random-weights] [--out out/trace]

Writes OUT.json (open it in Perfetto or chrome://tracing: a few hundred ticks, host and device lanes) and OUT.png, some
steps of both on one scale. White in the device lane of the picture is the device waiting for the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import torch

from benchmarks.decode import Load, load_any, load_settings, parser_of
from photon_backend.engine.trace import DEVICE_LANES, HOST_LANES, chrome
from photon_backend.model.moondream import Moondream
from photon_backend.protocol import Span

matplotlib.use("Agg")
from matplotlib import pyplot

TICKS = 300
STEPS_SHOWN = 8
COLORS = {
    "forward": "#2a6f97",
    "prefill": "#9a6fb0",
    "sampling": "#61a5c2",
    "copy": "#c9a227",
    "launch": "#3a7d44",
    "commit": "#bc4b51",
    "wait": "#f1e3d3",
}
PLACES = {"copy": 0} | dict.fromkeys(DEVICE_LANES[:3], 1) | dict.fromkeys(HOST_LANES, 2)  # from below
PLACE_NAMES = ["copy", "device", "host"]


def trace_modes(options: argparse.Namespace, model: Moondream, batch: int, out: Path) -> None:
    """Records both modes, one after the other, and writes OUT.json and OUT.png."""
    recordings = {}
    for overlap in (False, True):
        load = Load(load_settings(options, batch, overlap), model, options.context)
        recordings["pipelined" if overlap else "blocking"] = record(load, batch)
        load.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(chrome(recordings)))
    draw(recordings, out.with_suffix(".png"))
    print(f"{out}.json and {out}.png")


@torch.inference_mode()
def record(load: Load, batch: int) -> list[Span]:
    """The spans of decode steps in the steady state."""
    load.engine.stepper.compute.adopt()  # as the engine's own thread does
    load.submit(batch, TICKS + 20)
    for _ in range(10):
        load.engine.tick()
    load.engine.trace.start()
    for _ in range(TICKS):
        load.engine.tick()
    spans = load.engine.trace.stop()
    while load.engine.tick():
        pass
    return spans


def draw(recordings: dict[str, list[Span]], path: Path) -> None:
    figure, axes = pyplot.subplots(len(recordings), 1, figsize=(12, 2.2 * len(recordings)), squeeze=False)
    windows = [_window(spans) for spans in recordings.values()]
    width, drawn = max(end - begin for begin, end in windows), set()
    for axis, (title, spans), (begin, _) in zip(axes[:, 0], recordings.items(), windows, strict=True):
        for span in sorted(spans, key=lambda s: s.begin - s.end):  # a wait lies on top of its commit
            if begin <= span.end and span.begin <= begin + width and span.lane in COLORS:
                place, shade = PLACES[span.lane], COLORS[span.lane]
                left, length = 1e3 * (span.begin - begin), 1e3 * (span.end - span.begin)
                drawn.add(span.lane)
                edge = "white" if place else shade  # a copy is no wider than its edge
                axis.barh(place, length, left=left, height=0.8, color=shade, edgecolor=edge, linewidth=0.3)
        axis.set(title=title, xlim=(0, 1e3 * width), yticks=range(len(PLACE_NAMES)), yticklabels=PLACE_NAMES)
    axes[-1, 0].set_xlabel("ms")
    named = [lane for lane in COLORS if lane in drawn]
    figure.tight_layout(rect=(0, 0, 0.9, 1))
    figure.legend([pyplot.Rectangle((0, 0), 1, 1, color=COLORS[lane]) for lane in named], named, loc="center right")
    figure.savefig(path, dpi=120)


def _window(spans: list[Span]) -> tuple[float, float]:
    """From the middle of the recording, `STEPS_SHOWN` steps."""
    steps = sorted((span for span in spans if span.lane == "forward"), key=lambda span: span.begin)
    shown = steps[len(steps) // 2 :][:STEPS_SHOWN]
    return shown[0].begin, shown[-1].end


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/trace"), help="both files, without their endings")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=160, help="positions before the first new token")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trace_modes(options, load_any(options), options.batch, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
