"""Triton's requests and responses to ours and back. Imported in a stub only, which brings `pb_utils`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from photon_backend.frontend.options import RawRequest
from photon_backend.frontend.session import Response
from photon_backend.protocol import PhotonError

_CODES = {
    "INVALID_ARG": pb_utils.TritonError.INVALID_ARG,
    "UNAVAILABLE": pb_utils.TritonError.UNAVAILABLE,
    "INTERNAL": pb_utils.TritonError.INTERNAL,
}

MAX_NAME_CHARS = 256


def read_request(request: Any) -> RawRequest:
    """Raises PhotonError INVALID_ARG naming the tensor that does not fit."""
    stream = _element(request, "stream")
    if stream is not None and not isinstance(stream, (bool, np.bool_)):
        raise PhotonError("INVALID_ARG", "stream must be a BOOL tensor of shape [1].")
    image = _element(request, "image")
    if image is not None and not isinstance(image, bytes):
        raise PhotonError("INVALID_ARG", "image must be a STRING tensor of shape [1] with the bytes of one picture.")
    parameters = _parameters(request)
    return RawRequest(
        task=_text(request, "task"),
        text_input=_text(request, "text_input"),
        image=image,
        stream=bool(stream),
        sampling_parameters=_text(request, "sampling_parameters"),
        name=_name(request, parameters),
        parameters=parameters,
    )


def _name(request: Any, parameters: dict[str, Any]) -> str:
    """The client's id of the request. Triton's generate hands it over as a parameter too, which is taken out."""
    as_parameter = parameters.pop("id", "")
    name = str(request.request_id() or as_parameter)
    if len(name) > MAX_NAME_CHARS:
        raise PhotonError("INVALID_ARG", f"The request's id has {len(name)} characters, at most {MAX_NAME_CHARS} fit.")
    return name


def _element(request: Any, name: str) -> Any:
    """The one element of an optional input; None when it is absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.size != 1:
        raise PhotonError("INVALID_ARG", f"{name} must be a tensor of shape [1], not {list(array.shape)}.")
    return array.reshape(-1)[0]


def _text(request: Any, name: str) -> str | None:
    value = _element(request, name)
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise PhotonError("INVALID_ARG", f"{name} must be a STRING tensor of shape [1].")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise PhotonError("INVALID_ARG", f"{name} must be UTF-8, but its byte {error.start} is not.") from error


def _parameters(request: Any) -> dict[str, str | int | float | bool]:
    parameters = request.parameters()
    return json.loads(parameters) if parameters else {}


def triton_response(response: Response) -> Any:
    """Only the tensors that the response has."""
    if response.error is not None:
        return error_response(response.error)
    tensors = [
        _string(name, getattr(response, attribute))
        for name, attribute in _STRINGS
        if getattr(response, attribute) is not None
    ]
    for name in ("objects", "points"):
        array = getattr(response, name)
        if array is not None:
            tensors.append(pb_utils.Tensor(name, np.ascontiguousarray(array, dtype=np.float32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


_STRINGS = (("text_output", "text"), ("finish_reason", "finish_reason"), ("usage", "usage"))


def error_response(error: PhotonError) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), _CODES[error.code]))


def _string(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
