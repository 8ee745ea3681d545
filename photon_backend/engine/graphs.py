"""CUDA graphs of the decode step: one launch instead of some hundred.

A graph is captured per slot (its buffers have fixed addresses), batch bucket and kind, all in one memory pool: steps
run one after another on the compute stream, so they may share every intermediate. A batch that lies between two buckets
is filled up with the scratch row, whose KV goes to the scratch page and whose samples nobody reads.

Price: capture takes some seconds at start, and a batch just above a bucket computes up to twice its rows, which costs
little where a step is a read of the weights.
"""

from __future__ import annotations

import logging
import time
from itertools import product

import torch

from photon_backend.engine.capture import captured
from photon_backend.engine.runner import Runner
from photon_backend.engine.slots import DecodeSlot
from photon_backend.log import progress

log = logging.getLogger("photon.engine")

Key = tuple[DecodeSlot, int, bool, bool]


def buckets_for(rows: int) -> list[int]:
    """Batch sizes up to the first power of two that holds `rows`."""
    buckets = [1]
    while buckets[-1] < rows:
        buckets.append(2 * buckets[-1])
    return buckets


class DecodeGraphs:
    def __init__(self, runner: Runner, slots: list[DecodeSlot], buckets: list[int]) -> None:
        """Captures every graph. The scratch row alone takes part, so no other state changes."""
        self.buckets = buckets
        self._runner = runner
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(runner.device)
        begun = time.monotonic()
        progress.info("capturing CUDA graphs of decode steps: %d batch sizes", len(buckets))
        for batch, slot in product(reversed(buckets), slots):
            for spatial, samples in ((False, True), (True, True), (True, False)):
                self._capture(slot, batch, spatial, samples)
            log.info("graphs of batch %d captured after %.1f s", batch, time.monotonic() - begun)
        self._compile_others(slots[0])

    def bucket(self, number: int) -> int:
        return next(b for b in self.buckets if b >= number)

    def replay(self, slot: DecodeSlot, batch: int, spatial: bool, samples: bool) -> None:
        """Decodes the slot's first `batch` rows, a bucket, on the current stream; with `samples`, samples too."""
        self._graphs[slot, batch, spatial or not samples, samples].replay()

    @torch.inference_mode()
    def _compile_others(self, slot: DecodeSlot) -> None:
        """Prefill, and sampling with a host grammar, run outside the graphs; their kernels are compiled now."""
        slot.load_rows([self._runner.scratch])
        with torch.cuda.stream(self._stream):
            self._runner.compile_prefill(slot)
            for spatial in (False, True):
                self._runner.sample(slot, 1, spatial, masked=True, automata=True)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture(self, slot: DecodeSlot, batch: int, spatial: bool, samples: bool) -> None:
        def step() -> None:
            self._runner.decode(slot, batch, self._runner.rows.page_table.shape[1], spatial)
            if samples:
                self._runner.sample(slot, batch, spatial, masked=False, automata=True)

        slot.load_rows([self._runner.scratch] * batch)
        self._graphs[slot, batch, spatial, samples], _ = captured(step, self._stream, self._pool)
