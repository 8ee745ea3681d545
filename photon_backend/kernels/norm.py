"""The seam between two blocks in one kernel: sum of split-K parts, bias, residual, LayerNorm.

2.0 us at one row and 2.9 at 64 of Moondream 2's shape on an H200, most of it latency; in torch, four launches or more,
14.7 and 18.7. A whole step through all kernels took 0.91 ms where torch takes 3.02, at 16 rows 1.56 and 7.03 (01431d9).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from photon_backend.kernels.early import early_launch

EPSILON = 1e-5  # of torch.nn.LayerNorm
MANY = 256  # rows: from here on they fill the chip, and threads of their own would only be more to start
SHAPE: tuple[int] | None = None  # warps for all launches; benchmarks set it


@triton.jit(do_not_specialize=["rows"])  # nor compile anew for a prefill of other lengths
def _add_norm(
    x, parts, bias, weight, shift, normed, rows, width,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x[m] += sum of parts[:, m] + bias; normed[m] = LayerNorm(x[m]). One program per row.

    Everything is loaded before the first reduction: a load behind one would wait for memory a second time.
    """
    m = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < width
    factor = tl.load(weight + d, inside, 0.0).to(tl.float32)
    addend = tl.load(shift + d, inside, 0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + m * width + d, inside, 0.0).to(tl.float32)
    if SPLITS > 0:
        total = tl.load(bias + d, inside, 0.0).to(tl.float32)
        for split in tl.static_range(SPLITS):  # all loads in flight at once
            total += tl.load(parts + (split * rows + m) * width + d, inside, 0.0)
        stored = (value + total).to(x.dtype.element_ty)
        tl.store(x + m * width + d, stored, inside)
        value = stored.to(tl.float32)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + 1e-5)
    result = centred * scale * factor + addend
    tl.store(normed + m * width + d, result.to(normed.dtype.element_ty), inside)


def add_norm(x: Tensor, parts: Tensor | None, bias: Tensor, weight: Tensor, shift: Tensor, normed: Tensor) -> None:
    """x [M, D] += sum(parts [splits, M, D]) + bias [D], in place; normed [M, D] = LayerNorm(x; weight, shift).

    The parts are of any float dtype and added in float32. Without them x stays as it is. All contiguous.
    """
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(32, max(4, block // 64)) if rows <= MANY else 4
    _add_norm[(rows,)](
        x,
        x if parts is None else parts,
        bias,
        weight,
        shift,
        normed,
        rows,
        width,
        SPLITS=0 if parts is None else parts.shape[0],
        BLOCK=block,
        num_warps=SHAPE[0] if SHAPE else warps,
        **early_launch(x.device),
    )


def add_norm_reference(x: Tensor, parts: Tensor | None, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """What `add_norm` computes, in torch; x is changed in place, the normed rows are returned."""
    if parts is not None:
        x.copy_(x.float() + parts.sum(0) + bias.float())
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, shift, EPSILON)
