"""Supervisor: starts and watches the engine process, publishes its metrics, answers `status`, passes `cancel` on."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from photon_backend.config import read_settings
from photon_backend.log import set_up_logging
from photon_backend.metrics import Publisher
from photon_backend.supervisor import Supervisor


class TritonPythonModel:
    def initialize(self, args):
        settings = read_settings()
        set_up_logging(args["model_instance_name"], settings.log_level)
        if not settings.run_dir:
            raise pb_utils.TritonModelException("PHOTON_RUN_DIR must name a private directory; the launcher sets it")
        index = int(args["model_instance_name"].rsplit("_", 1)[1])
        self._supervisor = Supervisor(settings, index, pb_utils.load_model, pb_utils.unload_model)
        run_dir = settings.run_dir if index == 0 else None
        self._publisher = Publisher(index, self._supervisor.status, run_dir)
        self._supervisor.start()

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        command, name = _text(request, "command") or "status", _text(request, "request_id")
        if command == "status":
            document = self._supervisor.status()
        elif command == "cancel" and name:
            self._supervisor.stop_request(name)
            document = {"request_id": name}
        else:
            error = pb_utils.TritonError(
                "[INVALID_ARG] command must be status, or cancel with the request_id of a request.",
                pb_utils.TritonError.INVALID_ARG,
            )
            return pb_utils.InferenceResponse(error=error)
        text = json.dumps(document).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("status", np.array([text], dtype=np.object_))])

    def finalize(self):
        self._publisher.close()
        self._supervisor.close()


def _text(request, name):
    """The one element of a STRING input; None when it is absent, or is not one string."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    array = None if tensor is None else tensor.as_numpy()
    return array.reshape(-1)[0].decode(errors="replace") if array is not None and array.size == 1 else None
