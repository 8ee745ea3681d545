"""Coordinates and sizes as input of a decode step, in one kernel: x[b] becomes the embedding of the row's value.

Fourier features and the encoder's linear of `model.region`, as `engine.runner.encode_in_torch` does them for all rows
and both kinds in some twenty launches. A row whose next input is a token ends at its first branch and stays as it is.

Price: each program computes its row's features anew, 128 or 256 sines and cosines for 32 outputs, and each row reads
the encoder's weights, 1 MB or 2 MB at Moondream 2's shape, which after the first row come from L2. The features are not
worth a launch of their own, nor the weights a product of matrices: at 64 rows it is some 90 MB from L2 in a step that
reads 12 GB. Measured on an H200 at 1, 4, 16 and 64 rows of coordinates and sizes: 2.2, 3.0, 5.5 and 15 us, in torch 41,
43, 43 and 47. Launched as ever, after the end of `relay`, whose x it replaces.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # outputs of a program


@triton.jit
def _encode(
    line, first, second, frequencies, weights, bias, half, width, d,
    HALF: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """line[d] = bias[d] + weights[d] . [cos a, sin a], where a = 2 pi (first W[0] + second W[1])."""
    f = tl.arange(0, HALF)
    inside = f < half
    place = weights + d[:, None] * (2 * half) + f[None, :]
    there = (d[:, None] < width) & inside[None, :]
    of_cosine = tl.load(place, there, 0.0)  # before the angles, which wait for the row, its kind and its value
    of_sine = tl.load(place + half, there, 0.0)
    angle = first * 6.283185307179586 * tl.load(frequencies + f, inside, 0.0).to(tl.float32)
    if PAIR:
        angle += second * 6.283185307179586 * tl.load(frequencies + half + f, inside, 0.0).to(tl.float32)
    dtype = frequencies.dtype.element_ty
    cosine = tl.cos(angle).to(dtype).to(tl.float32)
    sine = tl.sin(angle).to(dtype).to(tl.float32)
    terms = of_cosine.to(tl.float32) * cosine[None, :] + of_sine.to(tl.float32) * sine[None, :]
    total = tl.sum(terms, 1) + tl.load(bias + d, d < width, 0.0).to(tl.float32)
    tl.store(line + d, total.to(line.dtype.element_ty), d < width)


@triton.jit
def _encode_values(
    rows, kinds, values, coord_frequencies, coord_weights, coord_bias, size_frequencies, size_weights, size_bias, x,
    coord_half, size_half, width,
    COORD_HALF: tl.constexpr, SIZE_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + b)
    kind = tl.load(kinds + row)  # engine/rows.py: 1 is a coordinate, 2 a size
    line = x + b * width
    if kind == 1:
        first = tl.load(values + row * 2)
        _encode(
            line, first, first, coord_frequencies, coord_weights, coord_bias, coord_half, width, d, COORD_HALF, False
        )
    if kind == 2:
        first, second = tl.load(values + row * 2), tl.load(values + row * 2 + 1)
        _encode(line, first, second, size_frequencies, size_weights, size_bias, size_half, width, d, SIZE_HALF, True)


def encode_values(
    rows: Tensor,
    kind: Tensor,
    value: Tensor,
    coordinate: tuple[Tensor, Tensor, Tensor],
    size: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
) -> None:
    """x[b] = the embedding of value[rows[b]], where kind[rows[b]] is COORDINATE (value[0] alone) or SIZE.

    rows int64 [B]; by row: kind int64 [R], value float32 [R, 2]; x [B, D]. coordinate and size, their encoders:
    frequencies [1, F / 2] or [2, F / 2], weights [D, F], bias [D]. All contiguous. Angles are float32, features rounded
    to the dtype of the frequencies.
    """
    batch, width = x.shape
    halves = coordinate[0].shape[1], size[0].shape[1]
    _encode_values[(batch, triton.cdiv(width, BLOCK))](
        rows,
        kind,
        value,
        *coordinate,
        *size,
        x,
        *halves,
        width,
        COORD_HALF=triton.next_power_of_2(halves[0]),
        SIZE_HALF=triton.next_power_of_2(halves[1]),
        BLOCK=BLOCK,
        num_warps=4,  # with 8 the compiler computes features once more for each warp
    )
