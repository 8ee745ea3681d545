"""CUDA graphs of the text model's layers in short prefills: one launch instead of five a layer.

Such are the prefills of questions behind a cached picture and of questions without one. A host launches some 120
kernels for them one by one, 9.3 ms in all where the GPU works 1.8 (12 tokens, Moondream 2's shape, one H200): that is
their time to the first token. A step that encodes a picture does without: its launches do not count beside that, but
what fills it up to a bucket would.

There is a graph for each bucket of packed tokens. A step is filled up to its bucket with tokens of the scratch row at
position 0, whose KV goes to the scratch page, and with blocks of no queries. So these tokens attend to nothing, nothing
reads them, and they are given zeros as inputs. The head stays eager, some five launches: its shapes depend on the
number of sequences.

P1: upload, replay and head of one prefill, then those of the next, are queued on the compute stream in this order, so
one set of buffers is enough for both slots: what a replay leaves is read by the head just behind it, which writes to
the slot's own buffers, before any other replay. P5: the numbers go up from pinned memory that is used once, whose
allocator keeps it until the copy has run.

The memory pool is the graphs' own. It could be that of the decode graphs, for the reasons above, and would save some
130 MB at Moondream 2's shape, what the layers of 2,048 tokens need at once by the sizes of its tensors, in which the
smaller buckets find room.

Price: that memory, and some 63 MB for inputs and for what the graphs leave their results in; eleven captures, of some
120 kernels each, run once before; up to twice the tokens, above 256 half as many more, and, in attention, a program a
head for each block that the bucket could need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from photon_backend.engine.capture import captured
from photon_backend.engine.fused import FusedText
from photon_backend.kernels.prefill import most_blocks, pack, unpack
from photon_backend.log import progress

log = logging.getLogger("photon.engine")

BUCKETS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # packed tokens


class PrefillGraphs:
    """The layers through buffers that keep their addresses; through graphs of them once they are captured.

    x        dtype [T, D]  inputs of a step of T tokens at most
    numbers  int64         where they belong, as `pack` gives it for the step's bucket
    """

    def __init__(self, fused: FusedText, page_table: Tensor, scratch: int) -> None:
        """page_table int64 [rows, pages]; `scratch`: the row that fills up, the last of them."""
        self.most = BUCKETS[-1]
        self._fused, self._page_table, self._scratch = fused, page_table, scratch
        weight = fused.lm_head.weight
        self._x = torch.zeros(self.most, weight.shape[1], dtype=weight.dtype, device=weight.device)
        numbers = 2 * self.most + 5 * self._blocks(self.most) + scratch
        self._numbers = torch.zeros(numbers, dtype=torch.int64, device=weight.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}

    def layers(self, x: Tensor, sequences: Sequence[tuple[int, int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """As `FusedText.prefill_layers`, on the current stream; and the last token of each sequence, int64 [sequences].

        x [T, D], T at most `most`: inputs, kept; sequences: row, begin, prefix, length. Valid until the next call.
        """
        bucket = next(b for b in BUCKETS if b >= len(x))
        last = self.load(bucket, x, sequences)
        return *self.run(bucket), last

    def load(self, bucket: int, x: Tensor, sequences: Sequence[tuple[int, int, int, int]]) -> Tensor:
        """Copies a step in, filled up to its bucket, and returns the last token of each sequence."""
        host = torch.from_numpy(pack(sequences, (bucket, self._blocks(bucket)), self._scratch))
        numbers = self._numbers[: len(host)]
        numbers.copy_(host.pin_memory() if numbers.is_cuda else host, non_blocking=True)
        self._x[: len(x)].copy_(x)
        return unpack(numbers, bucket, len(sequences)).last

    def run(self, bucket: int) -> tuple[Tensor, Tensor]:
        """What `FusedText.prefill_layers` gives for what was loaded."""
        if bucket not in self._graphs:
            return self._layers(bucket)
        graph, left = self._graphs[bucket]
        graph.replay()
        return left

    def _layers(self, bucket: int) -> tuple[Tensor, Tensor]:
        packed = unpack(self._numbers[: 2 * bucket + 5 * self._blocks(bucket)], bucket, 0)
        real = (packed.rows != self._scratch)[:, None]
        x = torch.where(real, self._x[:bucket], 0.0)  # not in place: what comes in must not grow from step to step
        return self._fused.prefill_layers(x, packed, self._page_table)

    def _blocks(self, bucket: int) -> int:
        return most_blocks(bucket, self._scratch)

    @torch.inference_mode()
    def capture(self) -> None:
        """Makes a graph of each bucket, the largest first: the others fit into its memory.

        The scratch row alone takes part, so no other state changes.
        """
        stream, pool = torch.cuda.Stream(self._x.device), torch.cuda.graph_pool_handle()
        begun = time.monotonic()
        progress.info("capturing CUDA graphs of prefills: %d lengths", len(BUCKETS))
        for bucket in reversed(BUCKETS):
            self.load(bucket, self._x[:1], [(self._scratch, 0, 0, 1)])
            self._graphs[bucket] = captured(partial(self.run, bucket), stream, pool)
            log.info("graph of a prefill of %d tokens captured after %.1f s", bucket, time.monotonic() - begun)
        torch.cuda.empty_cache()  # what was computed outside the pool, on a stream that nobody uses again
