"""What no benchmark here can exceed: the speed of memory and of arithmetic, and what a model needs of both.

Of an H200 the rates are known; of a CPU they are measured when asked for, some tenths of a second each, with the
threads that torch has. A small model may lie in a CPU's cache, which is faster than its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from photon_backend.model.config import ModelConfig, VisionConfig
from photon_backend.model.moondream import Moondream

H200_BYTES_PER_S = 4.2e12  # measured: a copy, bytes read plus bytes written
H200_FLOP_PER_S = 989e12  # its data sheet: bfloat16, dense
COPIED = 1 << 26  # bytes, far more than a cache holds
SIDE = 1024  # of the matrices that are multiplied


def bytes_per_s(device: str) -> float:
    """Of memory, read and written."""
    if device != "cpu":
        return H200_BYTES_PER_S
    source, target = (torch.ones(COPIED, dtype=torch.uint8) for _ in range(2))
    return 2 * COPIED / _best_s(lambda: target.copy_(source))


def flop_per_s(device: str, dtype: str) -> float:
    """Of a product of matrices."""
    if device != "cpu":
        return H200_FLOP_PER_S
    a = torch.ones(SIDE, SIDE, dtype=getattr(torch, dtype))
    return 2 * SIDE**3 / _best_s(lambda: a @ a)


def _best_s(work: Callable[[], object], repeat: int = 5) -> float:
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def decode_bytes(model: Moondream, batch: int, context: int) -> int:
    """That a decode step reads at least: the text model's weights, and KV of so many positions of each row."""
    text = model.config.text
    weights = sum(p.numel() * p.element_size() for name, p in model.text.named_parameters() if name != "wte")
    kv = 2 * text.n_layers * text.n_kv_heads * text.head_dim * model.text.wte.element_size() * context * batch
    return weights + kv


def tflop_per_crop(config: VisionConfig) -> float:
    """Of the encoder: its linears, and scores and sums of attention."""
    width, patches = config.enc_dim, config.num_patches
    layer = 4 * width**2 + 2 * width * config.enc_ff_dim + 2 * width * patches
    first = config.in_channels * config.enc_patch_size**2 * width
    return 2e-12 * patches * (config.enc_n_layers * layer + first)


def tflop_per_token(config: ModelConfig) -> float:
    """Of the linears of the text model's layers; attention is left out."""
    text = config.text
    attention = (2 * text.n_heads + 2 * text.n_kv_heads) * text.head_dim * text.dim
    return 2e-12 * text.n_layers * (attention + 2 * text.dim * text.ff_dim)
