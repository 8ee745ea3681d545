"""What a client may tell photon_engine: `status`, `cancel` and `trace`. Imported in a stub only, after it has started.

Every request is answered through its sender, so that a trace, which takes seconds, holds up no status.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from photon_backend.protocol import PhotonError
from photon_backend.supervisor import Supervisor

TRACE_TICKS, TRACE_S = 300, 10.0  # when the client says nothing

log = logging.getLogger("photon.supervisor")


class Commands:
    def __init__(self, supervisor: Supervisor, index: int) -> None:
        self._supervisor = supervisor
        self._index = index

    def take(self, request: Any) -> None:
        """Answers the request, or sees to it that it will be. Never blocks, raises nothing."""
        sender = request.get_response_sender()
        try:
            answer = self._obey(request, sender)
        except PhotonError as error:
            answer = error
        except Exception:
            log.exception("a command failed")
            answer = PhotonError("INTERNAL", "the command failed; the server's log says why")
        if answer is None:
            return
        try:
            _answer(sender, "status", answer)
        except Exception:  # this one cannot be told; those that came with it must not pay for it
            log.exception("a command could not be answered")

    def _obey(self, request: Any, sender: Any) -> bytes | PhotonError | None:
        """What the request's `status` becomes; None when another thread answers it."""
        command, name = _value(request, "command") or "status", _value(request, "request_id")
        if command == "status":
            return json.dumps(self._supervisor.status()).encode()
        if command == "cancel" and name:
            self._supervisor.stop_request(name)
            return json.dumps({"request_id": name}).encode()
        if command == "trace":
            self._trace(request, sender)
            return None
        raise PhotonError("INVALID_ARG", "command must be status, trace, or cancel with the request_id of a request.")

    def _trace(self, request: Any, sender: Any) -> None:
        """Another thread answers it; nothing may touch the sender here once it was handed over."""
        engine, ticks, seconds = (_value(request, key) for key in ("engine", "ticks", "seconds"))
        self._supervisor.trace(
            self._index if engine is None else engine,
            TRACE_TICKS if ticks is None else ticks,
            TRACE_S if seconds is None else seconds,
            lambda outcome: _answer(sender, "trace", outcome),
        )


def _answer(sender: Any, name: str, outcome: bytes | PhotonError) -> None:
    if isinstance(outcome, PhotonError):
        error = pb_utils.TritonError(str(outcome), getattr(pb_utils.TritonError, outcome.code))
        response = pb_utils.InferenceResponse(error=error)
    else:
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([outcome], dtype=np.object_))])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _value(request: Any, name: str) -> Any:
    """The one element of an input, as Python's own type; None when it is absent, or has not one element."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    array = None if tensor is None else tensor.as_numpy()
    if array is None or array.size != 1:
        return None
    value = array.reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value.item()
