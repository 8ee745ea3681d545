"""Malformed input of each kind: the right code, a sentence that names the field, and the next good request works."""

from __future__ import annotations

import io
import json
from typing import Any

import doors
import numpy as np
import pytest
import tritonclient.grpc as triton
from doors import DOORS, ServerError
from PIL import Image

from photon_backend.serve import Server

GOOD = {"task": "caption", "max_tokens": 3, "temperature": 0}

# name: what is added to a good request, words of the error
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "task": ({"task": "translate"}, ["task", "translate"]),
    "no question": ({"task": "query", "text_input": None}, ["text_input"]),
    "no object": ({"task": "detect", "text_input": None}, ["text_input"]),
    "no picture": ({"task": "detect", "text_input": "cat", "image": None}, ["image"]),
    "empty picture": ({"image": b""}, ["image"]),
    "not a picture": ({"image": b"\x00\x01 this is not a picture"}, ["image"]),
    "unknown option": ({"temprature": 0.5}, ["temprature"]),
    "temperature": ({"temperature": -1}, ["temperature"]),
    "top_p": ({"top_p": 2}, ["top_p"]),
    "max_tokens": ({"max_tokens": 0}, ["max_tokens"]),
    "seed": ({"seed": -1}, ["seed"]),
    "length": ({"length": "endless"}, ["length"]),
    "max_objects": ({"task": "point", "text_input": "cat", "max_objects": 0}, ["max_objects"]),
    "stop": ({"stop": [""]}, ["stop"]),
    "spatial_refs": ({"task": "query", "text_input": "?", "spatial_refs": [[2.0, 0.5]]}, ["spatial_refs"]),
    "a prompt that never fits": ({"task": "query", "text_input": "word " * 4000}, ["text_input", "tokens"]),
}


def refused(door: str, server: Server, request: dict[str, Any], code: str = "INVALID_ARG") -> str:
    """Asserts the error and returns its sentence."""
    with pytest.raises(ServerError) as caught:
        DOORS[door](server, **request)
    text = str(caught.value)
    # HTTP infer puts the failing model's name in front
    assert f"[{code}] " in text
    assert "Traceback" not in text and "File " not in text and ".py" not in text
    return text.split(f"[{code}] ", 1)[1]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BAD)
def test_bad_request_then_good(server: Server, pictures: list[bytes], name: str, door: str) -> None:
    change, words = BAD[name]
    sentence = refused(door, server, {**GOOD, "image": pictures[0], **change})
    for word in words:
        assert word in sentence
    assert DOORS[door](server, image=pictures[0], **GOOD).finish_reason == "length"


@pytest.mark.parametrize("door", DOORS)
def test_truncated_picture(server: Server, door: str) -> None:
    """Its header is fine, so it fails only when it is decoded, after the engine has accepted the request."""
    file = io.BytesIO()
    Image.effect_noise((200, 200), 80).convert("RGB").save(file, "JPEG")

    def ended() -> int:
        status = doors.status(server)
        return status["failed"] + status["cancelled"]

    doors.settled(server)
    before = ended()
    assert "image" in refused(door, server, {**GOOD, "image": file.getvalue()[: len(file.getvalue()) // 2]})
    doors.wait_until(lambda: ended() == before + 1, 30, "the engine gave the request up")


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', '{"temperature": "warm"}', '{"nosuch": 1}'])
def test_bad_sampling_parameters(server: Server, pictures: list[bytes], text: str) -> None:
    for door in DOORS:
        sentence = refused(door, server, {"task": "caption", "image": pictures[0], "sampling_parameters": text})
        assert any(word in sentence for word in ("sampling_parameters", "temperature", "nosuch"))


@pytest.mark.parametrize("name", ["task", "text_input", "sampling_parameters"])
def test_text_that_is_not_utf8(server: Server, pictures: list[bytes], name: str) -> None:
    assert name in refused("model_infer", server, {"task": "query", "text_input": "?", name: b"\xff\xfe"})
    assert name in refused("grpc_stream", server, {"task": "query", "text_input": "?", name: b"\xff\xfe"})


def test_stream_is_no_option_of_photon_unary(server: Server) -> None:
    with pytest.raises(ServerError, match="stream"):
        doors.generate(server, model="photon_unary", text_input="?", stream=True)


def test_wrong_shapes_and_types_of_tensors(server: Server) -> None:
    """Triton refuses these itself."""
    with triton.InferenceServerClient(server.grpc_url) as client:
        for name, shape, kind in (("task", [2], "BYTES"), ("image", [1, 1], "BYTES"), ("text_input", [1], "FP32")):
            tensor = triton.InferInput(name, shape, kind)
            data = np.full(shape, b"query", np.object_) if kind == "BYTES" else np.zeros(shape, np.float32)
            tensor.set_data_from_numpy(data)
            with pytest.raises(doors.InferenceServerException, match=name):
                client.infer("photon_unary", [tensor])
    assert doors.model_infer(server, text_input="Hello?", max_tokens=2, temperature=0).text


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"text_input": {"a": 1}}', b'{"text_input": 7}', b'{"stream": "yes"}'])
def test_malformed_json(server: Server, body: bytes) -> None:
    with pytest.raises(ServerError):
        doors.post(server, "/v2/models/photon/generate", body)
    assert doors.generate(server, text_input="Hello?", max_tokens=2, temperature=0).text


def test_http_codes(server: Server) -> None:
    """Triton answers every error of a model on generate with 400, /infer and ModelInfer keep the code."""
    for door, code in (("generate", 400), ("infer", 400), ("model_infer", "StatusCode.INVALID_ARGUMENT")):
        with pytest.raises(ServerError) as caught:
            DOORS[door](server, task="translate")
        assert caught.value.code == code


def test_unknown_command_of_the_supervisor(server: Server) -> None:
    document = {"inputs": [{"name": "command", "shape": [1], "datatype": "BYTES", "data": ["explode"]}]}
    with pytest.raises(ServerError, match=r"\[INVALID_ARG\] .*command"):
        doors.post(server, "/v2/models/photon_engine/infer", document)


def test_server_is_whole_after_all_this(server: Server) -> None:
    status = doors.settled(server)
    assert status["restarts"] == 0
    assert status["submitted"] == status["done"] + status["failed"] + status["cancelled"]
    assert json.dumps(status)


def test_json_without_end_is_the_callers_fault(server: Server, pictures: list[bytes]) -> None:
    """Deep enough for Python's parser to give up, not for Triton's own."""
    for depth in (400, 900, 2000):
        request = {"inputs": [], "parameters": {}}
        nested = "[" * depth + "]" * depth
        text = {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [f'{{"stop": {nested}}}']}
        with pytest.raises(ServerError, match=r"\[INVALID_ARG\]"):
            doors.post(server, "/v2/models/photon_unary/infer", request | {"inputs": [text]})
    assert doors.generate(server, image=pictures[0], **GOOD).finish_reason == "length"


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/models/photon/unload",
        "/v2/repository/models/photon/load",
        "/v2/repository/index",
        "/v2/systemsharedmemory/region/photon/register",
        "/v2/logging",
    ],
)
def test_the_operators_doors_are_shut_to_clients(server: Server, pictures: list[bytes], path: str) -> None:
    """Whoever may load a model may run code on the server."""
    with pytest.raises(ServerError) as caught:
        doors.post(server, path, {"key": "photon", "offset": 0, "byte_size": 1})
    assert caught.value.code == 403
    assert doors.generate(server, image=pictures[0], **GOOD).finish_reason == "length"


def test_the_operators_doors_are_shut_over_grpc(server: Server) -> None:
    with triton.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(triton.InferenceServerException, match="x-photon-operator"):
            client.unload_model("photon")
        names = {
            model["name"]
            for model in client.get_model_repository_index(server.operator_headers, as_json=True)["models"]
        }
    assert "photon" in names
    assert server.is_ready()
