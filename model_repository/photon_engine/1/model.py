"""Supervisor: starts and watches the engine process, publishes its metrics, answers `status`."""

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
        self._publisher = Publisher(index, self._supervisor.status)
        self._supervisor.start()

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "command")
        command = b"status" if tensor is None else tensor.as_numpy().reshape(-1)[0]
        if command != b"status":
            error = pb_utils.TritonError("[INVALID_ARG] command must be status.", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        text = json.dumps(self._supervisor.status()).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("status", np.array([text], dtype=np.object_))])

    def finalize(self):
        self._publisher.close()
        self._supervisor.close()
