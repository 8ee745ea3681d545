"""Graphs of the vision encoder on a GPU: what the same steps give without graphs, whatever stream is late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Bench, request
from tiny_checkpoint import CONFIG, PICTURES

from photon_backend.engine.vision_graphs import LEAST, PictureEncoder
from photon_backend.model.vision import Vision
from photon_backend.model.weights import load_model

MOST = 1 + CONFIG.vision.max_crops
CYCLES = 3_000_000  # about 1.5 ms
NAMES = sorted(PICTURES)


def vision(checkpoint: Path, dtype: torch.dtype) -> Vision:
    return load_model(checkpoint, "cuda", dtype).vision


def crops(count: int, seed: int) -> np.ndarray:
    side = CONFIG.vision.crop_size
    return np.random.RandomState(seed).randint(0, 256, (count, side, side, 3)).astype(np.uint8)


def tiling(count: int) -> tuple[int, int]:
    return 1, count - 1


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "far"), [(torch.float64, 1e-10), (torch.bfloat16, 0.0)])
def test_every_number_of_crops_is_as_without_graphs(checkpoint, dtype, far):
    """Twice over, so that each graph finds what another left. In bfloat16 to the bit: they are the same kernels."""
    eager = PictureEncoder(vision(checkpoint, dtype))
    captured = PictureEncoder(eager._vision)
    captured.capture()
    assert sorted(captured._graphs) == list(range(LEAST, MOST + 1))
    for seed, count in enumerate([*range(LEAST, MOST + 1), *range(MOST, LEAST - 1, -1)]):
        pictures = [crops(count, seed)]
        one = captured.encode(pictures, [tiling(count)])
        torch.testing.assert_close(one, eager.encode(pictures, [tiling(count)]), rtol=far, atol=far)
        at_once = eager._vision.encode(torch.from_numpy(pictures[0]).cuda(), [tiling(count)])
        torch.testing.assert_close(one, at_once, rtol=max(far, 0.02), atol=max(far, 0.02))


@torch.inference_mode()
@pytest.mark.parametrize("lag", ["neither", "compute", "uploads", "both"])
def test_many_pieces_one_after_another(checkpoint, lag):
    """Every piece is stitched before the next one takes its place: in float64, against one pass over all. The
    pixels come up late, or find the staging buffers of earlier ones still to be read."""
    encoder = PictureEncoder(vision(checkpoint, torch.float64))
    encoder.capture()
    load = encoder.load

    def late(pictures):
        if lag in ("compute", "both"):
            torch.cuda._sleep(CYCLES)
        if lag in ("uploads", "both"):
            with torch.cuda.stream(encoder._uploads):
                torch.cuda._sleep(2 * CYCLES)
        return load(pictures)

    encoder.load = late
    counts = [2, 8, 3, 3, 2, 7, 5, 2, 8, 4]
    pictures, tilings = [crops(c, i) for i, c in enumerate(counts)], [tiling(c) for c in counts]
    at_once = encoder._vision.encode(torch.from_numpy(np.concatenate(pictures)).cuda(), tilings)
    torch.testing.assert_close(encoder.encode(pictures, tilings), at_once, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_pinned_pixels_are_not_given_away_before_they_have_gone_up(checkpoint):
    encoder = PictureEncoder(vision(checkpoint, torch.float64))
    encoder.capture()
    pictures, tilings = [crops(MOST, 1)], [tiling(MOST)]
    expected = encoder.encode(pictures, tilings).cpu()
    torch.cuda._sleep(20 * CYCLES)
    late = encoder.encode(pictures, tilings)
    for _ in range(8):  # of the size whose block would be free
        torch.empty(pictures[0].shape, dtype=torch.uint8, pin_memory=True).fill_(255)
    assert torch.equal(late.cpu(), expected)


def submit_all(bench: Bench, checkpoint: Path) -> None:
    """Pictures only, each encoded anew; one token each, so that prefill follows prefill through both slots."""
    for i in range(20):
        asked = {"task": "query", "reasoning": False, "picture": NAMES[i % len(NAMES)], "max_tokens": 1}
        bench.submit(*request(f"r{i}", checkpoint, i, **asked))


def told_by(checkpoint: Path, device: str, **settings) -> dict:
    bench = Bench(checkpoint, device=device, debug=False, prefix_cache=False, **settings)
    try:
        submit_all(bench, checkpoint)
        return {key: answer.told for key, answer in bench.drain().items()}
    finally:
        bench.close()


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> dict:
    return told_by(checkpoint, "cpu", overlap=False)


@pytest.mark.parametrize("at_once", [1, 32])
@pytest.mark.parametrize("lag", ["neither", "compute", "copy"])
def test_step_after_step_through_both_slots(checkpoint, on_cpu, lag, at_once):
    """One picture a step, and several pieces in one."""

    def delay(stream: str) -> None:
        if stream == lag:
            torch.cuda._sleep(CYCLES)

    assert told_by(checkpoint, "cuda", prefill_crops=at_once, delay=delay) == on_cpu


@pytest.mark.usefixtures("captures")
def test_steps_of_pictures_wait_for_nothing(checkpoint, on_cpu):
    """Several pieces a step: torch raises at a call that waits, and then the step ends INTERNAL."""
    bench = Bench(checkpoint, device="cuda", debug=False, prefix_cache=False)
    sizes: list[int] = []
    encoder = bench.engine.stepper.runner._encode_pictures.__self__  # type: ignore[attr-defined]
    run = encoder.run
    encoder.run = lambda count: (sizes.append(count), run(count))
    submit_all(bench, checkpoint)
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        told = {key: answer.told for key, answer in bench.drain().items()}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        bench.close()
    assert told == on_cpu
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned  # which the debug mode does not know to wait
    assert max(sizes) <= MOST and len(sizes) > bench.engine.pipeline.num_launched


def test_debug_and_no_graphs_encode_at_once(checkpoint):
    for settings in ({"debug": True}, {"debug": False, "graphs": False}):
        bench = Bench(checkpoint, device="cuda", **settings)
        assert bench.engine.stepper.runner._encode_pictures == bench.engine.stepper.runner._encode_at_once
        bench.close()
