"""Drawing: the distribution is right, options keep what they should, and a draw depends on seed and position only."""

from __future__ import annotations

import torch

from photon_backend.engine.sampler import apply_bitmask, draw, gumbel, kept_ids

N = 20_000


def draws(logits: torch.Tensor, temperature=1.0, top_p=1.0, top_k=0, seed=3) -> torch.Tensor:
    """N draws at N positions from one row of logits; its frequencies [V]."""
    ones = torch.ones(N)
    ids = draw(
        logits.expand(N, -1),
        temperature * ones,
        top_p * ones,
        (top_k * ones).long(),
        torch.full((N,), seed),
        torch.arange(N),
    )
    return torch.bincount(ids, minlength=len(logits)) / N


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, -1)
        for seed in (0, 2**40 + 1, 2**62):
            assert (draws(logits, temperature, seed=seed) - expected).abs().max() < 0.015


def test_top_p_and_top_k_keep_what_the_reference_keeps():
    probabilities = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])

    def kept(top_p: float, top_k: int) -> list[int]:
        return kept_ids(probabilities, torch.tensor([top_p]), torch.tensor([top_k]))[0].nonzero()[:, 0].tolist()

    assert kept(1.0, 0) == [0, 1, 2, 3, 4]
    assert kept(0.3, 0) == [1]
    assert kept(0.5, 0) == [1, 3]  # 0.4 before the second is at most 0.5, 0.65 before the third is not
    assert kept(0.7, 0) == [1, 3, 4]
    assert kept(1.0, 2) == [1, 3]
    assert kept(0.3, 3) == [1]


def test_frequencies_under_top_p_are_renormalised():
    logits = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]).log()
    expected = torch.tensor([0.0, 0.4, 0.0, 0.25, 0.0]) / 0.65
    assert (draws(logits, top_p=0.5) - expected).abs().max() < 0.015


def test_a_draw_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 300, generator=generator) * 3
    options = (torch.full((64,), 0.9), torch.full((64,), 0.8), torch.zeros(64, dtype=torch.long))
    seed, position = torch.arange(64) * 2**33, torch.arange(64) + 700
    together = draw(logits, *options, seed, position)
    for i in range(64):
        part = slice(i, i + 1)
        assert draw(logits[part], *(o[part] for o in options), seed[part], position[part]) == together[i]
    assert not torch.equal(together, draw(logits, *options, seed + 1, position))
    assert not torch.equal(together, draw(logits, *options, seed, position + 1))


def test_temperature_zero_is_argmax_even_beside_others():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    zero = torch.zeros(2)
    ids = draw(logits, zero, zero + 1.0, zero.long(), zero.long(), zero.long())
    assert ids.tolist() == [1, 0]


def test_noise_is_gumbel_and_independent_across_ids_positions_and_seeds():
    noise = gumbel(torch.arange(50), torch.arange(50) * 7, 2000)
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.std().item() - 1.2825) < 0.02
    centred = noise - noise.mean()
    for shifted in (centred.roll(1, 0), centred.roll(1, 1)):
        assert (centred * shifted).mean().abs() < 0.03


def test_bits_say_what_is_legal():
    logits = torch.zeros(2, 70)
    mask = torch.tensor([[1, 0, 1 << 5], [-1, -(2**31), 0]], dtype=torch.int32)
    legal = apply_bitmask(logits, mask) == 0
    assert legal[0].nonzero()[:, 0].tolist() == [0, 69]
    assert legal[1].nonzero()[:, 0].tolist() == [*range(32), 63]


def test_no_noise_is_infinite():
    """Seed 23641, position 0: the hash of id 58 is the largest, so its uniform number would round to 1."""
    noise = gumbel(torch.tensor([23641]), torch.tensor([0]), 60)
    assert noise.isfinite().all() and noise.argmax() == 58


def test_a_row_of_no_numbers_does_not_touch_its_neighbours():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    broken = logits.clone()
    broken[1] = float("nan")
    ones = torch.ones(3)
    options = (ones, ones * 0.9, torch.zeros(3).long(), torch.arange(3), torch.arange(3))
    assert draw(broken, *options)[[0, 2]].tolist() == draw(logits, *options)[[0, 2]].tolist()
