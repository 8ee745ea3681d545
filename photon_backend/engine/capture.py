"""How work becomes a CUDA graph, whatever it is: decode steps, short prefills, pieces of pictures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger("photon.engine")

T = TypeVar("T")


def can_capture() -> bool:
    """Not under torch's allocator `cudaMallocAsync`: what it allocates during a capture belongs to the graph and has no
    address of its own yet, Triton's kernels refuse it, and torch ends the process as it gives up the capture.
    """
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return True
    log.warning("no CUDA graphs under the allocator cudaMallocAsync: steps are launched kernel by kernel")
    return False


def captured(
    work: Callable[[], T], stream: torch.cuda.Stream, pool: torch.cuda._POOL_HANDLE
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `work`, and what that returned: tensors in the graph's memory, a part of `pool`, where it leaves them.

    The work runs once before, on the same stream: that compiles kernels and lets libraries load and allocate, which a
    capture must not.
    """
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        left = work()
    return graph, left
