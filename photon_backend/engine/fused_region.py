"""Coordinates and sizes of a decode step through our kernels: five launches instead of some thirty.

One launch puts the embeddings of values where a row's next input is one (`kernels.region`). The heads take four: the
first layers of both decoders are one weight-streaming linear with GELU over the merged weights [coord fc1 ; size fc1],
each second layer reads its half of what that one leaves, and a sum ends both. The modules' own parameters become views
of the merged ones, so no weight exists twice. The values in a prompt are encoded by the modules, and its sample takes
these heads.

Price: where some row may take a value the heads run for all rows of a step, 117 MB of weights at Moondream 2's shape,
28 us at 4.2 TB/s. A head that no row's state asks for is not read; a state asks for one at most, so one row reads one.

The second layers have few outputs, 1,024 and 2,048 of 8,192 inputs, so their K is split: one program for all of K
leaves the memory idle. Measured on an H200 at 1, 4, 16 and 64 rows: 37, 38, 39 and 46 us for both heads, in torch 49,
51, 53 and 56; with K in one piece 61, 61, 61 and 83.

The slow path is `encode_in_torch` and `heads_in_torch` in runner.py; tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from photon_backend.engine.rows import Asked
from photon_backend.kernels.linear import linear, linear_split
from photon_backend.kernels.region import encode_values
from photon_backend.model.region import Region

SPLITS = 8  # of the second layers' K


class FusedRegion:
    """In a 16-bit dtype: see `supports`."""

    def __init__(self, region: Region) -> None:
        self._coordinate, self._size = region.coord_decoder.fc2, region.size_decoder.fc2
        self._coord_encoder = (region.coord_features, region.coord_encoder.weight, region.coord_encoder.bias)
        self._size_encoder = (region.size_features, region.size_encoder.weight, region.size_encoder.bias)
        self._bins = region.config.size_bins
        first, second = region.coord_decoder.fc1, region.size_decoder.fc1
        self._inner = region.config.inner_dim
        self._weight = torch.cat([first.weight, second.weight])  # [2 inner, D]
        self._bias = torch.cat([first.bias, second.bias])
        halves = zip(self._weight.split(self._inner), self._bias.split(self._inner), strict=True)
        for layer, (weight, bias) in zip((first, second), halves, strict=True):
            layer.weight, layer.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)

    @staticmethod
    def supports(region: Region) -> bool:
        return region.coord_features.dtype in (torch.bfloat16, torch.float16)

    def encode(self, row: Tensor, kind: Tensor, value: Tensor, x: Tensor) -> None:
        """As `runner.encode_in_torch`."""
        encode_values(row, kind, value, self._coord_encoder, self._size_encoder, x)

    def heads(self, hidden: Tensor, asked: Asked | None = None) -> tuple[Tensor, Tensor]:
        """As `runner.heads_in_torch`, in float32."""
        batch, bins = len(hidden), len(self._coordinate.bias)
        inner = hidden.new_empty(batch, 2 * self._inner)
        linear(hidden, self._weight, self._bias, inner, gelu_from=0, asked=asked)
        parts = hidden.new_empty(SPLITS, batch, bins + 2 * self._bins, dtype=torch.float32)
        layers, outs = (self._coordinate, self._size), parts.split((bins, 2 * self._bins), -1)
        for head, (half, layer, out) in enumerate(zip(inner.split(self._inner, 1), layers, outs, strict=True)):
            linear_split(half, layer.weight, out, bias=layer.bias, asked=asked and asked.of(head))
        points, extents = parts.sum(0).split((bins, 2 * self._bins), -1)
        return points, extents.unflatten(-1, (2, self._bins))
