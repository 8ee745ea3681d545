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
def _draw(
    logits, temperatures, top_ps, top_ks, seeds, positions, probabilities, out, width, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program. A pass adds up vectors and reduces them once: a reduction costs more than a block."""
    b = tl.program_id(0)
    line = logits + b.to(tl.int64) * width
    shares = probabilities + b.to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + b)
    top_p = tl.load(top_ps + b)
    top_k = tl.load(top_ks + b)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, width, BLOCK):
        value = tl.load(line + begin + i, begin + i < width, float("-inf"))
        best_id = tl.where(value > best, begin + i, best_id)
        best = tl.maximum(best, value)
    high = tl.max(best, 0)
    if temperature > 0:
        warm = tl.maximum(temperature, 1e-5)
        sums = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, width, BLOCK):
            value = tl.load(line + begin + i, begin + i < width, float("-inf"))
            sums += tl.exp((value - high) / warm)
        total = tl.sum(sums, 0)
        for begin in range(0, width, BLOCK):
            value = tl.load(line + begin + i, begin + i < width, float("-inf"))
            tl.store(shares + begin + i, tl.exp((value - high) / warm) / total, begin + i < width)
        tl.debug_barrier()  # the passes below read what other threads of this program stored
        # the least share that is kept lies in [low, least], as bit patterns
        least = (1.0 / total).to(tl.int32, bitcast=True)
        narrow = (1.0 / total > top_p) | (top_k == 1)
        wide = (top_p >= 1.0) & (top_k == 0)
        low = tl.where(narrow, least, 0)
        least = tl.where(wide, 0, least)
        while low < least:
            middle = (low + least) // 2
            bar = middle.to(tl.float32, bitcast=True)
            masses = tl.zeros((BLOCK,), tl.float32)
            counts = tl.zeros((BLOCK,), tl.int32)
            for begin in range(0, width, BLOCK):
                share = tl.load(shares + begin + i, begin + i < width, 0.0)
                above = share > bar
                masses += tl.where(above, share, 0.0)
                counts += above.to(tl.int32)
            keeps = (tl.sum(masses, 0) <= top_p) & ((top_k == 0) | (tl.sum(counts, 0) < top_k))
            least = tl.where(keeps, middle, least)
            low = tl.where(keeps, low, middle + 1)
        bar = least.to(tl.float32, bitcast=True)
        seed = tl.load(seeds + b)
        key = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ _mix(tl.load(positions + b).to(tl.uint32))
        key = _mix(key)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for begin in range(0, width, BLOCK):
            value = tl.load(line + begin + i, begin + i < width, float("-inf"))
            share = tl.load(shares + begin + i, begin + i < width, -1.0)
            word = _mix(key ^ _mix((begin + i).to(tl.uint32)))
            uniform = ((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
            noisy = tl.where(share >= bar, value / warm - tl.log(-tl.log(uniform)), float("-inf"))
            best_id = tl.where(noisy > best, begin + i, best_id)
            best = tl.maximum(best, noisy)
        high = tl.max(best, 0)
    first = tl.min(tl.where(best == high, best_id, 2147483647), 0)
    tl.store(out + b, first.to(tl.int64))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """As `engine.sampler.draw`: logits float32 [B, V], contiguous; the rest [B] -> int64 [B]."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shares = torch.empty_like(logits)
    block = min(8192, triton.next_power_of_2(width))
    warps = min(32, max(4, block // 256))
    _draw[(rows,)](logits, temperature, top_p, top_k, seed, position, shares, out, width, BLOCK=block, num_warps=warps)
    return out
