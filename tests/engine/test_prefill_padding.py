"""What fills a short prefill up to the bucket of its graph: numbers only, no kernel runs."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton's kernel language is not installed")

from photon_backend.engine.prefill_graphs import BUCKETS, PrefillGraphs
from photon_backend.kernels.prefill import BLOCK_Q, most_blocks, pack, unpack

ROWS, PAGES, WIDTH = 7, 64, 8


class NoLayers:
    """Stands for the layers: notes what they are given, and leaves it."""

    def __init__(self) -> None:
        self.lm_head = torch.nn.Linear(WIDTH, 3)

    def prefill_layers(self, x, packed, page_table):
        self.given = packed
        return x, x[None]


def cut_at_random(chance: random.Random, tokens: int) -> list[tuple[int, int, int, int]]:
    """Sequences of so many new tokens in all, as few or many as there are rows; row, begin, prefix, length."""
    number = chance.randint(1, min(tokens, ROWS))
    borders = [0, *sorted(chance.sample(range(1, tokens), number - 1)), tokens]
    rows = chance.sample(range(ROWS), number)
    begins = [chance.choice([0, 5, 700]) for _ in rows]
    news = [end - begin for begin, end in pairwise(borders)]
    return [(row, begin, begin, begin + new) for row, begin, new in zip(rows, begins, news, strict=True)]


def test_a_step_is_filled_up_with_the_scratch_row_and_empty_blocks():
    sequences = [(5, 0, 1, BLOCK_Q + 3), (2, 70, 70, 71)]
    tokens, last = BLOCK_Q + 4, [BLOCK_Q + 2, BLOCK_Q + 3]
    packed = unpack(torch.from_numpy(pack(sequences, (tokens + 2, 5), scratch=9)), tokens + 2, 2)
    assert packed.rows.tolist() == [5] * (BLOCK_Q + 3) + [2, 9, 9]
    assert packed.positions.tolist() == [*range(BLOCK_Q + 3), 70, 0, 0]
    assert packed.last.tolist() == last
    blocks = [[0, BLOCK_Q, 5, 0, 1], [BLOCK_Q, 3, 5, BLOCK_Q, 1], [BLOCK_Q + 3, 1, 2, 70, 70]]
    assert packed.blocks.tolist() == [*blocks, [0] * 5, [0] * 5]


@pytest.mark.parametrize(("size", "what"), [((3, 2), "4 tokens in 2 blocks, 3"), ((4, 1), "blocks, 4 in 1 at most")])
def test_a_step_too_large_for_its_bucket_is_refused(size, what):
    with pytest.raises(ValueError, match=what):
        pack([(0, 0, 0, 3), (1, 0, 0, 1)], size, scratch=9)


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK_Q, BLOCK_Q + 1, BLOCK_Q + 2, 2 * BLOCK_Q, 2 * BLOCK_Q + 2])
def test_the_most_blocks_are_what_some_step_needs_and_none_exceeds(tokens, sequences):
    """Against every way to share out the tokens."""
    needed = [
        sum(-(-share // BLOCK_Q) for share in shares)
        for shares in combinations_with_replacement(range(tokens + 1), sequences)
        if sum(shares) == tokens
    ]
    assert most_blocks(tokens, sequences) == max(needed)


@torch.inference_mode()
def test_every_number_of_tokens_in_its_bucket():
    """Of the next larger one, whatever the step before left in the buffers, and however the tokens are shared out."""
    fused, chance = NoLayers(), random.Random(0)
    graphs = PrefillGraphs(fused, torch.zeros(ROWS + 1, PAGES, dtype=torch.int64), scratch=ROWS)
    for tokens in chance.sample(range(1, graphs.most + 1), graphs.most):
        sequences = cut_at_random(chance, tokens)
        inputs = torch.randn(tokens, WIDTH)
        x, parts, last = graphs.layers(inputs, sequences)
        bucket = min(b for b in BUCKETS if b >= tokens)
        exact, packed = unpack(torch.from_numpy(pack(sequences)), tokens, len(sequences)), fused.given
        assert len(x) == len(packed.rows) == len(packed.positions) == bucket and parts.shape == (1, *x.shape)
        assert torch.equal(x[:tokens], inputs) and not x[tokens:].any()
        assert torch.equal(last, exact.last)
        for ours, theirs, filling in ((packed.rows, exact.rows, ROWS), (packed.positions, exact.positions, 0)):
            assert torch.equal(ours[:tokens], theirs) and (ours[tokens:] == filling).all()
        assert len(packed.blocks) == most_blocks(bucket, ROWS)
        number = len(exact.blocks)
        assert torch.equal(packed.blocks[:number], exact.blocks) and not packed.blocks[number:].any()


@torch.inference_mode()
def test_what_comes_in_is_not_written():
    """The layers change their inputs in place; what stays in the buffer must not grow from step to step."""
    fused = NoLayers()
    graphs = PrefillGraphs(fused, torch.zeros(ROWS + 1, PAGES, dtype=torch.int64), scratch=ROWS)
    inputs = torch.randn(3, WIDTH)
    x, _, _ = graphs.layers(inputs, [(0, 0, 0, 3)])
    x.add_(1)
    assert torch.equal(graphs._x[:3], inputs)
