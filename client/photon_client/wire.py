"""The tensor contract: requests and answers as Triton's protos. No input or output happens here."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult, service_pb2

from photon_client.errors import Internal, InvalidArgument, PhotonError, from_text

KEYS = {"query": "answer", "caption": "caption", "detect": "objects", "point": "points"}  # of the result, by task
BOX = ("x_min", "y_min", "x_max", "y_max")
POINT = ("x", "y")


def build_request(task: str, image: bytes | None, text: str | None, stream: bool, options: dict[str, Any]) -> Any:
    """A ModelInferRequest for the model `photon`. Options that are None are left to the server's defaults.

    Raises InvalidArgument for a task whose answer we could not key, and for an option that JSON cannot hold; all else
    is the server's to judge.
    """
    if task not in KEYS:
        raise InvalidArgument(f"task: expected one of {', '.join(KEYS)}, got {task!r}")
    request = service_pb2.ModelInferRequest(model_name="photon")
    _add_string(request, "task", task.encode())
    if text is not None:
        if not isinstance(text, str):
            raise InvalidArgument(f"text_input: expected a string, got {type(text).__name__}")
        _add_string(request, "text_input", _to_utf8(text))
    if image is not None:
        _add_string(request, "image", image)
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(struct.pack("?", stream))
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        _add_string(request, "sampling_parameters", _to_json(given))
    return request


def build_status_request() -> Any:
    """A ModelInferRequest for the model `photon_engine`, answered with the STRING [1] output `status`."""
    request = service_pb2.ModelInferRequest(model_name="photon_engine")
    _add_string(request, "command", b"status")
    return request


def build_trace_request(ticks: int, seconds: float, engine: int | None) -> Any:
    """A ModelInferRequest for the model `photon_engine`, answered with the STRING [1] output `trace`.

    Raises InvalidArgument for a number that its tensor cannot hold; all else is the server's to judge.
    """
    request = service_pb2.ModelInferRequest(model_name="photon_engine")
    _add_string(request, "command", b"trace")
    numbers: list[tuple[str, str, str, float | None]] = [
        ("ticks", "INT32", "<i", ticks),
        ("seconds", "FP32", "<f", seconds),
        ("engine", "INT32", "<i", engine),
    ]
    for name, datatype, form, value in numbers:
        if value is not None:
            try:
                content = struct.pack(form, value)
            except (struct.error, OverflowError) as error:
                raise InvalidArgument(f"{name}: not a number that {datatype} holds: {value!r}") from error
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(content)
    return request


def read_trace(response: Any) -> dict[str, Any]:
    """The trace of a ModelInferResponse. Raises Internal when it holds none."""
    return _from_json(_string(InferResult(response), "trace"), "trace")


def read_status(response: Any) -> dict[str, Any]:
    """The status of a ModelInferResponse. Raises Internal when it holds none."""
    return _from_json(_string(InferResult(response), "status"), "status")


class Answer:
    """What the responses to one request add up to."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.items: list[Any] = []  # text deltas, or dicts of objects or points
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.reasoning: dict[str, Any] | None = None
        self.error: PhotonError | None = None

    def add(self, response: Any) -> list[Any]:
        """The new items of one ModelStreamInferResponse."""
        if response.error_message:
            self.error = from_text(response.error_message)
            return []
        result = InferResult(response.infer_response)
        new = self._items(result)
        self.items += new
        finish_reason, usage = _string(result, "finish_reason"), _string(result, "usage")
        if finish_reason is not None:
            self.finish_reason = finish_reason
        if usage is not None:
            self.usage = _from_json(usage, "usage")
            self.reasoning = self.usage.pop("reasoning", None)
        return new

    @property
    def complete(self) -> bool:
        """Whether nothing but the end of the call is still to come."""
        return self.finish_reason is not None or self.error is not None

    def end(self) -> None:
        """The server has ended the call. Raises the PhotonError that it sent, or Internal if it just stopped."""
        if self.error is not None:
            raise self.error
        if self.finish_reason is None:
            raise Internal("the server ended the call before the answer was complete")

    def result(self) -> dict[str, Any]:
        """The complete answer, keyed as Moondream's own client does, with how it ended."""
        text = self.task in ("query", "caption")
        result: dict[str, Any] = {KEYS[self.task]: "".join(self.items) if text else self.items}
        if self.reasoning is not None:
            result["reasoning"] = self.reasoning
        return {**result, "finish_reason": self.finish_reason, "usage": self.usage}

    def _items(self, result: InferResult) -> list[Any]:
        if self.task == "detect":
            return _rows(result, "objects", BOX)
        if self.task == "point":
            return _rows(result, "points", POINT)
        text = _string(result, "text_output")
        return [text] if text else []


def _add_string(request: Any, name: str, value: bytes) -> None:
    request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(value)) + value)


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text_input: not valid text: {error}") from error


def _to_json(options: dict[str, Any]) -> bytes:
    try:
        return json.dumps(options, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"options {', '.join(options)}: not all are JSON values: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not")


def _string(result: InferResult, name: str) -> str | None:
    array = result.as_numpy(name)
    return None if array is None or array.size == 0 else array.reshape(-1)[0].decode()


def _rows(result: InferResult, name: str, keys: tuple[str, ...]) -> list[dict[str, float]]:
    array = result.as_numpy(name)
    return [] if array is None else [dict(zip(keys, row, strict=True)) for row in array.reshape(-1, len(keys)).tolist()]


def _from_json(text: str | None, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except ValueError as error:
        raise Internal(f"the server's {name} is not JSON: {text!r}") from error
    if not isinstance(value, dict):
        raise Internal(f"the server's {name} is not a JSON object: {text!r}")
    return value
