"""What our kernels do, in torch operations: the layers of a step, for `benchmarks.kernels` to time beside them.

Every function returns work that takes all layers once. What a step makes once for all layers, masks and lists of pages,
is made once here too, outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from photon_backend.engine.kv_cache import KVCache, PagedDecode, PagedPrefill, Segment, prefill_mask
from photon_backend.model.config import TextConfig
from photon_backend.model.text import rope_tables, turned


def decode_attention(
    config: TextConfig, cache: KVCache, table: Tensor, position: Tensor, qkv: Tensor
) -> Callable[[], None]:
    """Rope, KV write and attention of a decode step: table int64 [B, pages], position int64 [B], qkv
    [B, (H + 2 K) E]."""
    attend, tables = PagedDecode(cache, table, position), rope_tables(position, config)

    def work() -> None:
        for layer in range(config.n_layers):
            attend(layer, *turned(qkv, *tables, config))

    return work


def prefill_attention(
    config: TextConfig, cache: KVCache, table: Tensor, prefix: int, length: int, qkv: Tensor
) -> Callable[[], None]:
    """The same for a prefill of as many sequences as `table` int64 [sequences, pages] has lines, each of `length`
    positions of which the first `prefix` see one another. qkv [sequences * length, (H + 2 K) E]."""
    at = torch.arange(length, device=table.device)
    write = (table[:, at // cache.page_size] * cache.page_size + at % cache.page_size).flatten()
    masks = prefill_mask(0, prefix, length, qkv)
    attend = PagedPrefill(cache, write, [Segment(i * length, (i + 1) * length, None, masks) for i in range(len(table))])
    tables = rope_tables(at.repeat(len(table)), config)

    def work() -> None:
        for layer in range(config.n_layers):
            attend(layer, *turned(qkv, *tables, config))

    return work
