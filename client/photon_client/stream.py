"""Answers that come in parts, and how they are left early.

One gRPC stream for each request: cancelling a stream cancels all requests on it, so requests never share one. The
request side is closed at once, so the server ends the call when the answer is complete. A complete answer is read on to
the end of its call; only an incomplete one is cancelled.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from photon_client.errors import from_rpc
from photon_client.wire import Answer


class _Parts:
    """What both kinds of stream have: the call, the answer so far, and what of it was not taken yet."""

    def __init__(
        self, call: Any, answer: Answer, address: str, timeout: float | None, cancel: Callable[[], object]
    ) -> None:
        self._call = call
        self._answer = answer
        self._address = address
        self._timeout = timeout
        self._pending: deque[Any] = deque()
        self._over = False
        # Runs when the stream is forgotten, too. Cancelling a call that is over does nothing.
        self._cancel = weakref.finalize(self, cancel)

    @property
    def finish_reason(self) -> str | None:
        """None until the end; then stop, length, cancelled (also: left early) or deadline."""
        return self._answer.finish_reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """None until the end; then the server's counts and times."""
        return self._answer.usage

    @property
    def reasoning(self) -> dict[str, Any] | None:
        """None until the end, and when no reasoning was asked for; then its text and grounding."""
        return self._answer.reasoning

    def close(self) -> None:
        """Cancel the request unless its answer is complete. May be called twice."""
        if not self._over:
            self._over = True
            self._pending.clear()
            if not self._answer.complete:
                self._answer.finish_reason = "cancelled"
            self._cancel()

    def _finish(self) -> bool:
        """The call has ended. Whether there still is something to take."""
        self._over = True
        self._answer.end()
        return bool(self._pending)


class Stream(_Parts, Iterator[Any]):
    """The parts of an answer, as they come: text deltas (str), or objects or points (dict).

    Leaving a `for` loop over it early, `close()`, or forgetting the stream cancels the request on the server. Iterating
    raises PhotonError. One thread at a time may iterate; any thread may close.
    """

    def __init__(self, call: Any, answer: Answer, address: str, timeout: float | None) -> None:
        super().__init__(call, answer, address, timeout, call.cancel)

    def __iter__(self) -> Iterator[Any]:
        # A generator of its own for each loop, because it is closed at once when the loop is left.
        try:
            while self._fill():
                yield self._pending.popleft()
        finally:
            self.close()

    def __next__(self) -> Any:
        if not self._fill():
            raise StopIteration
        return self._pending.popleft()

    def result(self) -> dict[str, Any]:
        """Wait for the whole answer, whatever part of it was already taken. Raises PhotonError."""
        while self._fill():
            self._pending.clear()
        return self._answer.result()

    def _fill(self) -> bool:
        """Wait until there is something to take, or the end. Whether there is something to take."""
        if self._pending or self._over:
            return bool(self._pending)
        try:
            for response in self._call:
                self._pending += self._answer.add(response)
                if self._pending and not self._answer.complete:
                    return True
        except grpc.RpcError as error:
            if self._over:  # closed by another thread
                return False
            self._over = True
            raise from_rpc(error, self._address, self._timeout) from None
        except BaseException:
            self.close()
            raise
        return self._finish()


class AsyncStream(_Parts, AsyncIterator[Any]):
    """The parts of an answer, as they come: text deltas (str), or objects or points (dict).

    Leaving an `async for` loop over it early, `close()`, forgetting the stream, or cancelling the task that waits for
    it cancels the request on the server. Iterating raises PhotonError. One task at a time may iterate.
    """

    def __init__(self, call: Any, answer: Answer, address: str, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(call, answer, address, timeout, lambda: _cancel_in(loop, call))

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Loop(self)

    async def __anext__(self) -> Any:
        if not await self._fill():
            raise StopAsyncIteration
        return self._pending.popleft()

    async def result(self) -> dict[str, Any]:
        """Wait for the whole answer, whatever part of it was already taken. Raises PhotonError."""
        while await self._fill():
            self._pending.clear()
        return self._answer.result()

    async def _fill(self) -> bool:
        """Wait until there is something to take, or the end. Whether there is something to take."""
        if self._pending or self._over:
            return bool(self._pending)
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._pending += self._answer.add(response)
                if self._pending and not self._answer.complete:
                    return True
        except grpc.RpcError as error:
            self._over = True
            raise from_rpc(error, self._address, self._timeout) from None
        except BaseException:  # asyncio.CancelledError among them
            self.close()
            raise
        return self._finish()


class _Loop(AsyncIterator[Any]):
    """One `async for` over a stream. It dies with the loop, however that is left, and closes the stream then."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Any:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.close()


def _cancel_in(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    """Cancel a call from whatever thread the garbage collector runs in. A closed loop has no calls left."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call.cancel)
