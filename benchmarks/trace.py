"""The bubble, to be looked at: a trace of decode steps, blocking above pipelined.

    python -m benchmarks.trace [--device cpu|cuda] [--batch 4] [--random-weights] [--out out/trace]

Writes OUT.json (open it in Perfetto or chrome://tracing: a few hundred ticks, host and device lanes) and OUT.png, some
steps of both on one scale. White in the device lane of the picture is the device waiting for the host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import torch

from benchmarks.decode import Load, load_any, parser_of, settings_of
from photon_backend.engine.trace import Trace, chrome

matplotlib.use("Agg")
from matplotlib import pyplot

TICKS = 300
STEPS_SHOWN = 8
COLORS = {
    "decode": "#2a6f97",
    "prefill": "#9a6fb0",
    "ids": "#c9a227",
    "launch": "#3a7d44",
    "commit": "#bc4b51",
    "wait": "#f1e3d3",
}
LANES = ["copy", "device", "host"]  # from below


@torch.inference_mode()
def record(load: Load, batch: int) -> Trace:
    """Traces decode steps in the steady state."""
    load.submit(batch, TICKS + 20)
    for _ in range(10):
        load.engine.tick()
    trace = load.engine.trace = Trace(load.engine.stepper.compute)
    for _ in range(TICKS):
        load.engine.tick()
    load.engine.trace = None
    while load.engine.tick():
        pass
    return trace


def draw(traces: dict[str, Trace], path: Path) -> None:
    figure, axes = pyplot.subplots(len(traces), 1, figsize=(12, 2.2 * len(traces)), squeeze=False)
    windows = [_window(trace) for trace in traces.values()]
    width = max(end - begin for begin, end in windows)
    for axis, (title, trace), (begin, _) in zip(axes[:, 0], traces.items(), windows, strict=True):
        for span in sorted(trace.spans, key=lambda s: s.begin - s.end):  # a wait lies on top of its commit
            if begin <= span.end and span.begin <= begin + width and span.name in COLORS:
                place, shade = LANES.index(span.lane), COLORS[span.name]
                left, length = 1e3 * (span.begin - begin), 1e3 * (span.end - span.begin)
                axis.barh(place, length, left=left, height=0.8, color=shade, edgecolor="white", linewidth=0.3)
        axis.set(title=title, xlim=(0, 1e3 * width), yticks=range(len(LANES)), yticklabels=LANES)
    axes[-1, 0].set_xlabel("ms")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.tight_layout(rect=(0, 0, 0.9, 1))
    figure.legend(handles, list(COLORS), loc="center right")
    figure.savefig(path, dpi=120)


def _window(trace: Trace) -> tuple[float, float]:
    """From the middle of the trace, `STEPS_SHOWN` steps."""
    steps = [span for span in trace.spans if span.lane == "device"]
    shown = steps[len(steps) // 2 :][:STEPS_SHOWN]
    return shown[0].begin, shown[-1].end


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/trace"), help="both files, without their endings")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=160, help="positions before the first new token")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, batch = load_any(options), options.batch
    traces = {}
    for overlap in (False, True):
        load = Load(settings_of(options, batch, overlap), model, options.context)
        traces["pipelined" if overlap else "blocking"] = record(load, batch)
        load.close()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(chrome(traces)))
    draw(traces, options.out.with_suffix(".png"))
    print(f"{options.out}.json and {options.out}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
