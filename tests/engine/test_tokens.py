"""The engine's tokens against the slow oracle, and against itself: overlap, batch, cache and delays change nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from harness import Bench, request
from tiny_checkpoint import PICTURES, picture

from photon_backend.model.crops import make_crops
from photon_backend.model.generate import generate
from photon_backend.model.weights import load_model

NUMBER = 32


def requests(checkpoint: Path, number: int = NUMBER, **changes):
    return [request(f"r{i}", checkpoint, i, **changes) for i in range(number)]


def run_all(bench: Bench, batch) -> dict:
    for submit, name in batch:
        bench.submit(submit, name)
    told = {key: answer.told for key, answer in bench.drain().items()}
    bench.assert_baseline()
    return told


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict:
    """Each request by itself, blocking, without a cache: what every other way must give."""
    told = {}
    for submit, name in requests(checkpoint):
        bench = Bench(checkpoint, overlap=False, prefix_cache=False)
        told |= run_all(bench, [(submit, name)])
        bench.close()
    return told


@pytest.fixture(scope="module")
def model(checkpoint: Path):
    return load_model(checkpoint, "cpu", torch.float64)


TASKS = ["query", "caption", "detect", "point"]


@pytest.mark.parametrize(("task", "name"), [("query", "none"), *((t, n) for t in TASKS for n in sorted(PICTURES))])
def test_greedy_equals_the_oracle(make_bench, checkpoint, model, task, name):
    for seed in range(3):
        submit, _ = request("r", checkpoint, 100 + seed, task=task, picture=name, temperature=0.0)
        crops, tiling = (None, (1, 1)) if name == "none" else make_crops(picture(name), model.config.vision)
        expected = generate(
            model,
            None if crops is None else torch.from_numpy(crops),
            tiling,
            submit.prompt_ids,
            submit.coords,
            submit.sizes,
            submit.task,
            submit.reasoning,
            submit.sampling.max_tokens,
            submit.max_objects,
        )
        bench = make_bench()
        told = run_all(bench, [(submit, None if name == "none" else name)])["r"]
        assert told == (expected[0], [round(v, 5) for v in expected[1]], expected[2])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_a_batch_changes_nothing(make_bench, checkpoint, alone, overlap, rows):
    assert run_all(make_bench(overlap=overlap, rows=rows), requests(checkpoint)) == alone


def test_a_warm_cache_changes_nothing(make_bench, checkpoint, alone):
    bench = make_bench()
    for turn in range(2):
        for submit, name in requests(checkpoint):
            bench.submit(submit, name)
        told = {key: answer.told for key, answer in bench.drain().items()}
        assert told == alone
        bench.answers.clear()
        if turn:
            assert bench.engine.cache.misses == len(PICTURES)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pool_that_is_too_small_changes_nothing(make_bench, checkpoint, alone, overlap):
    bench = make_bench(overlap=overlap, pages=9)
    assert run_all(bench, requests(checkpoint)) == alone
    assert bench.engine.cache.num_dropped > 0


@pytest.mark.parametrize("seed", range(6))
def test_arrivals_and_cancels_change_nothing_for_the_others(make_bench, checkpoint, alone, seed):
    """Requests come and go at random ticks, rows are reused at once, and delays hit each stream."""
    chance = random.Random(seed)
    lag = chance.choice(["compute", "copy", "none"])

    def delay(stream: str) -> None:
        if stream == lag and chance.random() < 0.3:
            time.sleep(0.002)

    bench = make_bench(rows=3, pages=chance.choice([10, 16, 400]), delay=delay)
    pending = requests(checkpoint)
    chance.shuffle(pending)
    cancelled = set()
    while pending or bench.engine.book.num_open:
        for _ in range(min(len(pending), chance.choice([0, 0, 1, 2, 5]))):
            bench.submit(*pending.pop())
        if bench.pictures and chance.random() < 0.15:
            victim = chance.choice(sorted(bench.pictures))
            cancelled.add(victim)
            bench.cancel(victim)
        bench.tick()
    bench.drain()
    bench.assert_baseline()
    for key, answer in bench.answers.items():
        if answer.reason == "cancelled":
            assert key in cancelled
            assert answer.ids == alone[key][0][: len(answer.ids)]
        else:
            assert answer.told == alone[key]
    assert any(answer.reason != "cancelled" for answer in bench.answers.values())


@pytest.mark.parametrize("lag", ["compute", "copy"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_late_stream_changes_nothing(make_bench, checkpoint, alone, lag, overlap):
    bench = make_bench(overlap=overlap, delay=lambda stream: time.sleep(0.002 * (stream == lag)))
    assert run_all(bench, requests(checkpoint)) == alone


@pytest.mark.parametrize("lag", ["compute", "copy"])
def test_a_removed_wait_is_seen(make_bench, checkpoint, alone, lag, monkeypatch):
    """The proof that the tests above can fail.

    With `copy` late, the host's wait for the copy's event is taken out; with `compute` late, the copy stream's wait for
    the step's event. Either way the commit reads a mirror too early: poison in a debug run, else another step's tokens.
    """
    bench = make_bench(debug=False, delay=lambda stream: time.sleep(0.01 * (stream == lag)))
    if lag == "copy":
        monkeypatch.setattr("photon_backend.engine.streams.HostEvent.wait", lambda event: None)
    else:
        monkeypatch.setattr("photon_backend.engine.streams.HostStream.wait", lambda stream, event: None)
    for submit, name in requests(checkpoint, 4):
        bench.submit(submit, name)
    told = {key: answer.told for key, answer in bench.drain().items()}
    assert told != {key: alone[key] for key in told}


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", 1.5), ("top_p", 0.95), ("top_k", 2), ("seed", 7), ("max_tokens", 3)]
)
def test_every_option_counts_and_overlap_keeps_it(make_bench, checkpoint, option, value):
    """Each option gives the same tokens blocking and overlapped, and other ones than the default."""
    base = {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "seed": 1, "max_tokens": 16, "reasoning": False}
    if option == "temperature":
        base["temperature"] = 0.0
    told = {}
    for name, changes in (("default", base), ("changed", base | {option: value})):
        batch = requests(checkpoint, 6, task="query", **changes)
        told[name] = run_all(make_bench(), batch)
        assert run_all(make_bench(overlap=False), batch) == told[name]
    assert told["default"] != told["changed"]
