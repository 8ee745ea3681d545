"""Graphs of short prefills on a GPU: what the same steps give without graphs, whatever stream is late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Bench, request
from msgspec.structs import replace
from test_prefill_kernel import distance, row_of
from tiny_checkpoint import CONFIG, PICTURES

from photon_backend.engine.capture import can_capture
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.prefill_graphs import BUCKETS, PrefillGraphs
from photon_backend.engine.runner import PrefillRow, Runner
from photon_backend.engine.slots import DecodeSlot
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.model.weights import random_model

EDGES = (1, 15, 16, 17, 255, 256, 257, 512, 513, 1536, 1537, 2048, 2049)
MOST = 300  # tokens of one sequence, all of whose pages a row has
CYCLES = 3_000_000  # about 1.5 ms
PREFIX, PAGE, ROWS = 37, 16, 6
PAGES = 24  # of a row
# wide enough that a row of few has more threads than one of many: two kernels
TEXT = TextConfig(dim=512, ff_dim=768, n_layers=3, n_heads=8, n_kv_heads=4, vocab_size=384, max_context=PAGES * PAGE)
Told = list[torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def capturing() -> None:
    """As `captures`, and before any other fixture of this module captures something."""
    if not can_capture():
        pytest.skip("this allocator cannot capture")


class Machine:
    """A runner with graphs of short prefills and without those of anything else, and both slots."""

    def __init__(self) -> None:
        config = ModelConfig(TEXT, CONFIG.vision, replace(CONFIG.region, dim=TEXT.dim), CONFIG.tokenizer)
        device, dtype = torch.device("cuda"), torch.bfloat16
        model = random_model(config, "cuda", dtype, seed=0).requires_grad_(False)
        self.cache = KVCache(config.text, ROWS * PAGES, PAGE, device, dtype)
        self.runner = Runner(model, self.cache, ROWS, debug=False)
        self.slots = [DecodeSlot(config, ROWS, device, dtype) for _ in range(2)]
        with torch.inference_mode():
            self.runner.compile_prefill(self.slots[0])
        self.runner.use_prefill_graphs()
        short = self.runner._short
        assert short is not None and sorted(short._graphs) == list(BUCKETS)
        self.ways = {
            "captured": short,
            "padded": PrefillGraphs(short._fused, self.runner.rows.page_table, self.runner.scratch),
            "eager": None,
        }
        torch.cuda.synchronize()

    def batch(self, *sequences: tuple[int, int, int]) -> list[PrefillRow]:
        """Each cached, prefix, length; with pages of its own."""
        return [row_of(row, *s, list(range(row * PAGES, (row + 1) * PAGES))) for row, s in enumerate(sequences)]

    def hit(self, tokens: int) -> list[PrefillRow]:
        return self.batch((PREFIX, PREFIX, PREFIX + tokens))

    def text(self, tokens: int) -> list[PrefillRow]:
        return self.batch((0, 0, tokens))

    def several(self, tokens: int) -> list[PrefillRow]:
        """As many as there are rows, or tokens; with prefix and without by turns."""
        number = min(ROWS, tokens)
        shares = [tokens // number + (i < tokens % number) for i in range(number)]
        begins = [PREFIX * (i % 2) for i in range(number)]
        return self.batch(*((begin, begin, begin + share) for begin, share in zip(begins, shares, strict=True)))

    @torch.inference_mode()
    def run(self, way: str, batches: list[list[PrefillRow]]) -> Told:
        """Hidden state and logits of each step and all pages but the scratch page. Steps take turns in the slots, and
        the device begins late."""
        self.runner._short = self.ways[way]
        chance = torch.Generator("cuda").manual_seed(1)
        for pages in (self.cache.k, self.cache.v):
            pages.normal_(generator=chance)
        told: Told = []
        torch.cuda._sleep(20 * CYCLES)
        for i, batch in enumerate(batches):
            slot = self.slots[i % 2]
            self.runner.prefill(slot, batch)
            told += [slot.hidden[: len(batch)].clone(), slot.logits[: len(batch)].clone()]
            for size in (1 << bits for bits in range(7, 15)):  # of pinned memory that was given away too early
                torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(255)
        told += [pages[:, :-1].clone() for pages in (self.cache.k, self.cache.v)]
        torch.cuda.synchronize()
        return told


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    yield Machine()


@pytest.mark.parametrize("tokens", EDGES)
def test_a_replay_is_the_same_step(machine, tokens):
    """In both slots one after another, and each graph finds what others left. To the bit as the padded step without
    graphs, whose kernels are the same; as the step without padding but for roundings of other shapes."""
    alone = min(tokens, MOST)
    batches = [machine.hit(alone), machine.text(alone), machine.hit(3), machine.several(tokens), machine.text(alone)]
    captured, padded, eager = (machine.run(way, batches) for way in ("captured", "padded", "eager"))
    for ours, same, other in zip(captured, padded, eager, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, same)
        assert distance(ours, other) < 0.03


def test_each_bucket_is_replayed_and_a_longer_step_is_not(machine, monkeypatch):
    short, replayed = machine.ways["captured"], []
    run = short.run
    monkeypatch.setattr(short, "run", lambda bucket: (replayed.append(bucket), run(bucket))[1])
    monkeypatch.setattr(short, "_layers", None)  # nothing is computed without a graph
    machine.run("captured", [machine.several(tokens) for tokens in EDGES])
    assert replayed == [16, 16, 16, 32, 256, 256, 384, 512, 768, 1536, 2048, 2048]


def test_a_prefill_compiles_nothing(machine, monkeypatch):
    """Neither a replay nor what is too long for one: all of it was compiled at start."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **of_kernel: compiled.append(of_kernel["repr"])
    )
    machine.run("captured", [machine.several(tokens) for tokens in (1, 2, 3, 4, 5, 16, 40, 256, 257, 300, 999, 2060)])
    assert compiled == []


# ---- the engine

NUMBER = 24


def bench_on(checkpoint: Path, captured: bool = True, **settings) -> Bench:
    """In bfloat16, for which there are kernels. What a step takes must not decide what is in the next: another batch
    rounds elsewhere."""
    bench = Bench(checkpoint, device="cuda", dtype="bfloat16", debug=False, max_decode_gap_ms=1e9, **settings)
    short = bench.engine.stepper.runner._short
    assert short is not None and len(short._graphs) == len(BUCKETS)
    if not captured:
        short._graphs.clear()
    return bench


def ask(bench: Bench, checkpoint: Path) -> dict:
    """Questions about two pictures, cached from the second one on, and about none; one token of two in three."""
    for i in range(NUMBER):
        name = ["none", *sorted(PICTURES)[:2]][i % 3]
        changes = {"task": "query"} if name == "none" else {}
        length = {"max_tokens": 1} if i % 4 else {}
        bench.submit(*request(f"r{i}", checkpoint, i, picture=name, **changes, **length))
    told = {key: answer.told for key, answer in bench.drain().items()}
    bench.assert_baseline()
    return told


@pytest.fixture(scope="module")
def without_graphs(checkpoint: Path) -> dict:
    bench = bench_on(checkpoint, captured=False)
    told = ask(bench, checkpoint)
    bench.close()
    return told


@pytest.mark.parametrize("lag", ["neither", "compute", "copy"])
def test_hits_and_texts_through_both_slots(checkpoint, without_graphs, lag):
    def delay(stream: str) -> None:
        if stream == lag:
            torch.cuda._sleep(CYCLES)

    bench = bench_on(checkpoint, delay=delay)
    assert ask(bench, checkpoint) == without_graphs
    bench.close()


def test_a_tick_with_short_prefills_waits_for_nothing(checkpoint, without_graphs):
    """torch raises at a call that waits, and then the step ends INTERNAL."""
    bench = bench_on(checkpoint)
    torch.cuda.set_sync_debug_mode("error")
    try:
        told = ask(bench, checkpoint)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        bench.close()
    assert told == without_graphs


def test_debug_no_graphs_and_no_kernels_do_without(checkpoint):
    for settings in ({"debug": True}, {"debug": False, "graphs": False}, {"debug": False, "kernels": False}):
        bench = Bench(checkpoint, device="cuda", dtype="bfloat16", **settings)
        assert bench.engine.stepper.runner._short is None
        bench.close()
