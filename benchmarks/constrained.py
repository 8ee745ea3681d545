"""What constraints cost: free rows, rows with a device automaton and rows with a host matcher, alone and half and half.

    python -m benchmarks.constrained [--device cpu|cuda] [--batch 1,16,64] [--context N] [--tokens N] [--random-weights]

Every row writes records of a scene, one after another, and may not end before N tokens: as a regular expression (tables
on the device), as a JSON schema with records of the same form (host matcher), or without a grammar. Prefill and
compiling are left out. Free rows are the ceiling: the table gives each kind's tokens/s as a ratio to the free rows of
the same mode and batch, and `deferred`, the share of steps that were sampled only after the commit before them: what a
matcher costs the pipeline. Then: compile times over a vocabulary of 51,200 made-up tokens, and the time of mask,
apply and transition. The last line is JSON. On a shared CPU only the ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.decode import Load, settings_of
from photon_backend.config import TINY_CHECKPOINT
from photon_backend.engine.sampler import apply_bitmask
from photon_backend.engine.tables import AutomatonTables, RowAutomata
from photon_backend.grammar.automaton import compile_automaton
from photon_backend.grammar.spelling import Spelling
from photon_backend.model.config import load_config
from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import load_model, random_model
from photon_backend.protocol import GrammarSpec, Submit

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
KINDS: dict[str, list[GrammarSpec | None]] = {  # dealt out to the rows in turn
    "free": [None],
    "automaton": [DEVICE],
    "matcher": [HOST],
    "free+automaton": [None, DEVICE],
    "free+matcher": [None, HOST],
}
FIVE_FIELDS = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "kind": {"enum": ["circle", "square", "star"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "sure": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 20},
    },
    "required": ["color", "kind", "count", "sure", "note"],
    "additionalProperties": False,
}
COMPILED = {
    "choice of 20 labels": GrammarSpec("choice", json.dumps([f"label {i} of {i * 37}" for i in range(20)])),
    "ISO date": GrammarSpec("regex", r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    "five-field JSON": GrammarSpec("json_schema", json.dumps(FIVE_FIELDS)),
    "string of 100": GrammarSpec("json_schema", '{"type":"string","maxLength":100}'),
}


class ConstrainedLoad(Load):
    """A `Load` whose rows have grammars."""

    kind = "free"

    def submit(self, batch: int, tokens: int) -> None:
        post, specs = self.engine.post, KINDS[self.kind]
        row = iter(range(batch))

        def constrained(client: bytes, message: object, pixels: object = None) -> None:
            assert isinstance(message, Submit)
            post(client, msgspec.structs.replace(message, grammar=specs[next(row) % len(specs)]))

        self.engine.post = constrained  # type: ignore[method-assign]
        super().submit(batch, tokens)
        self.engine.post = post  # type: ignore[method-assign]

    def measure_kind(self, kind: str, batch: int, tokens: int) -> dict[str, float]:
        self.kind = kind
        before = self.engine.status()
        result = self.measure(batch, tokens)
        after = self.engine.status()
        return result | {"deferred": (after.steps_deferred - before.steps_deferred) / (after.steps - before.steps)}


def measure_batch(options: argparse.Namespace, model: Moondream, batch: int) -> list[dict]:
    """Every kind in both modes; kinds and modes take turns, and the median run counts."""
    loads = {
        overlap: ConstrainedLoad(settings_of(options, batch, overlap), model, options.context) for overlap in (0, 1)
    }
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(options.repeat + 1):
        for kind in KINDS:
            for overlap, load in loads.items():
                result = load.measure_kind(kind, batch, options.tokens if turn else 8)
                if turn:  # the first one warms up and compiles
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


def made_up_vocabulary(size: int) -> Spelling:
    """Every byte, then made-up words of a length like that of real ones."""
    chance = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = {bytes([byte]) for byte in range(256)}
    while len(words) < size - 32:
        word = "".join(chance.choices(letters, range(26, 0, -1), k=chance.choice([2, 3, 4, 5, 6, 7, 8, 10])))
        words.add(chance.choice([" ", "", ""]).encode() + chance.choice([word, word.capitalize()]).encode())
    ordered = [b""] * 32 + sorted(words)
    table = np.zeros((size, max(map(len, ordered))), np.uint8)
    for token, word in enumerate(ordered):
        table[token, : len(word)] = np.frombuffer(word, np.uint8)
    return Spelling(table, np.array([len(word) for word in ordered]), eos_id=0)


def compile_times(spelling: Spelling) -> list[dict]:
    results = []
    for name, spec in COMPILED.items():
        begin = time.perf_counter()
        automaton = compile_automaton(spec, spelling, 1 << 24)
        ms = 1e3 * (time.perf_counter() - begin)
        states, kinds = automaton.next_state.shape
        megabytes = automaton.num_words * 4 / 1e6
        results.append({"grammar": name, "ms": ms, "states": states, "classes": kinds, "megabytes": megabytes})
        print(f"{name:>20} {ms:8.1f} ms {states:6} states {kinds:6} classes {megabytes:8.2f} MB", flush=True)
    return results


def table_times(spelling: Spelling, batches: list[int], device: torch.device) -> list[dict]:
    """Microseconds of masks, apply and transition in plain torch, for B rows and a vocabulary of 51,200."""
    size = len(spelling.lengths)
    tables = AutomatonTables(size, 64, device)
    placed = tables.place(compile_automaton(COMPILED["five-field JSON"], spelling, tables.max_words))
    assert placed is not None
    block = placed[0]
    tables.write(block.base, tables.host_words(block.automaton))
    results = []
    for batch in batches:
        rows, row = RowAutomata(tables, batch), torch.arange(batch, device=device)
        rows.start(row, torch.tensor([block.row_values] * batch, device=device))
        logits = torch.zeros(batch, size, device=device)
        bound, ids = torch.ones(batch, dtype=torch.bool, device=device), torch.full((batch,), 40, device=device)
        parts = {
            "mask_us": lambda: apply_bitmask(logits, rows.masks(row, bound, size)),  # noqa: B023
            "transition_us": lambda: rows.advance(row, bound, ids),  # noqa: B023
        }
        result: dict = {"batch": batch}
        for name, work in parts.items():
            for _ in range(3):
                work()
            _wait(device)
            begin = time.perf_counter()
            for _ in range(20):
                work()
            _wait(device)
            result[name] = 1e6 * (time.perf_counter() - begin) / 20
        print(f"B={batch:<4} mask and apply {result['mask_us']:9.1f} us   transition {result['transition_us']:7.1f} us")
        results.append(result)
    return results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(TINY_CHECKPOINT))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", default="1,16,64", help="rows, a comma between them")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="per row")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU; one leaves a core to the host side")
    parser.add_argument("--random-weights", action="store_true", help="the shape of the checkpoint is enough")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-kernels", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches = [int(batch) for batch in options.batch.split(",")]
    model = make_model(options, device, dtype)
    print("batch           kind       mode  step ms  tokens/s of free deferred  host ms")
    results = []
    for batch in batches:
        for r in measure_batch(options, model, batch):
            mode = "pipelined" if r["overlap"] else "blocking"
            print(
                f"{batch:>5} {r['kind']:>14} {mode:>10} {r['step_ms']:>8.3f} {r['tokens_per_s']:>9.0f}"
                f" {r['of_free']:>7.2f} {r['deferred']:>8.0%} {r['host_ms']:>8.3f}",
                flush=True,
            )
            results.append(r)
    spelling = made_up_vocabulary(51_200)
    compiled, tables = compile_times(spelling), table_times(spelling, batches, device)
    name = Path(options.checkpoint).name
    document = {"benchmark": "constrained", "device": options.device, "model": name, "results": results}
    print(json.dumps(document | {"compile": compiled, "tables": tables}))


def make_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Moondream:
    if not options.random_weights:
        return load_model(Path(options.checkpoint), device, dtype)
    return random_model(load_config(Path(options.checkpoint)), device, dtype, seed=0)


if __name__ == "__main__":
    main()
