"""Paged keys and values, and the two `attend` functions that read and write them in plain torch.

A page holds S positions of all layers. Position p of a row lives in page `pages[p // S]` at offset `p % S`; the flat
index of a position, page * S + offset, addresses one layer's [P * S, K, E] view. This is the slow path that stays: any
kernel is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from photon_backend.model.config import TextConfig

POISON = 1e4  # finite: a masked position has weight exactly 0, and 0 * NaN would be NaN


class KVCache:
    """k, v: [L, P, S, K, E] of the model's dtype, and one more page that belongs to nobody."""

    def __init__(
        self, config: TextConfig, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.scratch_page = num_pages
        shape = (config.n_layers, num_pages + 1, page_size, config.n_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.page_size = page_size
        self._flat = [(self.k[i].flatten(0, 1), self.v[i].flatten(0, 1)) for i in range(config.n_layers)]

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by flat position: two views [P * S, K, E]."""
        return self._flat[layer]

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages, all layers; source and target are int64 [n], without overlap between them."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def poison(self, pages: list[int]) -> None:
        """Debug: makes any later read of freed pages show in the tokens."""
        self.k[:, pages] = POISON
        self.v[:, pages] = POISON


def page_bytes(config: TextConfig, page_size: int, dtype: torch.dtype) -> int:
    return 2 * config.n_layers * page_size * config.n_kv_heads * config.head_dim * dtype.itemsize


@dataclass
class Segment:
    """The new positions of one sequence in a packed prefill."""

    begin: int  # in the packed step
    end: int
    keys: Tensor | None  # int64 [M]: flat positions of everything it may see; None when all of it is new in this step
    mask: Tensor  # dtype [end - begin, M]: what is added to the scores, 0 or minus infinity


class PagedPrefill:
    """`attend` for x [T, D]: writes T new positions, then each segment attends to its own sequence."""

    def __init__(self, cache: KVCache, write: Tensor, segments: list[Segment]) -> None:
        self._cache, self._write, self._segments = cache, write, segments

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H, E]"""
        keys, values = self._cache.flat(layer)
        keys[self._write] = k
        values[self._write] = v
        parts = []
        for s in self._segments:
            new = slice(s.begin, s.end)
            seen = (k[new], v[new]) if s.keys is None else (keys[s.keys], values[s.keys])
            parts.append(_attention(q[new], *seen, s.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def prefill_mask(cached_len: int, prefix_len: int, length: int, like: Tensor) -> Tensor:
    """What new positions, from `cached_len` on, see of `length` positions whose first `prefix_len` see one another.

    Either nothing is cached or the whole prefix is. Returns [length - cached_len, length] of the dtype of `like`: 0, or
    minus infinity. Made on the device, once a step: so the host neither makes half a megabyte of booleans for a picture
    nor copies it up, and attention need not turn them into such numbers in every layer. Lines begin at multiples of 8
    numbers: on a GPU attention would copy a mask whose lines do not, in every layer too.
    """
    wide = like.new_full((length - cached_len, -(-length // 8) * 8), float("-inf")).triu_(cached_len + 1)
    if cached_len < prefix_len:
        wide[:prefix_len, :prefix_len].zero_()
    return wide[:, :length]


class PagedDecode:
    """`attend` for x [B, D]: one new position per row."""

    def __init__(self, cache: KVCache, page_table: Tensor, position: Tensor) -> None:
        """page_table int64 [B, pages], enough pages for every row's position; position int64 [B] of the new token."""
        size = cache.page_size
        offset = torch.arange(size, device=position.device)
        self._cache = cache
        self._write = page_table.gather(1, (position // size)[:, None])[:, 0] * size + position % size
        self._keys = (page_table[:, :, None] * size + offset).flatten(1)  # [B, M]
        key_position = torch.arange(self._keys.shape[1], device=position.device)
        self._mask = (key_position <= position[:, None])[:, None, None, :]  # [B, 1, 1, M]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, E], k and v [B, K, E] -> [B, H, E]"""
        keys, values = self._cache.flat(layer)
        keys[self._write] = k
        values[self._write] = v
        out = scaled_dot_product_attention(
            q[:, :, None],
            keys[self._keys].transpose(1, 2),
            values[self._keys].transpose(1, 2),
            attn_mask=self._mask,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out[:, :, 0]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [n, H, E], k and v [M, K, E], mask dtype [n, M] -> [n, H, E]"""
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
