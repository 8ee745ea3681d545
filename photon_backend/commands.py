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
            self._obey(request, sender)
        except PhotonError as error:
            _refuse(sender, error)
        except Exception:
            log.exception("a command failed")
            _refuse(sender, PhotonError("INTERNAL", "the command failed; the server's log says why"))

    def _obey(self, request: Any, sender: Any) -> None:
        command, name = _value(request, "command") or "status", _value(request, "request_id")
        if command == "status":
            _send(sender, "status", json.dumps(self._supervisor.status()).encode())
        elif command == "cancel" and name:
            self._supervisor.stop_request(name)
            _send(sender, "status", json.dumps({"request_id": name}).encode())
        elif command == "trace":
            self._trace(request, sender)
        else:
            raise PhotonError(
                "INVALID_ARG", "command must be status, trace, or cancel with the request_id of a request."
            )

    def _trace(self, request: Any, sender: Any) -> None:
        """Another thread answers it; nothing may touch the sender here once it was handed over."""

        def answer(outcome: bytes | PhotonError) -> None:
            if isinstance(outcome, PhotonError):
                _refuse(sender, outcome)
            else:
                _send(sender, "trace", outcome)

        engine, ticks, seconds = (_value(request, key) for key in ("engine", "ticks", "seconds"))
        self._supervisor.trace(
            self._index if engine is None else engine,
            TRACE_TICKS if ticks is None else ticks,
            TRACE_S if seconds is None else seconds,
            answer,
        )


def _send(sender: Any, name: str, text: bytes) -> None:
    response = pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([text], dtype=np.object_))])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _refuse(sender: Any, error: PhotonError) -> None:
    code = getattr(pb_utils.TritonError, error.code)
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _value(request: Any, name: str) -> Any:
    """The one element of an input, as Python's own type; None when it is absent, or has not one element."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    array = None if tensor is None else tensor.as_numpy()
    if array is None or array.size != 1:
        return None
    value = array.reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value.item()
