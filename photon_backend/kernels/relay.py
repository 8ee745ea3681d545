"""The start of a decode step in one kernel: each row's next token becomes its embedding, its position goes one on, and
position and pages are laid out in batch order, so that attention need not look up the row first.

`engine.runner.relay_in_torch` does the same in some eight launches: 1.7 us here, 14 there, at 1 and at 64 rows of
Moondream 2's shape on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _relay(
    rows, next_tokens, positions, page_table, embeddings, x, step_positions, step_pages, scratch, width, num_pages,
    BLOCK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows + b)
    token = tl.load(next_tokens + row)
    position = tl.load(positions + row)
    d = tl.arange(0, BLOCK)
    tl.store(x + b * width + d, tl.load(embeddings + token * width + d, d < width, 0.0), d < width)
    p = tl.arange(0, PAGES)
    tl.store(step_pages + b * num_pages + p, tl.load(page_table + row * num_pages + p, p < num_pages, 0), p < num_pages)
    tl.store(step_positions + b, position)
    tl.store(positions + row, tl.where(row == scratch, 0, position + 1))


def relay(
    rows: Tensor, next_token: Tensor, position: Tensor, page_table: Tensor, embeddings: Tensor, scratch: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """x[b] = embeddings[next_token[rows[b]]]; position[rows[b]] += 1, but stays 0 in the row `scratch`.

    rows int64 [B]; by row: next_token, position int64 [R], page_table int64 [R, P]; embeddings [V, D]; x [B, D],
    written. All contiguous. Returns the positions before that, int64 [B], and lines of the page table, int64 [B, P].
    """
    batch, width = x.shape
    positions, pages = torch.empty_like(rows), page_table.new_empty(batch, page_table.shape[1])
    _relay[(batch,)](
        rows,
        next_token,
        position,
        page_table,
        embeddings,
        x,
        positions,
        pages,
        scratch,
        width,
        pages.shape[1],
        BLOCK=triton.next_power_of_2(width),
        PAGES=triton.next_power_of_2(pages.shape[1]),
        num_warps=4,
    )
    return positions, pages
