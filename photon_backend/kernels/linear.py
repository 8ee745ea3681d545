"""Linear layers that stream their weights once, for the few rows of a decode step.

At M = 1..64 rows a linear is a read of its weights; the kernel's work is to keep enough of that read in flight. The
weight tile is the left operand of the matrix product and the rows are the right one, so that the tensor cores' large
side lies along the weights, and a layer with few outputs splits its K over several programs.

A program that was launched early (early.py) begins with the part of K that is there already: in [proj | fc2] that is
the MLP's hidden state, four fifths of the weights, read while attention still runs.

Moondream 2 on an H200, at 1, 4, 16 and 64 rows: [qkv ; fc1] 16.9, 17.1, 18.4, 19.5 us where cuBLAS takes 17.3, 17.5,
17.7, 19.0 without the tanh-GELU; [proj | fc2] in four splits 9.7, 9.8, 10.5, 11.8 where it takes 14.9, 16.8, 17.3,
17.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from photon_backend.kernels.early import early_launch

if TYPE_CHECKING:
    from photon_backend.engine.rows import Asked

SHAPE: tuple[int, int, int, int] | None = None  # BLOCK_N, BLOCK_K, warps, stages for all launches; benchmarks set it


def shape_for(rows: int, wide: bool = False) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, warps, stages: the tile of the weights and how many of them are in flight.

    `wide`: for [proj | fc2], where a wider tile made a forward of 16 rows 4 % faster (1,558 to 1,499 us, 1,577 to 1,512
    on another machine), and none of 8 or fewer and of 32 or more.
    """
    if wide and 8 < rows <= 16:
        return SHAPE or (64, 256, 4, 3)
    return SHAPE or ((64, 128, 4, 4) if rows <= 16 else (64, 128, 4, 3))


@triton.jit
def tanh_gelu(x):
    """x / 2 (1 + tanh z) of float32, as x sigmoid(2 z), without tanh."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))


@triton.jit
def _accumulate(
    acc, x, w, n, m, m_rows, n_out, begin, end, x_stride, w_stride, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """acc[n, m] += sum over k in [begin, end) of w[n, k] x[m, k]."""
    for k0 in range(begin, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        tile = w + n[:, None].to(tl.int64) * w_stride + k[None, :]
        if EVEN:  # noqa: SIM108 - the compiler resolves a branch, not an expression
            weights = tl.load(tile)
        else:
            weights = tl.load(tile, (n[:, None] < n_out) & (k[None, :] < end), 0.0)
        # past L1, which may hold what these addresses held a layer ago: in the early part no wait came before
        place = x + m[None, :] * x_stride + k[:, None]
        rows = tl.load(place, (m[None, :] < m_rows) & (k[:, None] < end), 0.0, cache_modifier=".cg")
        acc = tl.dot(weights, rows, acc)
    return acc


@triton.jit(do_not_specialize=["m_rows"])  # nor compile in a tick whose number of rows came up in no graph
def _linear(
    x, w, bias, out, step_rows, row_states, asks, m_rows, n_out, k_in, x_stride, w_stride, out_stride, out_split,
    gelu_from, gap, late, splits, group, num_states,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    EVEN: tl.constexpr, ALL_LATE: tl.constexpr, ASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum over the split's k of x[m, k] w[n, k] (+ bias[n] in the first).

    A split has its share of k < late, which the kernel just before writes, and its share of the others. From
    n = gelu_from on: tanh-GELU, and `gap` columns further right. EVEN: no tile hangs over N or a share of K. ASKED:
    step_rows, row_states and asks are an `engine.rows.Asked`, with `group` outputs for each of its lines.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if not ALL_LATE:
        share = tl.cdiv(tl.cdiv(k_in - late, splits), BLOCK_K) * BLOCK_K
        begin = late + split * share
        end = tl.minimum(begin + share, k_in)
        acc = _accumulate(acc, x, w, n, m, m_rows, n_out, begin, end, x_stride, w_stride, BLOCK_K, EVEN)
    if ASKED:
        row = tl.load(step_rows + m, m < m_rows, 0, cache_modifier=".cg")  # past L1, as in `_accumulate`
        state = tl.load(row_states + row, m < m_rows, 0, cache_modifier=".cg")
        line = asks + (tl.program_id(0) * BLOCK_N // group) * num_states
        asked = tl.max(tl.load(line + state, m < m_rows, 0), 0)
    if EARLY:
        gdc_wait()
    share = tl.cdiv(tl.cdiv(late, splits), BLOCK_K) * BLOCK_K
    begin = split * share
    end = tl.minimum(begin + share, late)
    if ASKED:
        end = tl.where(asked > 0, end, begin)
    acc = _accumulate(acc, x, w, n, m, m_rows, n_out, begin, end, x_stride, w_stride, BLOCK_K, EVEN)
    if BIAS:
        acc += tl.load(bias + n, (n < n_out) & (split == 0), 0.0).to(tl.float32)[:, None]
    if GELU:
        gelu = tanh_gelu(acc)
        acc = tl.where(n[:, None] >= gelu_from, gelu, acc)
    column = n + tl.where(n >= gelu_from, gap, 0)
    place = out + split * out_split + m[None, :] * out_stride + column[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), (n[:, None] < n_out) & (m[None, :] < m_rows))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, gelu_from: int | None = None, gap: int = 0,
    asked: Asked | None = None,
) -> Tensor:  # fmt: skip
    """out[m, n] = x[m] . weight[n] + bias[n]; from n = gelu_from on tanh-GELU, stored at column n + gap.

    x [M, K], weight [N, K], bias [N] of one 16-bit dtype, out [M, N + gap] of any float dtype; the last dimension of
    each must be contiguous.

    `asked`: the outputs are those of several heads, as many of each. A program, which has up to 64 rows, reads no
    weights of a head that none of them asks for, and leaves what x = 0 would give; where tiles do not fit the heads it
    reads all. Rows and states are read before the wait, so they must be there before the kernel just before can start.
    """
    _launch(x, weight, bias, out[None], gelu_from, gap, late=x.shape[1], splits=1, asked=asked)
    return out


def linear_split(
    x: Tensor, weight: Tensor, out: Tensor, late: int | None = None, bias: Tensor | None = None,
    asked: Asked | None = None,
) -> Tensor:  # fmt: skip
    """Partial sums over K: the sum of float32 out [splits, M, N] over its first dimension is x weight^T + bias.

    Of x only the first `late` columns may be written by the kernel just before (None: all of them). The others are read
    without a wait, so they must be there before that kernel can start: behind attention they are, whose first kernel
    waits for everything before it and only then releases what follows.

    The sum is left to what comes after, in a fixed order (`norm.add_norm` adds up what it needs anyway): atomics would
    make a token depend on timing.
    """
    _launch(x, weight, bias, out, None, 0, x.shape[1] if late is None else late, out.shape[0], asked)
    return out


def _launch(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, gelu_from: int | None, gap: int, late: int, splits: int,
    asked: Asked | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    outputs = w.shape[0]
    block_n, block_k, warps, stages = shape_for(rows, wide=late < width)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    assert asked is None or late == width, "what is read before the wait is read for all"
    if asked is not None and outputs // len(asked.asks) % block_n != 0:
        asked = None  # a tile may be of two heads: both are read
    # never read where nothing is asked; a single line, lest the numbers made of it grow with the rows
    step_rows, row_states, asks = asked or (x, x, x[:1])
    _linear[(triton.cdiv(outputs, block_n), splits, triton.cdiv(rows, block_m))](
        x,
        w,
        w if bias is None else bias,
        out,
        step_rows,
        row_states,
        asks,
        rows,
        outputs,
        width,
        x.stride(0),
        w.stride(0),
        out.stride(1),
        out.stride(0) if splits > 1 else 0,  # else it grows with the rows, and a kernel is compiled for each kind of it
        outputs if gelu_from is None else gelu_from,
        gap,
        late,
        splits,
        outputs // len(asks),
        asks.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIAS=bias is not None,
        GELU=gelu_from is not None,
        EVEN=outputs % block_n == 0 and all(share % (splits * block_k) == 0 for share in (late, width - late)),
        ALL_LATE=late == width,
        ASKED=asked is not None,
        num_warps=warps,
        num_stages=stages,
        **early_launch(x.device),
    )


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor, gelu_from: int | None = None) -> Tensor:
    """What `linear` computes, in torch."""
    out = torch.nn.functional.linear(x, weight, bias)
    if gelu_from is not None:
        activated = torch.nn.functional.gelu(out[:, gelu_from:], approximate="tanh")
        out = torch.cat([out[:, :gelu_from], activated], -1)
    return out
