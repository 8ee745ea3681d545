"""The model on a GPU against the same model on the CPU (float32), and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from photon_backend.engine.fused import FusedText
from photon_backend.engine.fused_region import FusedRegion
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.rows import Asked
from photon_backend.kernels.relay import relay
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.model.crops import make_crops
from photon_backend.model.generate import generate
from photon_backend.model.moondream import Moondream
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import load_model, random_model
from tests.model.cases import MAX_TOKENS, cases, prompt
from tests.model.tiny_checkpoint import CONFIG, PICTURES, TOKENIZER, picture, write_checkpoint


def test_features_and_greedy_tokens_equal_those_of_the_cpu(tmp_path: Path) -> None:
    """On one machine: the golden numbers need the pinned Pillow and numpy, which a GPU machine may not have."""
    write_checkpoint(tmp_path)
    on_cpu, on_gpu = (load_model(tmp_path, device, torch.float32) for device in ("cpu", "cuda"))
    tokenizer = TextTokenizer(TOKENIZER)
    cut = {name: make_crops(picture(name), CONFIG.vision) for name in PICTURES}
    for crops, tiling in cut.values():
        pixels = torch.from_numpy(crops)
        features = on_gpu.vision.encode(pixels.cuda(), [tiling]).cpu()
        torch.testing.assert_close(features, on_cpu.vision.encode(pixels, [tiling]), atol=1e-3, rtol=1e-3)
    for case in cases():
        crops, tiling = cut[case.picture] if case.picture else (None, (0, 0))
        pixels = None if crops is None else torch.from_numpy(crops)
        told = []
        for model in (on_cpu, on_gpu):
            there = None if pixels is None else pixels.to(model.text.wte.device)
            request = prompt(case, CONFIG, tokenizer)
            told.append(
                generate(model, there, tiling, *request, case.task, case.reasoning, MAX_TOKENS, case.max_objects)
            )
        assert told[0][0] == told[1][0] and told[0][2] == told[1][2], case.name
        np.testing.assert_allclose(told[0][1], told[1][1], atol=1 / CONFIG.region.coord_out_dim)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    exact, rough = (load_model(tmp_path, "cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    crops, tiling = make_crops(picture("tiles"), CONFIG.vision)
    pixels = torch.from_numpy(crops).cuda()
    one, other = (model.vision.encode(pixels, [tiling]).float() for model in (exact, rough))
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.99


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@torch.inference_mode()
def test_early_launch_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Moondream 2's widths, where kernels last long enough to overlap: a load before its time would show."""
    config = ModelConfig(text=TextConfig(n_layers=6, vocab_size=1024))
    model = random_model(config, "cuda", torch.bfloat16, seed=1).requires_grad_(False)
    expected = _forward(model, rows, monkeypatch, early=False)
    for _ in range(20):
        assert torch.equal(_forward(model, rows, monkeypatch, early=True), expected)


def _forward(
    model: Moondream, rows: int, monkeypatch: pytest.MonkeyPatch, early: bool, pages: int = 40
) -> torch.Tensor:
    """What the heads say after five steps in one graph, those of regions as the sum of all. Every third row is fed the
    token that it chose, the others a coordinate or a size. Between capture and replay the page table is reversed and
    keys and values are filled anew: a read too early gets wrong ones."""
    config = model.config.text
    monkeypatch.setattr("photon_backend.kernels.early.ENABLED", early)
    cache = KVCache(config, rows * pages, 16, torch.device("cuda"), torch.bfloat16)
    fused, region = FusedText(model.text, cache), FusedRegion(model.region)
    row, table = torch.arange(rows, device="cuda"), torch.arange(rows * pages, device="cuda").reshape(rows, pages)
    token, position = torch.empty_like(row), torch.empty_like(row)
    value, x = torch.empty(rows, 2, device="cuda"), torch.empty(rows, config.dim, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(rows, config.vocab_size, device="cuda")
    bins = torch.empty(rows, 3, model.config.region.size_bins, device="cuda")  # as many of a coordinate
    states, asks = torch.empty_like(row), torch.eye(2, 3, device="cuda", dtype=torch.int32)  # one head, the other, none

    def begin() -> None:
        torch.manual_seed(0)
        for noise in (cache.k, cache.v, value):
            noise.normal_()
        position.fill_(500)
        token.fill_(7)
        bins.zero_()
        states.zero_()
        torch.cuda.synchronize()  # the other stream does not wait for what was made on this one

    def steps() -> None:
        for _ in range(5):
            positions, lines = relay(row, token, position, table, model.text.wte, rows, x)
            region.encode(row, row % 3, value, x)
            fused.forward(x, positions, lines, logits)
            points, extents = region.heads(x, Asked(row, states, asks))
            states.add_(1).remainder_(3)
            bins[:, 0].add_(points)
            bins[:, 1:].add_(extents)
            token.copy_(logits.argmax(-1))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    begin()
    with torch.cuda.stream(stream):
        steps()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        steps()
    table.copy_(table.flip(1))
    begin()
    graph.replay()
    torch.cuda.synchronize()  # before the graph's memory goes
    return torch.cat([logits, bins.flatten(1)], 1)
