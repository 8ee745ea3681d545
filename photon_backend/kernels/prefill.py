"""Between a prefill's two linears a layer: rope, KV write and tanh-GELU in one kernel, attention in another.

Tokens of several sequences are packed, T in all. The first kernel has a program for each token; the second one has one
for each head of each block of queries, cut so that no block holds tokens of two sequences. It reads keys and values
from the pages, those of this step too: so it does not matter what is cached, nor how many sequences there are. Queries
lie where their sums will, and each program overwrites its own.

In torch a layer takes some 25 operations, and four more for each further sequence: at Moondream 2's shape a host needs
22 ms for 12 tokens of a prompt behind a cached picture, of which the GPU works 2.5. A layer of one picture takes 12 +
21 us on an H200 where torch takes 99 without the GELU, of four pictures 50 + 67 and 346.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from photon_backend.kernels.attention import rotate_head
from photon_backend.kernels.linear import tanh_gelu

BLOCK_Q = 64  # queries of a program
LOG2_E = 1 / math.log(2)
SHAPE = (64, 4, 2)  # keys that a program looks at together, warps, stages; benchmarks set it


class Packed(NamedTuple):
    """Where T packed tokens belong. On the device, int64."""

    rows: Tensor  # [T]
    positions: Tensor  # [T]
    blocks: Tensor  # [N, 5] of queries: first token, number, row, first position, length of the sequence's prefix
    last: Tensor  # [sequences]: the last token of each


def pack(
    sequences: Sequence[tuple[int, int, int, int]], size: tuple[int, int] | None = None, scratch: int = 0
) -> np.ndarray:
    """The numbers of a `Packed` one after another, for one copy up. sequences: row, begin, prefix, length.

    `size`: tokens and blocks to fill up to, with tokens at position 0 of the row `scratch` and blocks of no queries.
    ValueError when the sequences need more.
    """
    rows = np.concatenate([np.full(length - begin, row) for row, begin, _, length in sequences])
    positions = np.concatenate([np.arange(begin, length) for _, begin, _, length in sequences])
    ends = np.cumsum([length - begin for _, begin, _, length in sequences])
    blocks = [
        (end - length + first, min(BLOCK_Q, length - first), row, first, prefix)
        for end, (row, begin, prefix, length) in zip(ends, sequences, strict=True)
        for first in range(begin, length, BLOCK_Q)
    ]
    tokens, places = size or (len(rows), len(blocks))
    if len(rows) > tokens or len(blocks) > places:
        raise ValueError(f"{len(rows)} tokens in {len(blocks)} blocks, {tokens} in {places} at most")
    more = tokens - len(rows)
    filled = np.zeros((places, 5), np.int64)
    filled[: len(blocks)] = blocks
    return np.concatenate([rows, np.full(more, scratch), positions, np.zeros(more, np.int64), filled.ravel(), ends - 1])


def most_blocks(tokens: int, sequences: int) -> int:
    """Blocks that up to so many tokens of up to so many sequences can need: as many sequences as there can be, and a
    block more for each `BLOCK_Q` of the tokens that are left beside the first of each."""
    firsts = min(tokens, sequences)
    return firsts + (tokens - firsts) // BLOCK_Q


def unpack(numbers: Tensor, tokens: int, sequences: int) -> Packed:
    """Views of what `pack` gave, of so many tokens, those that fill up among them, and sequences."""
    rows, positions, blocks, last = numbers.split([tokens, tokens, len(numbers) - 2 * tokens - sequences, sequences])
    return Packed(rows, positions, blocks.view(-1, 5), last)


@triton.jit(do_not_specialize=["rows", "positions"])  # views, aligned or not
def _spread(
    merged, joined, keys, values, rows, positions, page_table, num_pages, cos_table, sin_table, heads, kv_heads, hidden,
    PAGE: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Token t of merged [T, q | k | v | MLP]: rotated q and GELU(MLP) into joined [T, q | MLP], k and v into its page.

    HEADS, KV_HEADS: at least so many; heads beyond the last one do what that one does.
    """
    t = tl.program_id(0)
    position = tl.load(positions + t)
    page = tl.load(page_table + tl.load(rows + t) * num_pages + position // PAGE)
    e = tl.arange(0, E)
    pair = tl.where(e < HALF, e, tl.where(e < 2 * HALF, e - HALF, 0))
    cos = tl.load(cos_table + position * HALF + pair)[None, :]
    sin = tl.load(sin_table + position * HALF + pair)[None, :]
    e = e[None, :]
    line = merged + t.to(tl.int64) * ((heads + 2 * kv_heads) * E + hidden)
    out = joined + t.to(tl.int64) * (heads * E + hidden)
    h = tl.minimum(tl.arange(0, HEADS), heads - 1)[:, None] * E
    tl.store(out + h + e, rotate_head(line + h, e, cos, sin, HALF).to(joined.dtype.element_ty))
    h = tl.minimum(tl.arange(0, KV_HEADS), kv_heads - 1)[:, None] * E
    place = (page * PAGE + position % PAGE) * kv_heads * E + h + e
    line += heads * E
    tl.store(keys + place, rotate_head(line + h, e, cos, sin, HALF).to(keys.dtype.element_ty))
    line += kv_heads * E
    tl.store(values + place, tl.load(line + h + e))
    line += kv_heads * E
    out += heads * E
    for d0 in range(0, hidden, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        x = tl.load(line + d, d < hidden, 0.0).to(tl.float32)
        tl.store(out + d, tanh_gelu(x).to(joined.dtype.element_ty), d < hidden)


def spread(
    merged: Tensor, joined: Tensor, keys: Tensor, values: Tensor, packed: Packed, page_table: Tensor,
    rope: tuple[Tensor, Tensor], heads: int, page_size: int,
) -> None:  # fmt: skip
    """Writes new keys and values to their pages, and to joined what attention and the second linear begin with.

    merged [T, (H + 2 K) E + F] before rope and GELU; joined [T, H E + F], written: rotated queries, activated MLP;
    keys, values [P * S, K, E] of one layer; page_table int64 [rows, pages]; rope: cos and sin float32 [context,
    rot_dim / 2]. All contiguous.
    """
    _, kv_heads, head_dim = keys.shape
    _spread[(len(merged),)](
        merged,
        joined,
        keys,
        values,
        packed.rows,
        packed.positions,
        page_table,
        page_table.shape[1],
        *rope,
        heads,
        kv_heads,
        joined.shape[1] - heads * head_dim,
        PAGE=page_size,
        E=head_dim,
        HALF=rope[0].shape[1],
        HEADS=triton.next_power_of_2(heads),
        KV_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK=1024,
        num_warps=4,
    )


@triton.jit
def _look(
    state, q, s, keys, values, table, position, prefix, end, kv_heads, kv_head, scale,
    PAGE: tl.constexpr, E: tl.constexpr, ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """The queries look at the keys of positions s; ALL_SEEN: each of them at all of these."""
    top, total, acc = state
    e = tl.arange(0, E)[None, :]
    if ALL_SEEN:
        page = tl.load(table + s // PAGE)
        cell = ((page * PAGE + s % PAGE) * kv_heads + kv_head)[:, None] * E + e
        k, v = tl.load(keys + cell), tl.load(values + cell)
        score = tl.dot(q, tl.trans(k))
    else:
        page = tl.load(table + s // PAGE, s < end, 0)
        cell = ((page * PAGE + s % PAGE) * kv_heads + kv_head)[:, None] * E + e
        k, v = tl.load(keys + cell, (s < end)[:, None], 0.0), tl.load(values + cell, (s < end)[:, None], 0.0)
        seen = (s[None, :] <= position[:, None]) | ((s < prefix)[None, :] & (position < prefix)[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))  # finite: position 0 is among the first, and all see it
    weight = tl.exp2(score * scale - (new_top * scale)[:, None])
    shrink = tl.exp2((top - new_top) * scale)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
    return new_top, total * shrink + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["blocks"])
def _attend(
    joined, stride, keys, values, blocks, page_table, num_pages, heads, kv_heads, scale,
    PAGE: tl.constexpr, E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`scale`: of scores, whose power of 2 is a weight. Keys that every query sees come first and need no mask."""
    block = blocks + tl.program_id(0) * 5
    h = tl.program_id(1)
    kv_head = h // (heads // kv_heads)
    first, number, row = tl.load(block), tl.load(block + 1).to(tl.int32), tl.load(block + 2)
    begin, prefix = tl.load(block + 3).to(tl.int32), tl.load(block + 4).to(tl.int32)
    i, e, key = tl.arange(0, BLOCK_Q), tl.arange(0, E), tl.arange(0, BLOCK_K)
    position = begin + i
    place = joined + (first + i)[:, None] * stride + h * E + e[None, :]
    q = tl.load(place, i[:, None] < number, 0.0)
    table = page_table + row * num_pages
    end = tl.maximum(begin + number, tl.where(begin < prefix, prefix, 0))
    all_seen = tl.where(begin < prefix, prefix, begin + 1) // BLOCK_K * BLOCK_K
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    state = top, tl.zeros((BLOCK_Q,), tl.float32), tl.zeros((BLOCK_Q, E), tl.float32)
    for s0 in range(0, all_seen, BLOCK_K):
        state = _look(
            state, q, s0 + key, keys, values, table, position, prefix, end, kv_heads, kv_head, scale, PAGE, E, True
        )
    for s0 in range(all_seen, end, BLOCK_K):
        state = _look(
            state, q, s0 + key, keys, values, table, position, prefix, end, kv_heads, kv_head, scale, PAGE, E, False
        )
    _, total, acc = state
    tl.store(place, (acc / total[:, None]).to(joined.dtype.element_ty), i[:, None] < number)


def attend(
    joined: Tensor, keys: Tensor, values: Tensor, packed: Packed, page_table: Tensor, heads: int, page_size: int
) -> None:
    """Every token attends to its sequence: to what comes before it, and within the prefix to all of that.

    joined [T, H E + F]: rotated queries, which the result overwrites; the others as for `spread`, which comes first.
    """
    _, kv_heads, head_dim = keys.shape
    block_k, warps, stages = SHAPE
    _attend[(len(packed.blocks), heads)](
        joined,
        joined.stride(0),
        keys,
        values,
        packed.blocks,
        page_table,
        page_table.shape[1],
        heads,
        kv_heads,
        head_dim**-0.5 * LOG2_E,
        PAGE=page_size,
        E=head_dim,
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
