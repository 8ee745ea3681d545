"""The vision encoder with residual sum and LayerNorm in one kernel: two such launches a layer instead of four.

By their bytes they are 0.9 of the 1.55 ms that sums and norms take of nine crops in torch, 12.6 ms in all. Linears and
attention stay the library's. The slow path is `Vision.encode_crops`; tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from photon_backend.kernels.norm import add_norm
from photon_backend.model.vision import Vision, VisionBlock


def supports(vision: Vision) -> bool:
    return vision.pos_emb.is_cuda and vision.pos_emb.dtype in (torch.bfloat16, torch.float16)


def encode_crops(vision: Vision, crops: Tensor) -> Tensor:
    """As `Vision.encode_crops`: uint8 [C, side, side, 3] -> features [C, N, W], after the final LayerNorm."""
    x = vision.patch_emb(vision.patches(crops)) + vision.pos_emb
    shape = x.shape
    x = x.flatten(0, 1)
    normed, parts, bias = torch.empty_like(x), None, vision.post_ln.bias
    for block in vision.blocks:
        assert isinstance(block, VisionBlock)
        add_norm(x, parts, bias, block.ln1.weight, block.ln1.bias, normed)
        parts, bias = _product(_attended(block, normed.view(shape)), block.attn.proj.weight), block.attn.proj.bias
        add_norm(x, parts, bias, block.ln2.weight, block.ln2.bias, normed)
        parts, bias = _product(block.mlp.activated(normed), block.mlp.fc2.weight), block.mlp.fc2.bias
    add_norm(x, parts, bias, vision.post_ln.weight, vision.post_ln.bias, normed)
    return normed.view(shape)


def _attended(block: VisionBlock, normed: Tensor) -> Tensor:
    """normed [C, N, W] -> [C N, W]: every patch has seen every patch of its crop."""
    q, k, v = block.attn.qkv(normed).unflatten(-1, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """[M, K] -> [1, M, N], without the bias, which `add_norm` adds."""
    return torch.mm(x, weight.t())[None]
