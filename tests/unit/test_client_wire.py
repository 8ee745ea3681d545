"""Requests and answers as protos, and errors from texts. The protos here are the ones that travel."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import numpy as np
import pytest
from photon_client import AsyncClient, Client, Internal, InvalidArgument, PhotonError, PhotonTimeout, Unavailable
from photon_client.client import channel_options, check_address
from photon_client.errors import from_rpc, from_text
from photon_client.wire import Answer, build_request, build_status_request, read_status
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor


def response(error: str = "", **outputs: Any) -> Any:
    """A ModelStreamInferResponse with string or float outputs."""
    reply = service_pb2.ModelStreamInferResponse(error_message=error)
    for name, value in outputs.items():
        if isinstance(value, str):
            array, datatype = np.array([value.encode()], np.object_), "BYTES"
            raw = serialize_byte_tensor(array).item()
        else:
            array, datatype = np.asarray(value, np.float32), "FP32"
            raw = array.tobytes()
        reply.infer_response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        reply.infer_response.raw_output_contents.append(raw)
    return reply


def sent(request: Any) -> dict[str, Any]:
    """Inputs of a request by name: bytes of a string, or a bool."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert list(tensor.shape) == [1]
        if tensor.datatype == "BOOL":
            values[tensor.name] = struct.unpack("?", raw)[0]
        else:
            assert tensor.datatype == "BYTES" and struct.unpack_from("<I", raw)[0] == len(raw) - 4
            values[tensor.name] = raw[4:]
    return values


USAGE = {"request_id": "a-1", "output_tokens": 3}


def test_request_holds_what_was_given() -> None:
    request = build_request("query", b"\x89PNG\0", "Wie groß?", True, {"seed": 1, "stop": ["."]})
    assert request.model_name == "photon"
    values = sent(request)
    assert json.loads(values.pop("sampling_parameters")) == {"seed": 1, "stop": ["."]}
    assert values == {"task": b"query", "text_input": "Wie groß?".encode(), "image": b"\x89PNG\0", "stream": True}


def test_request_leaves_out_what_was_not_given() -> None:
    assert sent(build_request("caption", None, None, False, {"length": None})) == {"task": b"caption", "stream": False}
    assert sent(build_status_request()) == {"command": b"status"}


def test_numpy_options_become_numbers() -> None:
    options = {"seed": np.int64(7), "spatial_refs": np.array([[0.5, 0.25]])}
    request = build_request("query", None, "x", False, options)
    assert json.loads(sent(request)["sampling_parameters"]) == {"seed": 7, "spatial_refs": [[0.5, 0.25]]}


@pytest.mark.parametrize("options", [{"stop": {"."}}, {"top_p": float("nan")}, {"seed": object()}])
def test_options_that_json_cannot_hold(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        build_request("query", None, "x", False, options)


@pytest.mark.parametrize("text", [3, b"bytes", "\ud800"])
def test_text_that_is_none(text: Any) -> None:
    with pytest.raises(InvalidArgument, match="text_input"):
        build_request("query", None, text, False, {})


@pytest.mark.parametrize("stream", [True, False])
def test_an_unknown_task_is_refused_by_both_clients(stream: bool) -> None:
    """Before anything is sent: nobody listens at that address."""
    names = "one of query, caption, detect, point, got 'translate'"
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=names):
        client.ask("translate", None, "x", stream)

    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1") as twin:
            await twin.ask("translate", None, "x", stream)

    with pytest.raises(ValueError, match=names):
        asyncio.run(ask())


def test_text_deltas_add_up() -> None:
    answer = Answer("caption")
    assert answer.add(response(text_output="A red ")) == ["A red "]
    assert not answer.complete
    last = response(text_output="círcle 🙂", finish_reason="stop", usage=json.dumps(USAGE))
    assert answer.add(last) == ["círcle 🙂"]
    assert answer.complete
    answer.end()
    assert answer.result() == {"caption": "A red círcle 🙂", "finish_reason": "stop", "usage": USAGE}


def test_last_response_may_bring_no_text() -> None:
    answer = Answer("query")
    answer.add(response(text_output="yes"))
    assert answer.add(response(text_output="", finish_reason="length", usage=json.dumps(USAGE))) == []
    assert answer.result()["answer"] == "yes"


def test_reasoning_is_a_key_of_its_own() -> None:
    reasoning = {"text": "look", "grounding": [{"start_idx": 0, "end_idx": 4, "points": [[0.5, 0.5]]}]}
    answer = Answer("query")
    answer.add(response(text_output="yes", finish_reason="stop", usage=json.dumps({**USAGE, "reasoning": reasoning})))
    assert answer.result() == {"answer": "yes", "reasoning": reasoning, "finish_reason": "stop", "usage": USAGE}


def test_objects_are_keyed_and_add_up() -> None:
    answer = Answer("detect")
    first = {"x_min": 0.0, "y_min": 0.25, "x_max": 0.5, "y_max": 1.0}
    assert answer.add(response(text_output="{}", objects=[[0, 0.25, 0.5, 1]])) == [first]
    answer.add(response(objects=np.zeros((1, 4)), finish_reason="stop", usage="{}"))
    assert answer.result()["objects"] == [first, dict.fromkeys(first, 0.0)]


@pytest.mark.parametrize("outputs", [{}, {"points": np.zeros((0, 2))}])
def test_no_points_are_an_empty_list(outputs: dict[str, Any]) -> None:
    answer = Answer("point")
    assert answer.add(response(finish_reason="stop", usage="{}", **outputs)) == []
    assert answer.result() == {"points": [], "finish_reason": "stop", "usage": {}}


def test_points_are_keyed() -> None:
    answer = Answer("point")
    assert answer.add(response(points=[[0.5, 0.25], [1, 0]])) == [{"x": 0.5, "y": 0.25}, {"x": 1.0, "y": 0.0}]


def test_an_error_of_the_server_is_raised_at_the_end() -> None:
    answer = Answer("query")
    answer.add(response(text_output="A "))
    answer.add(response(error="[UNAVAILABLE] the engine went away"))
    assert answer.complete
    with pytest.raises(Unavailable, match="the engine went away"):
        answer.end()


def test_an_answer_without_an_end_is_an_error() -> None:
    answer = Answer("query")
    answer.add(response(text_output="A "))
    with pytest.raises(Internal, match="before the answer was complete"):
        answer.end()


@pytest.mark.parametrize("usage", ["", "no", "[1]"])
def test_usage_that_is_no_json_object(usage: str) -> None:
    with pytest.raises(Internal, match="usage"):
        Answer("query").add(response(text_output="x", finish_reason="stop", usage=usage))


def test_status() -> None:
    assert read_status(response(status='{"running": 2}').infer_response) == {"running": 2}
    with pytest.raises(Internal, match="status"):
        read_status(response().infer_response)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("[INVALID_ARG] seed must be an integer", InvalidArgument, "seed must be an integer"),
        ("[UNAVAILABLE] full; try\nlater", Unavailable, "full; try\nlater"),
        ("[INTERNAL] x", Internal, "x"),
        ("[OTHER] x", Internal, "[OTHER] x"),
        ("a text of [INTERNAL] Triton", Internal, "a text of [INTERNAL] Triton"),
        ("", Internal, "the server gave no reason"),
    ],
)
def test_errors_from_texts(text: str, kind: type[PhotonError], message: str) -> None:
    error = from_text(text)
    assert type(error) is kind
    assert error.message == message
    assert str(error) == f"[{error.code}] {message}"


@pytest.mark.parametrize("text", ["'photon' is not found", "'photon' has no available versions"])
def test_an_unloaded_model_is_unavailable(text: str) -> None:
    assert isinstance(from_text(f"Request for unknown model: {text}"), Unavailable)


def test_errors_are_also_pythons_own() -> None:
    assert issubclass(InvalidArgument, ValueError) and issubclass(PhotonTimeout, TimeoutError)


class Failure:
    """What `from_rpc` reads of a grpc.RpcError."""

    def __init__(self, code: str, details: str) -> None:
        import grpc

        self._code, self._details = grpc.StatusCode[code], details

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect: refused"


@pytest.mark.parametrize(
    ("code", "details", "kind", "message"),
    [
        ("UNAVAILABLE", REFUSED, Unavailable, "no connection to the server at host:1: refused"),
        ("UNAVAILABLE", "Socket closed", Unavailable, "no connection to the server at host:1: Socket closed"),
        ("UNAVAILABLE", "Stream removed (Socket closed)", Unavailable, "at host:1: Socket closed"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", PhotonTimeout, "within 2 s"),
        ("RESOURCE_EXHAUSTED", "too large", InvalidArgument, "too large"),
        ("CANCELLED", "x", Unavailable, "host:1"),
        ("INVALID_ARGUMENT", "[INVALID_ARG] seed", InvalidArgument, "seed"),
        ("NOT_FOUND", "Request for unknown model: 'photon_engine'", Unavailable, "no model ready"),
        ("UNKNOWN", "", Internal, "no reason"),
    ],
)
def test_errors_from_grpc(code: str, details: str, kind: type[PhotonError], message: str) -> None:
    error = from_rpc(Failure(code, details), "host:1", 2)
    assert type(error) is kind
    assert message in error.message


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "host:1", "[::1]:8001"])
def test_addresses(url: str) -> None:
    assert check_address(url) == url


@pytest.mark.parametrize("url", ["", "host", ":8001", "host:", "host:port", "http://host:8000", "host:1/path"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        check_address(url)


def test_no_proxy_for_this_machine_only() -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options("127.0.0.1:8001")
    assert ("grpc.enable_http_proxy", 0) not in channel_options("photon.example:8001")
