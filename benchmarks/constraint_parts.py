"""What the parts of a constraint cost, over 51,200 made-up tokens: the second half of benchmarks/constrained.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from photon_backend.engine.sampler import apply_bitmask
from photon_backend.engine.tables import AutomatonTables, RowAutomata
from photon_backend.grammar.automaton import compile_automaton
from photon_backend.grammar.constraint import fill_lines
from photon_backend.grammar.matcher import Prototypes, Vocabulary
from photon_backend.grammar.spelling import Spelling, read_spelling
from photon_backend.model.config import ModelConfig
from photon_backend.protocol import GrammarSpec

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
ANSWER = '{"color":"red","kind":"star","count":12,"sure":true,"note":"behind the tree"}'  # of the five-field JSON
THREADS: list[int | None] = [1, 2, 4, 8, None, 0]
PAUSE_S = 1.5e-3
FILLS = 41  # of which the median counts


def compile_times(spelling: Spelling, vocabulary: Vocabulary | None) -> list[dict]:
    """To tables, and, with the library, to a matcher."""
    results = []
    for name, spec in COMPILED.items():
        ms, automaton = timed_ms(lambda: compile_automaton(spec, spelling, 1 << 24))  # noqa: B023
        states, classes = automaton.next_state.shape
        result = {"grammar": name, "ms": ms, "states": states, "classes": classes}
        result["megabytes"] = automaton.num_words * 4 / 1e6
        text = f"{name:>20} {ms:8.1f} ms {states:6} states {classes:6} classes {result['megabytes']:8.2f} MB"
        if vocabulary is not None:
            result["matcher_ms"], _ = timed_ms(lambda: Prototypes(spec, vocabulary))  # noqa: B023
            text += f"   matcher {result['matcher_ms']:6.1f} ms"
        print(text, flush=True)
        results.append(result)
    return results


def timed_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return 1e3 * (time.perf_counter() - begin), result


def fill_times(vocabulary: Vocabulary, batches: list[int]) -> list[dict]:
    """Microseconds of the host to fill the masks of B matchers, each somewhere in an answer, by so many threads of the
    library (None: its default, four fifths of the cores) and, 0, one after the other on the calling thread.

    Tight: as soon as the last fill is done, when the library's threads are still awake. Paused: `PAUSE_S` later, about
    a forward, when they have gone to sleep; that is what an engine sees.
    """
    results = []
    print(f"{'filling masks, us':<20}" + "".join(f"{f'B={batch} tight':>14}{'paused':>9}" for batch in batches))
    for threads in THREADS:
        line = "one after the other" if threads == 0 else f"{threads or 'default'} threads"
        line = f"{line:<20}"
        for batch in batches:
            fill = filler(vocabulary, batch, threads)
            tight, paused = median_us(fill, 0.0), median_us(fill, PAUSE_S)
            line += f"{tight:>14.1f}{paused:>9.1f}"
            results.append({"threads": threads, "batch": batch, "fill_us": tight, "paused_us": paused})
        print(line, flush=True)
    return results


def filler(vocabulary: Vocabulary, batch: int, threads: int | None) -> Callable[[], None]:
    """The i-th matcher has taken i tokens of an answer."""
    from llguidance import LLExecutor  # not everywhere

    prototypes, answer = Prototypes(COMPILED["five-field JSON"], vocabulary), vocabulary.tokens.tokenize_str(ANSWER)
    mask = np.zeros((batch, len(vocabulary.ordinary)), np.int32)
    pairs = [(prototypes.matcher(), i) for i in range(batch)]
    for matcher, i in pairs:
        for token in answer[: i % len(answer)]:
            matcher.advance(token)
        matcher.fill(mask[i])
        assert not matcher.failure

    def one_after_the_other() -> None:
        for matcher, i in pairs:
            matcher.fill(mask[i])

    if threads == 0:
        return one_after_the_other
    vocabulary.executor = LLExecutor(num_threads=threads)
    return lambda: fill_lines(pairs, mask)


def median_us(work: Callable[[], None], pause_s: float) -> float:
    times = []
    for _ in range(FILLS):
        time.sleep(pause_s)
        times.append(1e3 * timed_ms(work)[0])
    return sorted(times)[FILLS // 2]


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


def kernel_times(batches: list[int]) -> list[dict]:
    """Microseconds of the one kernel that masks, draws and moves on, by what it masks with. On a GPU."""
    from benchmarks.kernels import LAUNCHES, graph_us, sampler  # Triton's kernel language, which a CPU may not have

    results = []
    for batch in batches:
        result: dict = {"batch": batch}
        for name, changes in (("free", {}), ("automaton", {"automaton": True}), ("masked", {"masked": True})):
            work, _ = sampler(ModelConfig(), batch, in_torch=False, **changes)
            result[f"{name}_us"] = graph_us(work, LAUNCHES)
        print(f"B={batch:<4} sampling kernel, " + ", ".join(f"{k} {v:.1f}" for k, v in result.items() if k != "batch"))
        results.append(result)
    return results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_parts(device: torch.device, batches: list[int], made_up: Path, matchers: bool) -> dict:
    """Every table of this module, for the JSON document. `matchers`: the package llguidance is there."""
    spelling = read_spelling(made_up, ModelConfig())
    assert spelling is not None
    vocabulary = Vocabulary(made_up, ModelConfig()) if matchers else None
    parts: dict = {"compile": compile_times(spelling, vocabulary), "tables": table_times(spelling, batches, device)}
    if vocabulary is not None:
        parts["fill"] = fill_times(vocabulary, batches)
    if device.type == "cuda":
        parts["kernel"] = kernel_times(batches)
    return parts
