"""The asyncio twin of `client.py`: same names, same results, same rules."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from photon_client.client import DEFAULT_URL, channel_options, check_address
from photon_client.errors import from_rpc
from photon_client.images import ImageLike, encode_image
from photon_client.stream import AsyncStream
from photon_client.wire import (
    KEYS,
    Answer,
    build_request,
    build_status_request,
    build_trace_request,
    read_status,
    read_trace,
)


class AsyncClient:
    """`Client` for asyncio: the same methods, to be awaited. It belongs to the event loop of its first call."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        """`url` is host:port of the server's gRPC door. Nothing is sent before the first question."""
        self.address = check_address(url)
        self._channel: grpc.aio.Channel | None = None

    async def query(
        self,
        image: ImageLike | None,
        question: str,
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """{"answer": str} about the picture; about the words alone when `image` is None."""
        return await self.ask("query", image, question, stream, timeout, options)

    async def caption(
        self,
        image: ImageLike,
        length: str = "normal",
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """{"caption": str}; `length` is short, normal or long."""
        return await self.ask("caption", image, None, stream, timeout, {"length": length, **options})

    async def detect(
        self, image: ImageLike, object: str, *, stream: bool = False, timeout: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """{"objects": [{"x_min", "y_min", "x_max", "y_max"}]} in 0..1 of the displayed picture."""
        return await self.ask("detect", image, object, stream, timeout, options)

    async def point(
        self, image: ImageLike, object: str, *, stream: bool = False, timeout: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """{"points": [{"x", "y"}]} in 0..1 of the displayed picture."""
        return await self.ask("point", image, object, stream, timeout, options)

    async def ask(
        self,
        task: str,
        image: ImageLike | None,
        text: str | None,
        stream: bool = False,
        timeout: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Any task by its name; the four methods above are this one with better names."""
        encoded = None if image is None else await asyncio.to_thread(encode_image, image)
        request = build_request(task, encoded, text, stream, options or {})
        call = self._stub().ModelStreamInfer(iter((request,)), timeout=timeout)
        parts = AsyncStream(call, Answer(task), self.address, timeout)
        return {KEYS[task]: parts} if stream else await parts.result()

    async def status(self, timeout: float | None = None) -> dict[str, Any]:
        """Counters and gauges of the engine, as its supervisor knows them."""
        try:
            return read_status(await self._stub().ModelInfer(build_status_request(), timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, timeout) from None

    async def trace(
        self, ticks: int = 300, seconds: float = 10.0, engine: int | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """What an engine does in its next ticks; see Client.trace."""
        request = build_trace_request(ticks, seconds, engine)
        try:
            return read_trace(await self._stub().ModelInfer(request, timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, timeout) from None

    async def close(self) -> None:
        """Cancel what is still open and close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _stub(self) -> Any:
        if self._channel is None:  # not in the constructor: a channel binds to the running loop
            self._channel = grpc.aio.insecure_channel(self.address, options=channel_options(self.address))
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
