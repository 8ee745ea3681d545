"""Coordinates and sizes: numbers in, as embeddings; numbers out, as bins.

In: Fourier features of the value, then a linear. Out: a small MLP on the hidden state before the final LayerNorm. A
value that leaves the model is made from its bin in float32; bfloat16 could not tell neighbouring bins apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from photon_backend.model.config import RegionConfig
from photon_backend.model.text import Mlp


class Region(nn.Module):
    def __init__(self, config: RegionConfig) -> None:
        super().__init__()
        self.config = config
        self.coord_features = nn.Parameter(torch.empty(1, config.coord_feat_dim // 2))
        self.size_features = nn.Parameter(torch.empty(2, config.size_feat_dim // 2))
        self.coord_encoder = nn.Linear(config.coord_feat_dim, config.dim)
        self.coord_decoder = Mlp(config.dim, config.inner_dim, config.coord_out_dim)
        self.size_encoder = nn.Linear(config.size_feat_dim, config.dim)
        self.size_decoder = Mlp(config.dim, config.inner_dim, config.size_out_dim)

    def encode_coordinate(self, values: Tensor) -> Tensor:
        """values: float32 [..., 1], 0..1 -> embedding [..., D]."""
        return self.coord_encoder(fourier_features(values, self.coord_features))

    def encode_size(self, values: Tensor) -> Tensor:
        """values: float32 [..., 2], (width, height), 0..1 -> embedding [..., D]."""
        return self.size_encoder(fourier_features(values, self.size_features))

    def decode_coordinate(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D], before the final LayerNorm -> logits [..., bins]."""
        return self.coord_decoder(hidden)

    def decode_size(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D], before the final LayerNorm -> logits [..., 2, bins]: width, then height."""
        return self.size_decoder(hidden).unflatten(-1, (2, self.config.size_bins))

    def coordinate_value(self, bins: Tensor) -> Tensor:
        """bins: int64 [...] -> float32 [...] = bin / bins."""
        return bins.float() / self.config.coord_out_dim

    def size_value(self, bins: Tensor) -> Tensor:
        """bins: int64 [...] -> float32 [...] = 2 ** (bin / (bins - 1) * 10 - 10), so 1/1024 .. 1.

        By way of float64: in float32 torch's exp2 gives other last bits for a vector than for one element, and a box
        would depend on its batch.
        """
        return torch.exp2(bins.double() / (self.config.size_bins - 1) * 10.0 - 10.0).float()


def fourier_features(values: Tensor, frequencies: Tensor) -> Tensor:
    """[cos(2 pi x W), sin(2 pi x W)] of values [..., n] with W [n, features / 2], in the dtype of W.

    The angle is formed in float32: in bfloat16 an angle of 60 is off by up to an eighth of a radian.
    """
    angles = 2 * math.pi * values.float() @ frequencies.float()
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(frequencies.dtype)
