"""Dense attention over whole sequences: the plain path that paged attention is compared to, and that training uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [..., H, E], k [..., K, E], v [..., K, E]) -> [..., H, E]; q and k are already rotated."""


def dense_attend(mask: Tensor) -> Attend:
    """Attention of T queries to the same T keys, for `Text` inputs of shape [B, T, D].

    mask: bool [T, T] or [B, T, T], True where query (row) sees key (column). Every row needs one True at least.
    """
    if mask.dim() == 3:
        mask = mask[:, None]  # one mask for all heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))  # [B, H, T, E]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[-3] != k.shape[-3])
        return out.transpose(-3, -2)

    return attend


def prefix_mask(num_positions: int, prefix_len: int, device: torch.device | str) -> Tensor:
    """bool [T, T]: the first `prefix_len` positions see one another, the rest are causal and see all of the prefix."""
    mask = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device).tril()
    mask[:prefix_len, :prefix_len] = True
    return mask
