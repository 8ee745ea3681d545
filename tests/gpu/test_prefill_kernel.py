"""A prefill through the kernels against torch. On a GPU, or, slowly, under TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from photon_backend.engine.fused import FusedText
from photon_backend.engine.kv_cache import KVCache
from photon_backend.engine.prefill_graphs import PrefillGraphs
from photon_backend.engine.runner import PrefillRow, Runner
from photon_backend.engine.slots import DecodeSlot
from photon_backend.kernels.prefill import BLOCK_Q, pack, unpack
from photon_backend.model.config import ModelConfig, TextConfig
from photon_backend.model.weights import random_model
from tests.model.tiny_checkpoint import CONFIG

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter has no bfloat16 of numpy
SIZE = 16  # positions of a page
SMALL = TextConfig(dim=64, ff_dim=112, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=320, max_context=256)
ODD = replace(
    SMALL, dim=96, n_heads=6, n_kv_heads=3, n_layers=1
)  # 16 dimensions a head, heads that are no power of two
CONFIGS = [SMALL, ODD] + ([replace(TextConfig(), n_layers=2)] if ON_GPU else [])


def row_of(row: int, cached: int, prefix: int, length: int, pages: list[int]) -> PrefillRow:
    return PrefillRow(
        row=row, pages=pages, cached_len=cached, prefix_len=prefix, prompt_ids=[7] * (length - prefix), coords=[],
        sizes=[], pixels=None, tiling=(1, 1), load_tail=None, save_tail=None, state=0, think_until=0, temperature=0.0,
        top_p=1.0, top_k=0, seed=0, automaton=(0, 0, 1),
    )  # fmt: skip


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


#       cached, prefix, length
MANY = ((0, 40, 52), (40, 40, 41), (0, 1, BLOCK_Q), (0, 0, 3), (70, 70, 140), (0, 70, 71), (0, 1, 1))


class Case:
    """Sequences with and without a cached prefix, of lengths on both sides of a block and a page; shuffled pages."""

    def __init__(self, config: TextConfig, sequences: tuple[tuple[int, int, int], ...] = MANY) -> None:
        model = ModelConfig(config, CONFIG.vision, replace(CONFIG.region, dim=config.dim))
        self.model = random_model(model, DEVICE.type, DTYPE, seed=0).requires_grad_(False)
        chance = np.random.RandomState(0)
        of_rows = chance.permutation(len(sequences) * 9).reshape(-1, 9).tolist()
        rows = chance.permutation(len(sequences)).tolist()
        self.batch = [row_of(row, *s, of_rows[row]) for row, s in zip(rows, sequences, strict=True)]
        self.noise: dict[str, torch.Tensor] = {}  # in the pages before
        tokens = sum(r.length - r.cached_len for r in self.batch)
        self.x = torch.randn(tokens, config.dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)

    @torch.inference_mode()
    def run(self, way: str) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
        """Hidden state and logits of each sequence, and the pages afterwards. way: exact, torch, fused, padded."""
        model = self.model.float() if way == "exact" else self.model
        dtype = torch.float32 if way == "exact" else DTYPE
        text = model.config.text
        cache = KVCache(text, 9 * len(self.batch), SIZE, DEVICE, dtype)
        for pages, seed, name in ((cache.k, 2, "k"), (cache.v, 3, "v")):
            self.noise[name] = torch.randn(pages.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)
            pages.copy_(self.noise[name])
        rows = len(self.batch) + 2  # more than take part: padding has blocks too
        runner = Runner(model, cache, rows, debug=False, kernels=False)
        slot = DecodeSlot(model.config, len(self.batch), DEVICE, dtype)
        runner._set_rows(slot, self.batch)
        if way in ("fused", "padded"):
            runner._fused = FusedText(model.text, cache)
            if way == "padded":
                runner._short = PrefillGraphs(runner._fused, runner.rows.page_table, runner.scratch)
                self.fill_with_garbage(runner._short)
            runner._prefill_fused(self.x.clone(), self.batch, slot.hidden, slot.logits)
        else:
            runner._prefill_in_torch(self.x.to(dtype), self.batch, slot.hidden, slot.logits)
        model.to(DTYPE)
        return slot.hidden, slot.logits, cache

    def fill_with_garbage(self, short: PrefillGraphs) -> None:
        """What a step before left; padding must not read it."""
        short._x.fill_(float("nan"))
        short._numbers.copy_(torch.arange(len(short._numbers)))

    def written(self, cache: KVCache) -> torch.Tensor:
        """Which cells of all pages but the scratch page are those of new positions, bool [P, S]."""
        cells = torch.zeros(cache.k.shape[1] - 1, SIZE, dtype=torch.bool, device=DEVICE)
        for r in self.batch:
            for p in range(r.cached_len, r.length):
                cells[r.pages[p // SIZE], p % SIZE] = True
        return cells


@pytest.mark.parametrize("config", CONFIGS)
def test_a_packed_prefill(config):
    """As far from float32 as torch's own roundings, each sequence for itself; pages of others are not touched."""
    case = Case(config)
    exact, plain, fused = (case.run(way) for way in ("exact", "torch", "fused"))
    for ours, theirs, truth in zip(fused[:2], plain[:2], exact[:2], strict=True):
        for i in range(len(case.batch)):
            assert distance(ours[i], truth[i]) < 1.5 * distance(theirs[i], truth[i]) + 2e-3, MANY[i]
    for name in ("k", "v"):
        ours, theirs, truth = (getattr(of_way[2], name) for of_way in (fused, plain, exact))
        untouched = theirs == case.noise[name]  # a written value may happen to be what was there; few are
        assert 0.1 < untouched.float().mean() < 0.9
        assert (ours == case.noise[name])[untouched].float().mean() > 0.999
        assert distance(ours, truth) < 1.5 * distance(theirs, truth) + 1e-3


SHORT = (
    ((40, 40, 52),),
    ((0, 0, 1), (70, 70, 71), (0, 1, 14)),  # 16 tokens: no padding
    ((0, 20, 30), (40, 40, 41), (0, 0, 3), (70, 70, 140)),  # 84 tokens: two blocks of one sequence
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sequences", SHORT)
def test_a_padded_prefill(config, sequences):
    """As the same without padding, in whose products other shapes may round elsewhere; and beside the positions of its
    sequences it touches the scratch page alone, and of that one position 0."""
    case = Case(config, sequences)
    exact, fused, padded = (case.run(way) for way in ("exact", "fused", "padded"))
    for ours, theirs, truth in zip(padded[:2], fused[:2], exact[:2], strict=True):
        for i in range(len(case.batch)):
            assert distance(ours[i], truth[i]) < 1.5 * distance(theirs[i], truth[i]) + 2e-3, sequences[i]
    written = case.written(padded[2])
    for name in ("k", "v"):
        ours, theirs, truth = (getattr(of_way[2], name) for of_way in (padded, fused, exact))
        assert torch.equal(ours[:, :-1][:, ~written], case.noise[name][:, :-1][:, ~written])
        assert torch.equal(ours[:, -1, 1:], case.noise[name][:, -1, 1:]) and ours.isfinite().all()
        ours, theirs, truth = (pages[:, :-1][:, written] for pages in (ours, theirs, truth))
        assert distance(ours, truth) < 1.5 * distance(theirs, truth) + 1e-3


def test_packing():
    sequences = [(5, 0, 1, 2 * BLOCK_Q + 3), (2, 70, 70, 71), (0, 4, 0, 4 + BLOCK_Q)]
    packed = unpack(torch.from_numpy(pack(sequences)), 3 * BLOCK_Q + 4, 3)
    assert packed.rows.tolist() == [5] * (2 * BLOCK_Q + 3) + [2] + [0] * BLOCK_Q
    assert packed.positions.tolist() == [*range(2 * BLOCK_Q + 3), 70, *range(4, 4 + BLOCK_Q)]
    assert packed.last.tolist() == [2 * BLOCK_Q + 2, 2 * BLOCK_Q + 3, 3 * BLOCK_Q + 3]
    assert packed.blocks.tolist() == [
        [0, BLOCK_Q, 5, 0, 1],
        [BLOCK_Q, BLOCK_Q, 5, BLOCK_Q, 1],
        [2 * BLOCK_Q, 3, 5, 2 * BLOCK_Q, 1],
        [2 * BLOCK_Q + 3, 1, 2, 70, 70],
        [2 * BLOCK_Q + 4, BLOCK_Q, 0, 4, 0],
    ]
