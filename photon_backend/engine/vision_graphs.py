"""The vision encoder in pieces, each a CUDA graph: one launch for the crops of a piece instead of some 300.

A piece is the crops of one picture, or of several whole ones, at most as many as one picture can have (13 of Moondream
2). So no picture lies in two pieces, and its features are stitched straight from the buffer that the graph filled.
Stitching, pooling and projection stay eager: they depend on the tiling, of which there are dozens.

P1: pixels, replay and stitching of one piece, then those of the next, are queued on the compute stream in this order,
so one input and one output buffer are enough for both slots.

Only the way of the pixels over PCIe is not: they go up on the copy stream, into one of two staging buffers. The compute
stream waits for them, takes them into the graph's input, and an event then lets the staging buffer be written again.
The copy stream brings the results of the step before first, so the first piece is there 0.15 ms after that step; the
others go up beside the encoder. Worth 0.6 of 79 requests/s to a client alone, against pixels on the compute stream; 64
clients make the same, and a third stream, beside the step before, gains nothing more (docs/numbers.md).

The engine thread puts the pixels into pinned memory, 0.43 MB a crop: were it done where they arrive, every waiting
picture would hold pinned memory, which is never given back.

Price, at Moondream 2's shape in bfloat16: 12 graphs, of 2 to 13 crops, some 300 kernels each, run once before their
capture, in 1.1 to 2 s on an H200. Memory: 38 MB of buffers, 14 blocks of 8 MB pinned on the host (fewer with fewer than
7 rows), and a pool for what the largest piece needs at once, a quarter of a GB by the sizes of its tensors, in which
the others find room. It is not the pool of the decode graphs, though it could be: all replays run on one stream, and
nothing in either pool is read after its replay. It would save what a decode step needs, some MB. Bytes of the graphs
themselves were not measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from photon_backend.engine.capture import captured
from photon_backend.log import progress
from photon_backend.model.vision import Vision

log = logging.getLogger("photon.engine")

LEAST = 2  # crops of a picture: the global one and a tile


def pieces(counts: Sequence[int], most: int) -> list[slice]:
    """Cuts pictures, in their order, into as few pieces as whole ones allow.

    counts: crops of each picture; most: of a piece. ValueError when a picture alone has more.
    """
    cut: list[slice] = []
    begin = held = 0
    for i, count in enumerate(counts):
        if count > most:
            raise ValueError(f"a picture of {count} crops, {most} at most")
        if held + count > most:
            cut.append(slice(begin, i))
            begin, held = i, 0
        held += count
    return [*cut, slice(begin, len(counts))]


def most_pieces(pictures: int, crops: int, most: int) -> int:
    """How many pieces up to so many pictures, of up to so many crops together, can be.

    Each holds a picture, and two that follow each other have more than `most` crops.
    """
    return min(pictures, 2 * (crops // (most + 1)) + 1)


class PictureEncoder:
    """Encodes pictures through buffers that keep their addresses; through graphs of its steps once they are captured.

    crops     uint8 [M, side, side, 3]  of a piece, M crops at most
    features  dtype [M, N, W]           of that piece, behind the encoder
    staging   two as `crops`, and for each the event after which it may be written; on a GPU
    """

    def __init__(
        self,
        vision: Vision,
        encode_crops: Callable[[Tensor], Tensor] | None = None,
        uploads: torch.cuda.Stream | None = None,
    ) -> None:
        """`encode_crops`: instead of the encoder's own, see fused_vision.py. `uploads`: the copy stream; None: another
        one, where there is a GPU."""
        config, weight = vision.config, vision.pos_emb
        self.most = 1 + config.max_crops
        self._vision = vision
        self._encode_crops = encode_crops or vision.encode_crops
        shape = (self.most, config.crop_size, config.crop_size, config.in_channels)
        self._crops = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
        self._features = torch.zeros(
            self.most, config.num_patches, config.enc_dim, dtype=weight.dtype, device=weight.device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._uploads: torch.cuda.Stream | None = None
        if weight.is_cuda:
            self._uploads = uploads or torch.cuda.Stream(weight.device)
            self._staging = cycle([(torch.empty_like(self._crops), torch.cuda.Event()) for _ in range(2)])
            self._uploads.wait_stream(torch.cuda.current_stream(weight.device))  # whose memory it was

    def encode(self, pictures: Sequence[np.ndarray], tilings: Sequence[tuple[int, int]]) -> Tensor:
        """Embeddings [pictures, N, D], on the current stream: as `Vision.encode`, but for rounding in other batches.

        pictures: uint8 [C, side, side, 3] each, the global crop first, C = 1 + rows * columns of its tiling.
        """
        merged: list[Tensor] = []
        for piece in pieces([len(picture) for picture in pictures], self.most):
            count = self.load(pictures[piece])
            self.run(count)
            merged += self._vision.merge_all(self._features[:count], tilings[piece])
        return self._vision.project(merged)

    def load(self, pictures: Sequence[np.ndarray]) -> int:
        """Copies the crops of one piece in and returns how many they are.

        One pass over the pixels, straight into pinned memory, whose allocator keeps it until the copy has run.
        """
        count = sum(len(picture) for picture in pictures)
        host = self._host(count)
        np.concatenate(pictures, out=host.numpy())
        if self._uploads is None:
            self._crops[:count].copy_(host)
        else:
            self._bring(host, self._uploads)
        return count

    def _bring(self, host: Tensor, uploads: torch.cuda.Stream) -> None:
        """Copies pinned pixels in: up on the copy stream, then, on the current stream, from there."""
        staging, taken = next(self._staging)
        count, here = len(host), torch.cuda.current_stream(uploads.device)
        with torch.cuda.stream(uploads):
            uploads.wait_event(taken)
            staging[:count].copy_(host, non_blocking=True)
        here.wait_stream(uploads)
        self._crops[:count].copy_(staging[:count])
        taken.record(here)

    def run(self, count: int) -> None:
        """Features of the first `count` crops."""
        graph = self._graphs.get(count)
        if graph is not None:
            graph.replay()
        else:
            self._features[:count].copy_(self._encode_crops(self._crops[:count]))

    def _host(self, count: int) -> Tensor:
        """Of one size for all, so that the allocator has only one kind of block to keep."""
        return torch.empty(self._crops.shape, dtype=torch.uint8, pin_memory=self._crops.is_cuda)[:count]

    def pin_ahead(self, steps: int, pictures: int, crops: int) -> None:
        """Makes the allocator keep pinned memory for so many steps, each of up to so many pictures, of which all but
        the last have fewer than `crops` crops."""
        blocks = steps * most_pieces(pictures, crops - 1 + self.most, self.most)
        _ = [self._host(1) for _ in range(blocks)]  # all at once

    @torch.inference_mode()
    def capture(self) -> None:
        """A graph of each number of crops that pictures have, the largest first: the others fit into its memory."""
        stream, pool = torch.cuda.Stream(self._crops.device), torch.cuda.graph_pool_handle()
        begun = time.monotonic()
        progress.info("capturing CUDA graphs of pictures: %d numbers of crops", self.most - LEAST + 1)
        for count in range(self.most, LEAST - 1, -1):
            self._graphs[count], _ = captured(partial(self.run, count), stream, pool)
            log.info("graph of %d crops captured after %.1f s", count, time.monotonic() - begun)
        torch.cuda.empty_cache()  # what was computed outside the pool, on a stream that nobody uses again
