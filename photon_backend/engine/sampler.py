"""Drawing token ids.

A sample depends on its logits, its options, its seed and its position, and on nothing else: not on the batch, the row
or the overlap. So the random number is a hash of (seed, position), not the state of a generator.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """float64 [B] in [0, 1) from int64 [B] seeds and positions: SplitMix64 (Steele, Lea, Flood 2014), ints wrap."""
    x = seed + (position + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch's `>>` is not."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """One id per row.

    logits float32 [B, V]; temperature, top_p float32 [B]; top_k (0: all), seed, position int64 [B] -> int64 [B].
    Top-p as the reference: a token stays while the probability of those before it is at most top_p. Temperature 0 is
    argmax. Rows without a legal token (all minus infinity) are the caller's fault.
    """
    greedy = logits.argmax(-1)
    probabilities = torch.softmax(logits / temperature.clamp(min=1e-5)[:, None], -1)
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = (before <= top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    cumulative = torch.where(kept, ranked, 0.0).double().cumsum(-1)
    threshold = uniform(seed, position)[:, None] * cumulative[:, -1:]
    choice = (cumulative <= threshold).sum(-1, keepdim=True)
    choice = torch.minimum(choice, kept.sum(-1, keepdim=True) - 1)
    return torch.where(temperature == 0, greedy, ids.gather(-1, choice)[:, 0])


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """logits [B, V], minus infinity where a bit of int32 [B, ceil(V / 32)] is clear: bit i of word w is id 32 w + i."""
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
