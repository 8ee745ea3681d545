"""Drawing one token per row without a sort: `engine.sampler.draw` as one kernel.

The set that top-p and top-k keep is everything from some probability upwards, so it is enough to find that threshold.
The bit patterns of positive floats are ordered as the floats are, so 31 halvings find it exactly, each one pass over a
row that lies in L2. Most rows need none: when the likeliest token alone passes top-p, it is the answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(x):
    """The 32-bit hash of `engine.sampler._mix`."""
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw(logits, temperatures, top_ps, top_ks, seeds, positions, out, width, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    line = logits + b.to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + b)
    top_p = tl.load(top_ps + b)
    top_k = tl.load(top_ks + b)
    best = float("-inf")
    best_id = 0
    for begin in range(0, width, BLOCK):
        value = tl.load(line + begin + i, begin + i < width, float("-inf"))
        top = tl.max(value, 0)
        best_id = tl.where(top > best, begin + tl.argmax(value, 0), best_id)
        best = tl.maximum(best, top)
    if temperature > 0:
        warm = tl.maximum(temperature, 1e-5)
        high = best / warm
        total = 0.0
        for begin in range(0, width, BLOCK):
            value = tl.load(line + begin + i, begin + i < width, float("-inf"))
            total += tl.sum(tl.exp(value / warm - high), 0)
        # the least probability that is kept lies in [low, high] as bit patterns
        least = (1.0 / total).to(tl.int32, bitcast=True)
        narrow = (1.0 / total > top_p) | (top_k == 1)
        wide = (top_p >= 1.0) & (top_k == 0)
        low = tl.where(narrow, least, 0)
        least = tl.where(wide, 0, least)
        while low < least:
            middle = (low + least) // 2
            bar = middle.to(tl.float32, bitcast=True)
            mass = 0.0
            count = 0
            for begin in range(0, width, BLOCK):
                value = tl.load(line + begin + i, begin + i < width, float("-inf"))
                probability = tl.exp(value / warm - high) / total
                above = probability > bar
                mass += tl.sum(tl.where(above, probability, 0.0), 0)
                count += tl.sum(above.to(tl.int32), 0)
            keeps = (mass <= top_p) & ((count < top_k) | (top_k == 0))
            least = tl.where(keeps, middle, least)
            low = tl.where(keeps, low, middle + 1)
        bar = least.to(tl.float32, bitcast=True)
        seed = tl.load(seeds + b)
        key = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ _mix(tl.load(positions + b).to(tl.uint32))
        key = _mix(key)
        best = float("-inf")
        for begin in range(0, width, BLOCK):
            value = tl.load(line + begin + i, begin + i < width, float("-inf"))
            kept = (begin + i < width) & (tl.exp(value / warm - high) / total >= bar)
            word = _mix(key ^ _mix((begin + i).to(tl.uint32)))
            uniform = ((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
            noisy = tl.where(kept, value / warm - tl.log(-tl.log(uniform)), float("-inf"))
            top = tl.max(noisy, 0)
            best_id = tl.where(top > best, begin + tl.argmax(noisy, 0), best_id)
            best = tl.maximum(best, top)
    tl.store(out + b, best_id.to(tl.int64))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """As `engine.sampler.draw`: logits float32 [B, V], contiguous; the rest [B] -> int64 [B]."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(4096, triton.next_power_of_2(width))
    _draw[(rows,)](logits, temperature, top_p, top_k, seed, position, out, width, BLOCK=block, num_warps=8)
    return out
