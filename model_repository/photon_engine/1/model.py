"""Supervisor: starts and watches the engine process, publishes its metrics, answers status, cancel and trace."""

import triton_python_backend_utils as pb_utils

from photon_backend.config import read_settings
from photon_backend.log import set_up_logging
from photon_backend.metrics import Publisher
from photon_backend.supervisor import Supervisor


class TritonPythonModel:
    def initialize(self, args):
        from photon_backend.commands import Commands

        settings = read_settings()
        set_up_logging(args["model_instance_name"], settings.log_level)
        if not settings.run_dir:
            raise pb_utils.TritonModelException("PHOTON_RUN_DIR must name a private directory; the launcher sets it")
        index = int(args["model_instance_name"].rsplit("_", 1)[1])
        self._supervisor = Supervisor(settings, index, pb_utils.load_model, pb_utils.unload_model)
        self._commands = Commands(self._supervisor, index)
        run_dir = settings.run_dir if index == 0 else None
        self._publisher = Publisher(index, self._supervisor.status, run_dir)
        self._supervisor.start()

    def execute(self, requests):
        for request in requests:
            self._commands.take(request)

    def finalize(self):
        self._publisher.close()
        self._supervisor.close()
