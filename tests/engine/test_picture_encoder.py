"""Pictures encoded in pieces through static buffers: the steps that CUDA graphs are made of, run without graphs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Bench, request
from tiny_checkpoint import PICTURES, picture

from photon_backend.engine.kv_cache import prefill_mask
from photon_backend.engine.vision_graphs import PictureEncoder, most_pieces, pieces
from photon_backend.model.attention import prefix_mask
from photon_backend.model.crops import make_crops
from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import load_model


@pytest.mark.parametrize(
    ("counts", "cut"),
    [
        ([13], [[13]]),
        ([9, 4], [[9, 4]]),
        ([9, 5], [[9], [5]]),
        ([2] * 7, [[2] * 6, [2]]),
        ([2, 13, 2, 2], [[2], [13], [2, 2]]),
        ([9, 9, 4, 9], [[9], [9, 4], [9]]),
    ],
)
def test_pieces_hold_whole_pictures_in_their_order(counts, cut):
    assert [counts[piece] for piece in pieces(counts, 13)] == cut


@pytest.mark.parametrize("most", [2, 5, 13])
def test_pieces_are_at_most_so_many(most):
    """Against many pictures of every size, and one row of sizes that needs them all."""
    chance = random.Random(most)
    for crops in (1, most, most + 1, 44):
        for _ in range(200):
            counts: list[int] = []
            while (count := chance.randint(1, most)) <= crops - sum(counts):
                counts.append(count)
            if counts:
                assert len(pieces(counts, most)) <= most_pieces(len(counts), crops, most)
    assert len(pieces([most, 1] * 3 + [most], most)) == most_pieces(99, 3 * (most + 1) + most, most)


def test_memory_is_kept_for_no_more_pictures_than_there_are_rows(checkpoint, monkeypatch):
    """However many crops a step may have, which is a setting: a million would be terabytes."""
    encoder = PictureEncoder(load_model(checkpoint, torch.device("cpu"), torch.float32).vision)
    kept: list[int] = []
    host = encoder._host
    monkeypatch.setattr(encoder, "_host", lambda count: kept.append(count) or host(count))
    encoder.pin_ahead(2, 3, 10**6)
    assert len(kept) == 2 * 3


def test_a_piece_too_large_for_its_buffers_is_refused():
    with pytest.raises(ValueError, match="14 crops, 13 at most"):
        pieces([2, 14, 2], 13)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Moondream:
    return load_model(checkpoint, "cpu", torch.float64)


def crops_of(names: list[str], model: Moondream) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    cut = [make_crops(picture(name), model.config.vision) for name in names]
    return [pixels for pixels, _ in cut], [tiling for _, tiling in cut]


@torch.inference_mode()
def test_pieces_equal_one_pass(model):
    """A large batch, then a small one in the same buffers, then the large one in another order."""
    encoder = PictureEncoder(model.vision)
    names = sorted(PICTURES)
    for batch in (names * 3, ["tiny"], names[::-1], ["wide", "wide"]):
        pictures, tilings = crops_of(batch, model)
        at_once = model.vision.encode(torch.from_numpy(np.concatenate(pictures)), tilings)
        torch.testing.assert_close(encoder.encode(pictures, tilings), at_once, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_what_was_encoded_stays_when_the_buffers_are_filled_again(model):
    encoder = PictureEncoder(model.vision)
    first = encoder.encode(*crops_of(["wide"], model))
    kept = first.clone()
    encoder.encode(*crops_of(["tall"], model))
    assert torch.equal(first, kept)


def test_an_engine_that_encodes_in_pieces_tells_the_same(make_bench, checkpoint):
    told = []
    for in_pieces in (False, True):
        bench: Bench = make_bench(debug=False)
        runner, sizes = bench.engine.stepper.runner, []
        assert runner._encode_pictures == runner._encode_at_once  # on a CPU, whatever `graphs` says
        if in_pieces:
            encoder = PictureEncoder(runner.model.vision)

            def noting(count, run=encoder.run, sizes=sizes):
                sizes.append(count)
                run(count)

            encoder.run = noting  # type: ignore[method-assign]
            runner._encode_pictures = encoder.encode
        for i in range(10):
            bench.submit(*request(f"r{i}", checkpoint, i, picture=sorted(PICTURES)[i % 5], max_tokens=6))
        told.append({key: answer.told for key, answer in bench.drain().items()})
        bench.assert_baseline()
    assert told[0] == told[1]
    assert len(sizes) > 1 and max(sizes) <= encoder.most < sum(sizes)


@pytest.mark.parametrize(("prefix", "cached"), [(0, 0), (5, 0), (5, 5)])
@pytest.mark.parametrize("length", [6, 8, 9])
def test_the_mask_of_a_prefill(prefix, cached, length):
    """As the mask of booleans, and its lines begin at multiples of 8 numbers, which attention on a GPU wants."""
    mask = prefill_mask(cached, prefix, length, torch.zeros(1, dtype=torch.bfloat16))
    assert mask.dtype == torch.bfloat16 and mask.stride() == (-(-length // 8) * 8, 1)
    assert torch.equal(mask == 0, prefix_mask(length, prefix, "cpu")[cached:])
    assert torch.equal(mask == float("-inf"), mask != 0)
