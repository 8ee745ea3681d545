"""Every way into the server, each as one function `ask(server, **request) -> Answer`.

A request has `task`, `text_input`, `image` (bytes) and options; errors come as `ServerError` with Triton's text.
"""

from __future__ import annotations

import base64
import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
STRINGS = ("task", "text_input", "image", "sampling_parameters")


class ServerError(Exception):
    """`code` is HTTP's or gRPC's, where the door has one."""

    def __init__(self, message: str, code: object = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Answer:
    text: str = ""
    objects: list[list[float]] | None = None
    points: list[list[float]] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    pieces: list[str] = field(default_factory=list)

    def add(self, values: dict[str, Any]) -> None:
        """Adds one response: name of the output to its value."""
        assert self.finish_reason is None, "a response after the last one"
        if "text_output" in values:
            self.pieces.append(values["text_output"])
            self.text += values["text_output"]
        for name, width in (("objects", 4), ("points", 2)):
            if name in values:
                rows = np.asarray(values[name], dtype=np.float32).reshape(-1, width).tolist()
                setattr(self, name, (getattr(self, name) or []) + rows)
        self.finish_reason = values.get("finish_reason")
        if "usage" in values:
            self.usage = json.loads(values["usage"])

    def same_result(self, other: Answer) -> bool:
        """Equal but for times, the request's name and the last bit of a coordinate."""
        assert self.usage and other.usage
        if (self.finish_reason, self.usage["output_tokens"]) != (other.finish_reason, other.usage["output_tokens"]):
            return False
        if self.objects is None and self.points is None:
            return self.text == other.text
        return _close(self.objects, other.objects) and _close(self.points, other.points)


def _close(mine: list[list[float]] | None, theirs: list[list[float]] | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return np.shape(mine) == np.shape(theirs) and np.allclose(mine, theirs, rtol=0, atol=1e-6)


def tensors(request: dict[str, Any]) -> list[triton.InferInput]:
    """What has an input tensor, and the rest as JSON in sampling_parameters."""
    known = {name: request[name] for name in STRINGS if request.get(name) is not None}
    options = {key: value for key, value in request.items() if key not in (*STRINGS, "stream")}
    if options:
        known["sampling_parameters"] = json.dumps(options)
    inputs = []
    for name, value in known.items():
        data = value if isinstance(value, bytes) else value.encode()
        tensor = triton.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([data], dtype=np.object_))
        inputs.append(tensor)
    if "stream" in request:
        tensor = triton.InferInput("stream", [1], "BOOL")
        tensor.set_data_from_numpy(np.array([request["stream"]]))
        inputs.append(tensor)
    return inputs


def values_of(result: triton.InferResult) -> dict[str, Any]:
    found = {}
    for output in result.get_response().outputs:
        array = result.as_numpy(output.name)
        found[output.name] = array[0].decode() if output.datatype == "BYTES" else array
    return found


def grpc_stream(server: Any, **request: Any) -> Answer:
    """ModelStreamInfer on photon."""
    answer = Answer()
    for values in grpc_responses(server, request):
        answer.add(values)
    return answer


def grpc_responses(server: Any, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    replies: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: replies.put(error or result))
        try:
            client.async_stream_infer("photon", tensors(request), enable_empty_final_response=True)
            while True:
                reply = replies.get(timeout=120)
                if isinstance(reply, InferenceServerException):
                    raise ServerError(reply.message(), reply.status())
                values = values_of(reply)
                final = reply.get_response().parameters["triton_final_response"].bool_param
                assert values, "a response without outputs: FINAL must ride on the last data response"
                assert final == ("finish_reason" in values)
                yield values
                if final:
                    return
        finally:
            client.stop_stream(cancel_requests=True)


def model_infer(server: Any, **request: Any) -> Answer:
    """ModelInfer on photon_unary."""
    answer = Answer()
    with triton.InferenceServerClient(server.grpc_url) as client:
        try:
            answer.add(values_of(client.infer("photon_unary", tensors(request))))
        except InferenceServerException as error:
            raise ServerError(error.message(), error.status()) from error
    return answer


def generate(server: Any, model: str = "photon", **request: Any) -> Answer:
    """HTTP generate; options as request parameters, the picture as base64."""
    answer = Answer()
    answer.add(json.loads(post(server, f"/v2/models/{model}/generate", body(request))))
    return answer


def generate_stream(server: Any, **request: Any) -> Answer:
    """HTTP generate_stream: server-sent events."""
    answer = Answer()
    for line in post(server, "/v2/models/photon/generate_stream", body(request)).decode().splitlines():
        if line:
            assert line.startswith("data: "), line
            values = json.loads(line.removeprefix("data: "))
            if "error" in values:
                raise ServerError(values["error"], 200)
            answer.add(values)
    return answer


def infer(server: Any, **request: Any) -> Answer:
    """HTTP /infer on photon_unary; inputs as JSON, options as parameters."""
    given = body(request)
    inputs = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [given.pop(name)]}
        for name in STRINGS
        if name in given
    ]
    document = json.loads(post(server, "/v2/models/photon_unary/infer", {"inputs": inputs, "parameters": given}))
    answer = Answer()
    answer.add({o["name"]: o["data"][0] if o["datatype"] == "BYTES" else o["data"] for o in document["outputs"]})
    return answer


def body(request: dict[str, Any]) -> dict[str, Any]:
    """JSON of a request: bytes as base64, lists in sampling_parameters."""
    given = {key: value for key, value in request.items() if value is not None}
    if isinstance(given.get("image"), bytes):
        given["image"] = base64.b64encode(given["image"]).decode()
    lists = {key: given.pop(key) for key in list(given) if isinstance(given[key], (list, dict))}
    if lists:
        given["sampling_parameters"] = json.dumps(lists)
    return given


def post(server: Any, path: str, document: object, headers: dict[str, str] | None = None) -> bytes:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    http = urllib.request.Request(server.http_url + path, data, headers or {})
    try:
        with OPENER.open(http, timeout=120) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        text = error.read().decode().removeprefix("data: ")  # of generate_stream
        raise ServerError(json.loads(text)["error"] if text.startswith("{") else text, error.code) from error


def status(server: Any) -> dict[str, Any]:
    """What photon_engine says."""
    document = json.loads(post(server, "/v2/models/photon_engine/infer", {"inputs": []}))
    return json.loads(document["outputs"][0]["data"][0])


def idle(server: Any) -> bool:
    """Nothing at the engine, as far as the last heartbeat knows."""
    return _quiet(status(server))


def _quiet(status: dict[str, Any]) -> bool:
    return status["running"] + status["waiting"] + status["rows_in_use"] == 0


def settled(server: Any) -> dict[str, Any]:
    """The status in which all that was asked before is counted: nothing runs, and five heartbeats said the same.

    A status is as old as the last heartbeat, so the first one that a test reads may not know yet what the test before
    it did. Whoever compares counters with earlier ones, or waits for a number of running requests, begins here.
    """
    last, since = status(server), time.monotonic()
    end = since + 60
    while time.monotonic() - since < 1.0 or not _quiet(last):
        time.sleep(0.05)
        now = status(server)
        if now != last:
            last, since = now, time.monotonic()
        assert time.monotonic() < end, f"the server does not come to rest: {last}"
    return last


DOORS = {
    "grpc_stream": grpc_stream,
    "model_infer": model_infer,
    "generate": generate,
    "generate_stream": generate_stream,
    "infer": infer,
}


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Returns the seconds that a condition took; `seconds` is generous, for a machine that does other things."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begun
