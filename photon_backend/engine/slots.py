"""The buffers of a decode slot: allocated once, at fixed addresses, owned by the step that rides in the slot (P3)."""

from __future__ import annotations

import numpy as np
import torch

from photon_backend.model.config import ModelConfig

POISONED = -1  # what a host mirror and a consumed relay cell hold in debug runs; no id is negative


class DecodeSlot:
    """Device buffers of a step over at most B rows, and the pinned host mirrors of what the commit reads.

    rows    int64   [B]     row of each sequence of the step, in batch order; `loaded` is what it holds
    hidden  dtype   [B, D]  last hidden state, before the final LN
    logits  float32 [B, V]
    ids     int64   [B]     sampled ids
    values  float32 [B, 2]  coordinate in [:, 0], or (width, height); one buffer with ids, one copy
    mask    int32   [B, ceil(V / 32)]  legal ids of host grammars

    The mirrors host_rows and host_mask are tensors, for what goes up; host_ids and host_values arrays, for what comes
    down and is read without torch.
    """

    def __init__(self, config: ModelConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        pinned = device.type == "cuda"
        words = -(-config.text.vocab_size // 32)
        self.rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self.loaded: list[int] = []
        self.hidden = torch.zeros(rows, config.text.dim, dtype=dtype, device=device)
        self.logits = torch.zeros(rows, config.text.vocab_size, dtype=torch.float32, device=device)
        self._results = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.ids, self.values = _ids_and_values(self._results)
        self.mask = torch.zeros(rows, words, dtype=torch.int32, device=device)
        self.host_rows = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._host_results = torch.zeros(2, rows, dtype=torch.int64, pin_memory=pinned)
        self.host_ids, self.host_values = (mirror.numpy() for mirror in _ids_and_values(self._host_results))
        self.host_mask = torch.zeros(rows, words, dtype=torch.int32, pin_memory=pinned)

    def load_rows(self, rows: list[int]) -> None:
        """Makes `rows[: len(rows)]` hold these; runs on the compute stream. A steady decode step uploads nothing."""
        if rows != self.loaded:
            number = len(rows)
            self.host_rows[:number] = torch.tensor(rows)
            self.rows[:number].copy_(self.host_rows[:number], non_blocking=True)
            self.loaded = rows

    def poison(self) -> None:
        """Debug: a commit that reads before its copy has landed sees negative ids and no values."""
        self.host_ids.fill(POISONED)
        self.host_values.fill(np.nan)

    def copy_out(self) -> None:
        """Copies results to the mirrors; runs on the copy stream."""
        self._host_results.copy_(self._results, non_blocking=True)

    def upload_mask(self, number: int) -> None:
        """Copies the legal ids of host grammars up; runs on the copy stream."""
        self.mask[:number].copy_(self.host_mask[:number], non_blocking=True)


def _ids_and_values(results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of int64 [2, B]: int64 [B], and float32 [B, 2] in the bytes of the second line."""
    return results[0], results[1].view(torch.float32).view(-1, 2)
