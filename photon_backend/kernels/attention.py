"""Rope, KV write and paged attention of a decode step in one kernel, with split-KV, and one to join the splits, if any.

Every (row, head) is cut into SPLITS stretches of its positions, so that one long row alone keeps the whole chip busy.
The program whose stretch holds the newest position also rotates the new key, writes key and value to their page and
attends to them from registers: no program waits for another. The number of splits depends on the batch bucket only,
never on the lengths, so the launch can live in a CUDA graph; a stretch that lies behind the row's end does nothing.

From the second layer of a step on a program reads its first keys and values before the linear in front of it has ended.

A layer of Moondream 2's shape with 800 positions on an H200, at 1, 4, 16 and 64 rows: 5.0, 9.5, 29 and 104 us, 4.0 TB/s
at 64. In torch, which gathers the pages first (`engine.kv_cache.PagedDecode`), 45, 64, 133 and 384. Beginning early and
keeping a second block under way made the whole forward 1, 6, 5 and 7 % faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from photon_backend.kernels.early import early_launch


@triton.jit
def rotate_head(base, e, cos, sin, HALF: tl.constexpr):
    """The head vector at `base`, first 2 * HALF dimensions rotated in pairs (i, i + HALF); float32 [E].

    Of several heads at once with base [H, 1] and the others [1, E]: float32 [H, E].
    """
    first = e < HALF
    second = (e >= HALF) & (e < 2 * HALF)
    own = tl.load(base + e).to(tl.float32)
    other = tl.load(base + tl.where(first, e + HALF, tl.where(second, e - HALF, e))).to(tl.float32)
    return tl.where(first, own * cos - other * sin, tl.where(second, other * sin + own * cos, own))


@triton.jit
def _read(keys, values, pages, s, end, kv_head, kv_heads, PAGE: tl.constexpr, E: tl.constexpr):
    """Keys and values of the positions s < end as they lie in the pages, [BLOCK, E] each; zeros elsewhere."""
    inside = s < end
    # past L1, which before the wait may hold what these addresses held earlier
    page = tl.load(pages + s // PAGE, inside, 0, cache_modifier=".cg")
    place = ((page * PAGE + s % PAGE) * kv_heads + kv_head)[:, None] * E + tl.arange(0, E)[None, :]
    k = tl.load(keys + place, inside[:, None], 0.0, cache_modifier=".cg")
    v = tl.load(values + place, inside[:, None], 0.0, cache_modifier=".cg")
    return k, v


@triton.jit
def _write(keys, values, pages, position, kv_head, kv_heads, k, v, PAGE: tl.constexpr, E: tl.constexpr):
    """Key and value [E] of a position, to its page."""
    page = tl.load(pages + position // PAGE)
    place = ((page * PAGE + position % PAGE) * kv_heads + kv_head) * E + tl.arange(0, E)
    tl.store(keys + place, k)
    tl.store(values + place, v.to(values.dtype.element_ty))


@triton.jit
def _take(k, v, q, inside, top, total, acc):
    """The running maximum, sum of weights and weighted sum, with a block more in them."""
    score = tl.where(inside, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 0))
    weight = tl.exp(score - new_top)
    shrink = tl.exp(top - new_top)
    total = total * shrink + tl.sum(weight, 0)
    acc = acc * shrink + tl.sum(weight[:, None] * v.to(tl.float32), 0)
    return new_top, total, acc


@triton.jit
def _attend(
    qkv, qkv_stride, keys, values, positions, table, table_stride, cos_table, sin_table,
    part_out, part_max, part_sum, out, out_stride, heads, kv_heads, scale,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NEXT: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    if EARLY and not AHEAD:
        gdc_wait()
    b = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = h // (heads // kv_heads)
    position = tl.load(positions + b, cache_modifier=".cg")  # past L1, as in `_read`
    pages = table + b * table_stride
    e = tl.arange(0, E)
    stretch = tl.cdiv(tl.cdiv(position + 1, SPLITS), BLOCK) * BLOCK
    begin = split * stretch
    end = tl.minimum(begin + stretch, position)  # the newest position is not read from its page
    s = begin + tl.arange(0, BLOCK)
    k, v = _read(keys, values, pages, s, end, kv_head, kv_heads, PAGE, E)
    pair = tl.where(e < HALF, e, tl.where(e < 2 * HALF, e - HALF, 0))
    cos = tl.load(cos_table + position * HALF + pair)
    sin = tl.load(sin_table + position * HALF + pair)
    if EARLY and AHEAD:
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()  # no sooner: `linear_split`, behind this kernel, reads what the wait was for
    line = qkv + b * qkv_stride
    dtype = keys.dtype.element_ty
    q = rotate_head(line + h * E, e, cos, sin, HALF).to(dtype).to(tl.float32) * scale
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((E,), tl.float32)
    if (begin <= position) & (position < begin + stretch):
        new_k = rotate_head(line + (heads + kv_head) * E, e, cos, sin, HALF).to(dtype)
        new_v = tl.load(line + (heads + kv_heads + kv_head) * E + e)
        if h % (heads // kv_heads) == 0:
            _write(keys, values, pages, position, kv_head, kv_heads, new_k, new_v, PAGE, E)
        top = tl.zeros((1,), tl.float32) + tl.sum(q * new_k.to(tl.float32), 0)
        total = tl.full((1,), 1.0, tl.float32)
        acc = new_v.to(tl.float32)
    if NEXT == "registers":
        for s0 in range(begin, end, BLOCK):
            s = s0 + tl.arange(0, BLOCK)
            top, total, acc = _take(k, v, q, s < end, top, total, acc)
            k, v = _read(keys, values, pages, s + BLOCK, end, kv_head, kv_heads, PAGE, E)
    else:
        if begin < end:  # of an empty stretch top is minus infinity, and that less itself no number
            top, total, acc = _take(k, v, q, s < end, top, total, acc)
        STAGES: tl.constexpr = 2 if NEXT == "shared" else 1
        for s0 in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
            s = s0 + tl.arange(0, BLOCK)
            k, v = _read(keys, values, pages, s, end, kv_head, kv_heads, PAGE, E)
            top, total, acc = _take(k, v, q, s < end, top, total, acc)
    if SPLITS == 1:
        tl.store(out + b * out_stride + h * E + e, (acc / total).to(out.dtype.element_ty))
    else:
        part = (b * heads + h) * SPLITS + split
        tl.store(part_out + part * E + e, acc)
        one = tl.arange(0, 1)
        tl.store(part_max + part + one, top)
        tl.store(part_sum + part + one, total)


@triton.jit
def _join(
    part_out, part_max, part_sum, out, out_stride, heads, SPLITS: tl.constexpr, E: tl.constexpr, EARLY: tl.constexpr
):
    """Joins the stretches of one (row, head) into out[b, h * E : (h + 1) * E]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    h = tl.program_id(1)
    e = tl.arange(0, E)
    split = tl.arange(0, SPLITS)
    part = (b * heads + h) * SPLITS + split
    top = tl.load(part_max + part)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(part_sum + part), 0)
    acc = tl.sum(weight[:, None] * tl.load(part_out + part[:, None] * E + e[None, :]), 0)
    tl.store(out + b * out_stride + h * E + e, (acc / total).to(out.dtype.element_ty))


class DecodeAttention:
    """Launches the kernels for a batch of B rows; its scratch buffers are allocated once."""

    def __init__(
        self, batch: int, heads: int, kv_heads: int, head_dim: int, page_size: int, device: torch.device
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.splits, self.block, self.warps, self.next = SHAPE or shape_for(batch, heads)
        shapes = (batch, heads, self.splits, head_dim), (batch, heads, self.splits), (batch, heads, self.splits)
        # float32: weighted sum, maximum and sum of weights of each stretch
        self._parts = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]

    def __call__(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        table: Tensor,
        rope: tuple[Tensor, Tensor],
        out: Tensor,
        ahead: bool = False,
    ) -> None:
        """Writes the new keys and values of a step and attends.

        qkv [B, (H + 2 K) E] before rope; keys, values [P * S, K, E] of one layer; positions int64 [B]; table int64
        [B, pages of each row]; rope: cos and sin float32 [context, rot_dim / 2]; out [B, H E].

        `ahead`: read before the kernel just before has ended. Positions, table and the pages of older positions must
        then be there before that kernel can start. From the second layer of a step on they are: the attention of the
        layer before has waited for all that came before it, and only then released what follows.
        """
        batch = qkv.shape[0]
        _attend[(batch, self.heads, self.splits)](
            qkv,
            qkv.stride(0),
            keys,
            values,
            positions,
            table,
            table.stride(0),
            *rope,
            *self._parts,
            out,
            out.stride(0),
            self.heads,
            self.kv_heads,
            self.head_dim**-0.5,
            SPLITS=self.splits,
            PAGE=self.page_size,
            E=self.head_dim,
            HALF=rope[0].shape[1],
            BLOCK=self.block,
            NEXT=self.next,
            AHEAD=ahead,
            num_warps=self.warps,
            **early_launch(out.device),
        )
        if self.splits > 1:
            _join[(batch, self.heads)](
                *self._parts,
                out,
                out.stride(0),
                self.heads,
                SPLITS=self.splits,
                E=self.head_dim,
                num_warps=1,
                **early_launch(out.device),
            )


# splits, BLOCK, warps, NEXT for all launches; benchmarks and tests set it
SHAPE: tuple[int, int, int, str] | None = None


def shape_for(batch: int, heads: int) -> tuple[int, int, int, str]:
    """Stretches per row, a power of two; block; warps; where a loop's next block lies while it takes one: in
    "registers", in "shared" memory, or still in "memory".

    Small batches have many programs, which read little more than their first block, and that is under way before the
    wait. A second block in registers lets half as many programs run at a time. Up to 64 (row, head) pairs there are no
    more of them: a forward of rows with 1,900 positions becomes 6 to 8 % faster, and with 800 it stays as it is. At 128
    pairs and 800 positions a second block would make it slower, by 7 % in registers and 10 % in shared memory. Larger
    batches live on their loops: shared memory makes their forward 2 to 6 % faster.
    """
    pairs = batch * heads
    splits = min(16, triton.next_power_of_2(triton.cdiv(4096 if pairs <= 256 else 2048, pairs)))
    if pairs <= 64:
        return splits, 32, 1, "registers"
    return splits, 32, 1, "memory" if pairs <= 128 else "shared"
