"""The engine on a GPU: the same tokens as on a CPU, blocking or overlapped, whatever stream is late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bucket_edges import SETTINGS, FilledUp, told_at_edges
from harness import Bench, request

from photon_backend.engine.capture import can_capture
from photon_backend.engine.slots import DecodeSlot
from photon_backend.engine.streams import make_streams

NUMBER = 24
CYCLES = 3_000_000  # about 1.5 ms


@contextlib.contextmanager
def bench_on(checkpoint: Path, device: str, **settings) -> Iterator[Bench]:
    bench = Bench(checkpoint, device=device, **settings)
    yield bench
    bench.close()


def told_by(checkpoint: Path, device: str, number: int = NUMBER, **settings) -> dict:
    with bench_on(checkpoint, device, **settings) as bench:
        for i in range(number):
            bench.submit(*request(f"r{i}", checkpoint, i))
        told = {key: answer.told for key, answer in bench.drain().items()}
        bench.assert_baseline()
    return told


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> dict:
    return told_by(checkpoint, "cpu", overlap=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("debug", [True, False])
def test_tokens_equal_those_of_the_cpu(checkpoint, on_cpu, overlap, debug):
    assert told_by(checkpoint, "cuda", overlap=overlap, debug=debug) == on_cpu


def test_a_hit_equals_a_miss(checkpoint, on_cpu):
    """Most of these requests find their prefix; here each computes it."""
    assert told_by(checkpoint, "cuda", debug=False, prefix_cache=False) == on_cpu


@pytest.mark.parametrize("lag", ["compute", "copy"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_late_stream_changes_nothing(checkpoint, on_cpu, lag, overlap):
    def delay(stream: str) -> None:
        if stream == lag:
            torch.cuda._sleep(CYCLES)

    assert told_by(checkpoint, "cuda", overlap=overlap, debug=False, delay=delay) == on_cpu


@pytest.mark.parametrize("lag", ["compute", "copy", "neither"])
def test_the_engine_s_own_thread_changes_nothing(checkpoint, on_cpu, lag):
    """There the compute stream is the thread's own and is not entered for each piece of work."""

    def delay(stream: str) -> None:
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        if stream == lag:
            torch.cuda._sleep(CYCLES)

    bench = Bench(checkpoint, device="cuda", debug=False, delay=delay)
    bench.engine.start()
    for i in range(NUMBER):
        bench.submit(*request(f"r{i}", checkpoint, i))
    for _ in range(NUMBER):
        assert bench.ended.acquire(timeout=60)
    bench.engine.stop()
    assert bench.engine.failure is None
    assert {key: answer.told for key, answer in bench.answers.items()} == on_cpu


def test_work_runs_on_its_stream_adopted_or_not():
    """And leaves the thread's stream as it was."""
    device = torch.device("cuda")
    compute, copy = make_streams(device)
    seen: list[torch.cuda.Stream] = []

    def look() -> None:
        seen.append(torch.cuda.current_stream())

    for adopted in (False, True):
        if adopted:
            compute.adopt()
        before = torch.cuda.current_stream()
        for stream in (compute, copy, compute):
            stream.run(look)
            assert torch.cuda.current_stream() == before
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert seen[0] == seen[2] == seen[3] == seen[5] == before
    assert seen[1] == seen[4] != seen[0]


@pytest.mark.parametrize("pages", [9, 16])
def test_a_small_pool_changes_nothing(checkpoint, on_cpu, pages):
    assert told_by(checkpoint, "cuda", pages=pages) == on_cpu


def test_no_step_comes_before_what_the_start_has_queued(checkpoint, on_cpu, monkeypatch):
    """Buffers are made, and filled with zeros, on another stream than that of the steps, and here late. Without graphs,
    whose captures wait for all that."""

    def late(*args):
        torch.cuda._sleep(300 * CYCLES)
        return DecodeSlot(*args)

    monkeypatch.setattr("photon_backend.engine.stepper.DecodeSlot", late)
    assert told_by(checkpoint, "cuda", number=4, debug=False, graphs=False) == {
        f"r{i}": on_cpu[f"r{i}"] for i in range(4)
    }


def test_a_removed_wait_is_seen(checkpoint, on_cpu, monkeypatch):
    """With the copy late and the host's wait for it taken out, the commit reads poison or another step's tokens."""
    monkeypatch.setattr("photon_backend.engine.streams.CudaEvent.wait", lambda event: None)
    with bench_on(checkpoint, "cuda", debug=False, delay=lambda s: torch.cuda._sleep(CYCLES * (s == "copy"))) as bench:
        for i in range(4):
            bench.submit(*request(f"r{i}", checkpoint, i))
        told = {key: answer.told for key, answer in bench.drain().items()}
    assert told != {key: on_cpu[key] for key in told}


def test_bfloat16_overlap_equals_blocking_one_at_a_time(checkpoint):
    """In bfloat16 another batch rounds elsewhere, so the two are compared request by request."""
    for i in range(8):
        told = []
        for overlap in (True, False):
            with bench_on(checkpoint, "cuda", dtype="bfloat16", overlap=overlap) as bench:
                bench.submit(*request("r", checkpoint, i))
                told.append(bench.drain()["r"].told)
        assert told[0] == told[1]


def test_pages_by_memory(checkpoint):
    """Without a number of pages the cache takes a share of the GPU's memory and the engine runs."""
    with bench_on(checkpoint, "cuda", pages=0, rows=4) as bench:
        bench.submit(*request("r", checkpoint, 1))
        assert bench.drain()["r"].end is not None
        assert bench.engine.pool.num_pages >= 4 * 128


def test_nothing_in_a_tick_waits_for_the_device_unasked(checkpoint, on_cpu):
    """torch raises at any call that waits, but for the events that the commit waits for; such a step ends INTERNAL."""
    with bench_on(checkpoint, "cuda", debug=False) as bench:
        for i in range(NUMBER):
            bench.submit(*request(f"r{i}", checkpoint, i))
        pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            told = {key: answer.told for key, answer in bench.drain().items()}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert told == on_cpu
    if can_capture():  # without graphs pixels go up in blocks of any size
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 9])
def test_graphs_and_early_launch_change_nothing(checkpoint, number, monkeypatch):
    """So many requests, which come to 7 rows at once at most, in bfloat16 through the kernels: the very tokens of the
    same code without them. One picture a step: without graphs the crops of several are encoded at once, not in pieces,
    and round elsewhere. So may short prefills that are not filled up: here they are."""
    from photon_backend.engine.prefill_graphs import PrefillGraphs

    told, settings = [], {"dtype": "bfloat16", "debug": False, "rows": 9, "prefill_crops": 1}
    for graphs, early in ((True, True), (True, False), (False, True), (False, False)):
        monkeypatch.setattr("photon_backend.kernels.early.ENABLED", early)
        with bench_on(checkpoint, "cuda", graphs=graphs, **settings) as bench:
            if not graphs:
                runner = bench.engine.stepper.runner
                runner._short = PrefillGraphs(runner._fused, runner.rows.page_table, runner.scratch)
            for i in range(number):
                bench.submit(*request(f"r{i}", checkpoint, i, max_tokens=24))
            told.append({key: answer.told for key, answer in bench.drain().items()})
    assert told[0] == told[1] == told[2] == told[3]


EDGES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64)  # rows at once


def test_every_bucket_equals_the_cpu_up_to_its_edges(checkpoint):
    """In float64, where no batch rounds otherwise."""
    told = []
    for device in ("cpu", "cuda"):
        with bench_on(checkpoint, device, rows=EDGES[-1], **SETTINGS) as bench:
            told.append(told_at_edges(bench, checkpoint, EDGES))
    assert told[0] == told[1]


@pytest.mark.usefixtures("captures")
def test_every_bucket_equals_eager_up_to_its_edges(checkpoint):
    """In bfloat16 through the kernels: the same steps, captured and not."""
    told = []
    for captured in (True, False):
        with bench_on(checkpoint, "cuda", dtype="bfloat16", rows=EDGES[-1], **SETTINGS) as bench:
            stepper = bench.engine.stepper
            if not captured:
                stepper.graphs = FilledUp(stepper.runner, EDGES[-1])
            told.append(told_at_edges(bench, checkpoint, EDGES))
    assert told[0] == told[1]


def test_kernels_agree_with_torch_over_a_whole_step(checkpoint):
    """Logits of one decode step after the same prefill, bfloat16: as far apart as two roundings of it."""
    logits = []
    for kernels, dtype in ((True, "bfloat16"), (False, "bfloat16"), (False, "float32")):
        with bench_on(checkpoint, "cuda", dtype=dtype, debug=False, kernels=kernels, graphs=False) as bench:
            for i in range(5):
                bench.submit(*request(f"r{i}", checkpoint, i, task="query", max_tokens=8, temperature=0.0))
            for _ in range(3):
                bench.tick()
            torch.cuda.synchronize()
            logits.append(bench.engine.stepper.slots[0].logits[:5].float().cpu())
            bench.drain()
    fused, plain, exact = logits
    far = (plain - exact).norm() / exact.norm()
    assert (fused - exact).norm() / exact.norm() < 1.5 * far + 1e-3
