"""The vision encoder: crops to one embedding per patch of a picture.

Each crop is encoded alone. The tiles of a picture are then stitched in feature space (their overlapping margins cut
off), pooled to the grid of the global crop, put beside its features and projected to the text width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from photon_backend.model.config import VisionConfig
from photon_backend.model.text import Mlp, Projections


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.enc_n_heads
        self.ln1 = nn.LayerNorm(config.enc_dim)
        self.attn = Projections(config.enc_dim, 3 * config.enc_dim)
        self.ln2 = nn.LayerNorm(config.enc_dim)
        self.mlp = Mlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [C, N, W] -> [C, N, W]; every patch sees every patch of its crop."""
        qkv = self.attn.qkv(self.ln1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [C, heads, N, head width] each
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.attn.proj(attended)
        return x + self.mlp(self.ln2(x))


class Vision(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.enc_dim
        self.patch_emb = nn.Linear(config.in_channels * config.enc_patch_size**2, width)
        self.pos_emb = nn.Parameter(torch.empty(1, config.num_patches, width))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.enc_n_layers))
        self.post_ln = nn.LayerNorm(width)
        self.proj_mlp = Mlp(2 * width, config.proj_inner_dim, config.proj_out_dim)

    def encode(self, crops: Tensor, tilings: Sequence[tuple[int, int]]) -> Tensor:
        """Embeddings of several pictures, all crops in one pass of the encoder.

        crops: uint8 [C, side, side, 3], the pictures one after another, each with its global crop first.
        tilings: (rows, columns) of each picture, C = sum of 1 + rows * columns; ValueError otherwise.
        Returns [pictures, N, D].
        """
        return self.project(self.merge_all(self.encode_crops(crops), tilings))

    def encode_crops(self, crops: Tensor) -> Tensor:
        """crops: uint8 [C, side, side, 3] -> features [C, N, W], after the final LayerNorm."""
        x = self.patch_emb(self.patches(crops)) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        return self.post_ln(x)

    def patches(self, crops: Tensor) -> Tensor:
        """crops: uint8 [C, side, side, 3] -> [C, N, channels * patch**2], -1..1, ordered (channel, row, column)."""
        pixels = crops.to(self.patch_emb.weight.dtype).div_(255.0).sub_(0.5).div_(0.5)
        grid, patch = self.config.grid, self.config.enc_patch_size
        split = pixels.reshape(-1, grid, patch, grid, patch, self.config.in_channels)
        return split.permute(0, 1, 3, 5, 2, 4).reshape(crops.shape[0], grid * grid, -1)

    def merge_all(self, features: Tensor, tilings: Sequence[tuple[int, int]]) -> list[Tensor]:
        """features: [C, N, W] of several pictures, as `encode_crops` gives them -> [N, 2 W] of each."""
        counts = [1 + rows * columns for rows, columns in tilings]
        if sum(counts) != features.shape[0]:
            raise ValueError(f"{features.shape[0]} crops for tilings {list(tilings)} that need {sum(counts)}")
        return [self.merge(part, tiling) for part, tiling in zip(features.split(counts), tilings, strict=True)]

    def project(self, merged: list[Tensor]) -> Tensor:
        """[N, 2 W] of each picture -> [pictures, N, D]."""
        return self.proj_mlp(torch.stack(merged))

    def merge(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """features: [1 + rows * columns, N, W] of one picture -> [N, 2 W]: global, then local."""
        grid = self.config.grid
        canvas = self.stitch(features[1:].unflatten(1, (grid, grid)), tiling)
        pooled = F.adaptive_avg_pool2d(canvas.permute(2, 0, 1), (grid, grid)).flatten(1).T
        return torch.cat([features[0], pooled], dim=-1)

    def stitch(self, tiles: Tensor, tiling: tuple[int, int]) -> Tensor:
        """tiles: [rows * columns, G, G, W] -> one map [height, width, W] in which each patch appears once.

        A tile keeps its margin only where it has no neighbour, at the border of the picture.
        """
        rows, columns = tiling
        bands = []
        for row in range(rows):
            top, bottom = self._kept(row, rows)
            cut = []
            for column in range(columns):
                left, right = self._kept(column, columns)
                cut.append(tiles[row * columns + column, top:bottom, left:right])
            bands.append(torch.cat(cut, dim=1))
        return torch.cat(bands, dim=0)

    def _kept(self, index: int, count: int) -> tuple[int, int]:
        """First and last + 1 patch that tile `index` of `count` along one side contributes."""
        grid, margin = self.config.grid, self.config.overlap_margin
        return (0 if index == 0 else margin), (grid if index == count - 1 else grid - margin)
