"""Streams and events, with two implementations of one interface: CUDA, and host streams for a machine without a GPU.

A host stream is one worker thread that runs queued closures in order; an event is a future that the stream completes
when it reaches it. torch releases the GIL inside its operations, so overlap on a CPU is real, and so is its danger:
work that reads a buffer without waiting for the event that fills it reads garbage here as it would on a GPU.

`delay(name)` is called before each closure, on a GPU with the stream current. Tests sleep there (`torch.cuda._sleep` on
a GPU) to make a missing wait show.

Errors: a closure that raises skips the rest of the stream's work up to the next `record`, and that event carries the
exception to whoever waits for it, stream or host. So a fault belongs to the step in which it happened, and to it alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    def wait(self) -> None:
        """Blocks the host until the stream has passed the event; raises what the work before it raised."""

    def ms_since(self, earlier: Any) -> float:
        """Milliseconds of the stream between an earlier event and this one, both passed."""


class Stream(Protocol):
    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Queues `work(*args)`. Its arguments must not be changed afterwards: it may run much later."""

    def record(self) -> Event:
        """An event that is passed when all work queued so far is done."""

    def wait(self, event: Event) -> None:
        """Makes the stream, not the host, wait for an event of another stream."""

    def adopt(self) -> None:
        """Makes it the stream of the calling thread, which then runs work on it without changing streams. One stream
        of a thread at a time; work on others stays right, and so does work from other threads."""

    def close(self) -> None:
        """Waits for the queued work and ends the stream."""


class HostEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()
        self.error: BaseException | None = None
        self.time = 0.0  # seconds, when it was passed

    def complete(self, error: BaseException | None) -> None:
        self.error = error
        self.time = time.perf_counter()
        self._passed.set()

    def wait(self) -> None:
        self._passed.wait()
        if self.error is not None:
            raise self.error

    def ms_since(self, earlier: HostEvent) -> float:
        return (self.time - earlier.time) * 1e3


class HostStream:
    def __init__(self, name: str, delay: Callable[[str], None] | None = None) -> None:
        self.name = name
        self._delay = delay
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name=f"stream-{name}", daemon=True)
        self._worker.start()

    def run(self, work: Callable[..., None], *args: Any) -> None:
        self._queue.put((self._run, (work, args)))

    def record(self) -> HostEvent:
        event = HostEvent()
        self._queue.put((self._pass, (event,)))
        return event

    def wait(self, event: Event) -> None:
        self._queue.put((self._run, (event.wait, ())))

    def adopt(self) -> None:
        pass  # its worker runs nothing else

    def close(self) -> None:
        self._queue.put(None)
        self._worker.join()

    def _work(self) -> None:
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, args = item
                work(*args)
                del work, args, item  # or the last step's tensors would live until the next one comes

    def _run(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._error is not None:
            return
        try:
            if self._delay is not None:
                self._delay(self.name)
            work(*args)
        except BaseException as error:  # carried by the next event
            self._error = error

    def _pass(self, event: HostEvent) -> None:
        error, self._error = self._error, None
        event.complete(error)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event, error: BaseException | None) -> None:
        self.event = event
        self.error = error

    def wait(self) -> None:
        self.event.synchronize()
        if self.error is not None:
            raise self.error

    def ms_since(self, earlier: CudaEvent) -> float:
        return float(earlier.event.elapsed_time(self.event))


class CudaStream:
    """Work is issued at once, on the caller's thread; the GPU runs it in order.

    Entering and leaving a stream took some 25 us of host time per step where every call did it, so a stream that is the
    thread's own already (`adopt`) is not entered again.
    """

    def __init__(self, device: torch.device, name: str, delay: Callable[[str], None] | None = None) -> None:
        self.name = name
        self._delay = delay
        self.stream = torch.cuda.Stream(device)
        self._error: BaseException | None = None

    def run(self, work: Callable[..., None], *args: Any) -> None:
        if self._error is not None:
            return
        try:
            if torch.cuda.current_stream(self.stream.device) == self.stream:
                self._issue(work, args)
            else:
                with torch.cuda.stream(self.stream):
                    self._issue(work, args)
        except BaseException as error:  # carried by the next event
            self._error = error

    def _issue(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._delay is not None:
            self._delay(self.name)
        work(*args)

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        error, self._error = self._error, None
        return CudaEvent(event, error)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)
        self._error = self._error or event.error

    def adopt(self) -> None:
        torch.cuda.set_stream(self.stream)  # and its device

    def close(self) -> None:
        self.stream.synchronize()


def make_streams(device: torch.device, delay: Callable[[str], None] | None = None) -> tuple[Stream, Stream]:
    """(compute, copy) streams of a device."""
    if device.type == "cuda":
        return CudaStream(device, "compute", delay), CudaStream(device, "copy", delay)
    return HostStream("compute", delay), HostStream("copy", delay)
