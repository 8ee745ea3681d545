"""What constraints cost: free rows, rows with a device automaton, with a host matcher and rows that find objects, alone
and half and half.

    python -m benchmarks.constrained [--device cpu|cuda] [--batch 1,16,64] [--context N] [--tokens N] [--random-weights]
                                     [--kinds KIND,...]

The bundled model with its own vocabulary, or, with `--random-weights`, Moondream 2's shape and 51,200 made-up tokens:

    python -m benchmarks.constrained --device cuda --dtype bfloat16 --random-weights --context 736 --tokens 128

Every row writes records of a scene, one after another, and may not end before N tokens: as a regular expression (tables
on the device), as a JSON schema with records of the same form (host matcher), or without a grammar. Rows of `detect`
find box after box, those of `point` point after point, so that each step feeds a coordinate or a size and decodes the
next; such rows never draw, which `greedy`, free rows at temperature 0, do not either. N is rounded up to whole boxes
and points, for every kind. Prefill and compiling are left out. Free rows are the ceiling: the table gives each kind's
tokens/s as a ratio to the free rows of the same mode and batch. `depth` is the mean number of steps in flight when one
is launched, itself included: 1 when blocking, 2 with a full pipeline. `deferred` is the share of steps that were
sampled only after the commit before them, what a matcher costs the pipeline; the JSON has those that were launched
alone, by reason. Then, over the 51,200 tokens: times to compile, to fill masks on the host by the number of threads,
with and without a pause before it, and of mask and transition on the device. Without the package llguidance the rows
with a matcher are left out. The last line is JSON. On a shared CPU only the ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.checkpoints import made_up_tokenizer
from benchmarks.constraint_parts import measure_parts
from benchmarks.decode import Load, load_any, load_settings, parser_of
from benchmarks.garbage import frozen
from photon_backend.config import Settings
from photon_backend.model.config import ModelConfig
from photon_backend.model.moondream import Moondream
from photon_backend.protocol import Failed, FromEngine, GrammarSpec, Submit

RECORD = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue", "yellow"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 24},
    },
    "required": ["color", "count", "note"],
    "additionalProperties": False,
}
DEVICE = GrammarSpec(
    "regex", r'(\{"color":"(red|green|blue|yellow)","count":(0|[1-9][0-9]?),"note":"[a-z A-Z.,]{0,24}"\},)+'
)
HOST = GrammarSpec("json_schema", json.dumps({"type": "array", "items": RECORD, "minItems": 64}))
TOKENS_OF_BOX, TOKENS_OF_POINT = 3, 2  # x, y, size
WHOLE = TOKENS_OF_BOX * TOKENS_OF_POINT  # tokens of some boxes, or of some points
WARM_UP = 2 * WHOLE  # tokens
Kind = Callable[[Submit], Submit]  # changes a free request


def free(request: Submit) -> Submit:
    return request


def automaton(request: Submit) -> Submit:
    return msgspec.structs.replace(request, grammar=DEVICE)


def matcher(request: Submit) -> Submit:
    return msgspec.structs.replace(request, grammar=HOST)


def greedy(request: Submit) -> Submit:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, temperature=0.0))


def detect(request: Submit) -> Submit:
    """As many boxes as make the tokens of the others."""
    return msgspec.structs.replace(request, task="detect", max_objects=request.sampling.max_tokens // TOKENS_OF_BOX)


def point(request: Submit) -> Submit:
    return msgspec.structs.replace(request, task="point", max_objects=request.sampling.max_tokens // TOKENS_OF_POINT)


KINDS: dict[str, list[Kind]] = {  # dealt out to the rows in turn
    "free": [free],
    "greedy": [greedy],
    "automaton": [automaton],
    "matcher": [matcher],
    "detect": [detect],
    "point": [point],
    "free+automaton": [free, automaton],
    "free+matcher": [free, matcher],
    "free+detect": [free, detect],
}


class ConstrainedLoad(Load):
    """A `Load` whose rows are of some kind."""

    kind = "free"

    def submit(self, batch: int, tokens: int) -> None:
        post, kind = self.engine.post, KINDS[self.kind]
        row = iter(range(batch))

        def constrained(client: bytes, message: object, pixels: object = None) -> None:
            assert isinstance(message, Submit)
            post(client, kind[next(row) % len(kind)](message))

        self.engine.post = constrained  # type: ignore[method-assign]
        super().submit(batch, tokens)
        self.engine.post = post  # type: ignore[method-assign]

    def measure_kind(self, kind: str, batch: int, tokens: int) -> dict[str, float]:
        self.kind = kind
        before = self.engine.snapshot()
        result: dict = self.measure(batch, tokens)
        after = self.engine.snapshot()
        steps = after.steps - before.steps
        alone = {why: n - before.steps_alone.get(why, 0) for why, n in after.steps_alone.items()}
        deferred = (after.steps_deferred - before.steps_deferred) / steps
        return result | {"deferred": deferred, "depth": 2 - sum(alone.values()) / steps, "alone": alone}

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Failed):
                raise RuntimeError(f"a request failed: {message.message}")
        super()._emit(client, messages)

    def close(self) -> None:
        self.engine.constraints.close()
        super().close()


def kinds(wanted: list[str]) -> list[str]:
    """Those of them that can be had here."""
    if importlib.util.find_spec("llguidance") is not None:
        return wanted
    print("llguidance is not installed: rows with a host matcher are left out")
    return [name for name in wanted if matcher not in KINDS[name]]


def settings_for(options: argparse.Namespace, batch: int, overlap: bool) -> Settings:
    """Pages for these rows only: two engines share the memory, and the next batch size finds it free."""
    settings = load_settings(options, batch, overlap)
    per_row = -(-(options.context + options.tokens) // settings.page_size) + 1
    return msgspec.structs.replace(settings, pages=batch * per_row)


def measure_batch(options: argparse.Namespace, model: Moondream, batch: int) -> list[dict]:
    """Every kind in both modes; kinds and modes take turns, and the median run counts."""
    loads = {
        overlap: ConstrainedLoad(settings_for(options, batch, bool(overlap)), model, options.context)
        for overlap in ((0,) if options.no_overlap else (0, 1))
    }
    for kind, load in itertools.product(options.kinds, loads.values()):
        load.measure_kind(kind, batch, WARM_UP)  # and what is compiled is compiled
    runs: dict[tuple[str, int], list[dict]] = {}
    with frozen():
        for _, kind, overlap in itertools.product(range(options.repeat), options.kinds, loads):
            result = loads[overlap].measure_kind(kind, batch, options.tokens)
            runs.setdefault((kind, overlap), []).append(result)
    for load in loads.values():
        load.close()
    results = []
    for (kind, overlap), of_kind in runs.items():
        median = sorted(of_kind, key=lambda r: r["step_ms"])[options.repeat // 2]
        results.append({"batch": batch, "kind": kind, "overlap": bool(overlap)} | median)
    for result in results:
        free = next(r for r in results if r["kind"] == "free" and r["overlap"] == result["overlap"])
        result["of_free"] = result["tokens_per_s"] / free["tokens_per_s"]
    return results


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", default="1,16,64", help="rows, a comma between them")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="per row")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of rows, `free` among them")
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batch.split(",")]
    options.tokens += -options.tokens % WHOLE
    return options


def main() -> None:
    options = parse()
    options.kinds = kinds(options.kinds.split(","))
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        made_up = Path(directory)
        (made_up / "tokenizer.json").write_text(json.dumps(made_up_tokenizer(ModelConfig().text.vocab_size)))
        name = "moondream2, random" if options.random_weights else Path(options.checkpoint).name
        model = load_any(options)
        if options.random_weights:
            options.checkpoint = directory
        document: dict = {"benchmark": "constrained", "device": options.device, "model": name}
        document["results"] = measure_all(options, model)
        device, matchers = torch.device(options.device), "matcher" in options.kinds
        document |= measure_parts(device, options.batches, made_up, matchers)
    print(json.dumps(document))


def measure_all(options: argparse.Namespace, model: Moondream) -> list[dict]:
    print("batch           kind       mode  step ms  tokens/s of free deferred depth  host ms")
    results = []
    for batch in options.batches:
        for r in measure_batch(options, model, batch):
            mode = "pipelined" if r["overlap"] else "blocking"
            print(
                f"{batch:>5} {r['kind']:>14} {mode:>10} {r['step_ms']:>8.3f} {r['tokens_per_s']:>9.0f}"
                f" {r['of_free']:>7.2f} {r['deferred']:>8.0%} {r['depth']:>5.2f} {r['host_ms']:>8.3f}",
                flush=True,
            )
            results.append(r)
    return results


if __name__ == "__main__":
    main()
