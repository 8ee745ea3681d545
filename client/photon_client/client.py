"""The client for ordinary (threaded) code: one channel for all requests, one gRPC stream (`stream.py`) for each."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from photon_client.errors import InvalidArgument, from_rpc
from photon_client.images import ImageLike, encode_image
from photon_client.stream import Stream
from photon_client.wire import (
    KEYS,
    Answer,
    build_request,
    build_status_request,
    build_trace_request,
    read_status,
    read_trace,
)

DEFAULT_URL = "127.0.0.1:8001"


class Client:
    """Asks a Photon server over gRPC. Threads may share one client.

    The methods return dicts keyed as Moondream's own client keys them, with `finish_reason` (stop, length, cancelled,
    deadline), `usage`, and `reasoning` where it was asked for. With `stream=True` the task's key holds a `Stream` and
    is the only one.

    `image` is a path, encoded bytes, a PIL image or a uint8 array [h, w(, 1, 3 or 4)]. `timeout` is in seconds, from
    the call to the end of the answer; None waits for ever. Options are keywords, named as in the tensor contract:
    temperature, top_p, top_k, max_tokens, seed, stop, max_objects, reasoning, spatial_refs, max_time_ms and others; the
    server checks them.

    Raises InvalidArgument, Unavailable, Internal, PhotonTimeout (all PhotonError); OSError when a file cannot be read.
    """

    def __init__(self, url: str = DEFAULT_URL) -> None:
        """`url` is host:port of the server's gRPC door. Nothing is sent before the first question."""
        self.address = check_address(url)
        self._channel = grpc.insecure_channel(self.address, options=channel_options(self.address))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def query(
        self,
        image: ImageLike | None,
        question: str,
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """{"answer": str} about the picture; about the words alone when `image` is None."""
        return self.ask("query", image, question, stream, timeout, options)

    def caption(
        self,
        image: ImageLike,
        length: str = "normal",
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """{"caption": str}; `length` is short, normal or long."""
        return self.ask("caption", image, None, stream, timeout, {"length": length, **options})

    def detect(
        self, image: ImageLike, object: str, *, stream: bool = False, timeout: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """{"objects": [{"x_min", "y_min", "x_max", "y_max"}]} in 0..1 of the displayed picture."""
        return self.ask("detect", image, object, stream, timeout, options)

    def point(
        self, image: ImageLike, object: str, *, stream: bool = False, timeout: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """{"points": [{"x", "y"}]} in 0..1 of the displayed picture."""
        return self.ask("point", image, object, stream, timeout, options)

    def ask(
        self,
        task: str,
        image: ImageLike | None,
        text: str | None,
        stream: bool = False,
        timeout: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Any task by its name; the four methods above are this one with better names."""
        encoded = None if image is None else encode_image(image)
        request = build_request(task, encoded, text, stream, options or {})
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout)
        parts = Stream(call, Answer(task), self.address, timeout)
        return {KEYS[task]: parts} if stream else parts.result()

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """Counters and gauges of the engine, as its supervisor knows them."""
        try:
            return read_status(self._stub.ModelInfer(build_status_request(), timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, timeout) from None

    def trace(
        self, ticks: int = 300, seconds: float = 10.0, engine: int | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """What an engine does in its next ticks, or in so many seconds if that is less: a document in Chrome's trace
        format, for Perfetto. `engine` is its number; None: that of whichever supervisor answers. One recording at a
        time: Unavailable while there is another."""
        request = build_trace_request(ticks, seconds, engine)
        try:
            return read_trace(self._stub.ModelInfer(request, timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, timeout) from None

    def close(self) -> None:
        """Cancel what is still open and close the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_address(url: str) -> str:
    """host:port, or InvalidArgument: a URL with a scheme is most likely that of the HTTP door."""
    host, _, port = url.rpartition(":")
    if "/" in url or not host or not port.isdigit():
        raise InvalidArgument(f"url: expected host:port of the server's gRPC door, as in {DEFAULT_URL}, got {url!r}")
    return url


def channel_options(address: str) -> list[tuple[str, int]]:
    """No limits on message size but Triton's own; a restarted server is found again within a second."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's own addresses
    return options
