"""Constrained rows on a GPU, through graphs: the same tokens as on a CPU, beside free rows. Device automata need no
grammar library; host matchers do, whose masks go up on the copy stream."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from harness import Bench, request

from photon_backend.protocol import GrammarSpec

COLORS = ["red", "green", "light blue", "gr\u00fcn"]
SCENE = {
    "type": "object",
    "properties": {"color": {"enum": COLORS}, "count": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec("choice", json.dumps(COLORS)),
    GrammarSpec("regex", r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    GrammarSpec("json_schema", json.dumps(SCENE)),
]
HOST = GrammarSpec("json_schema", json.dumps({"type": "object", "required": ["n"]}))  # any further member: no automaton
MIXED = [HOST, SPECS[2], HOST]


def told_by(checkpoint: Path, device: str, delay=None, specs=SPECS, strict=False, **settings) -> dict:
    """`strict`: torch raises at a call that waits for the device."""
    bench = Bench(checkpoint, delay=delay, device=device, **settings)
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        for i in range(18):
            submit, name = request(f"r{i}", checkpoint, i, **({"task": "query", "max_tokens": 40} if i % 2 else {}))
            bench.submit(msgspec.structs.replace(submit, grammar=specs[i % 3]) if i % 2 else submit, name)
            bench.tick()
        while bench.tick() or bench.engine.constraints.num_compiling:
            if bench.engine.constraints.num_compiling and not bench.engine.pipeline:
                bench.engine._idle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bench.engine.constraints.num_device == (9 if specs is SPECS else 3)
    assert bench.engine.stepper.tables.num_used == 0
    bench.assert_baseline()
    told = {key: answer.told for key, answer in bench.answers.items()}
    bench.close()
    return told


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> dict:
    return told_by(checkpoint, "cpu", overlap=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("debug", [True, False])
def test_constrained_tokens_equal_those_of_the_cpu(checkpoint, on_cpu, overlap, debug):
    assert told_by(checkpoint, "cuda", overlap=overlap, debug=debug) == on_cpu


@pytest.mark.parametrize("lag", ["compute", "copy"])
def test_late_tables_change_nothing(checkpoint, on_cpu, lag):
    def delay(stream: str) -> None:
        if stream == lag:
            torch.cuda._sleep(3_000_000)

    assert told_by(checkpoint, "cuda", delay, debug=False) == on_cpu


def test_constrained_rows_wait_for_nothing(checkpoint, on_cpu):
    assert told_by(checkpoint, "cuda", strict=True, debug=False) == on_cpu


@pytest.fixture(scope="module")
def mixed_on_cpu(checkpoint: Path) -> dict:
    pytest.importorskip("llguidance", reason="the grammar library is not installed")
    return told_by(checkpoint, "cpu", specs=MIXED, overlap=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("debug", [True, False])
def test_free_automaton_and_matcher_rows_equal_those_of_the_cpu(checkpoint, mixed_on_cpu, overlap, debug):
    assert told_by(checkpoint, "cuda", specs=MIXED, overlap=overlap, debug=debug) == mixed_on_cpu


@pytest.mark.parametrize("lag", ["neither", "compute", "copy"])
def test_late_masks_change_nothing_and_none_is_waited_for(checkpoint, mixed_on_cpu, lag):
    def delay(stream: str) -> None:
        if stream == lag:
            torch.cuda._sleep(3_000_000)

    told = told_by(checkpoint, "cuda", delay, MIXED, strict=True, debug=False)
    assert told == mixed_on_cpu
