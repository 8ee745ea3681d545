"""Front end: hands Triton's requests to the owner thread of `Handler`, which answers them."""


class TritonPythonModel:
    def initialize(self, args):
        from photon_backend.frontend.handler import Handler  # the stub completes pb_utils after it imported this file

        self._handler = Handler(args["model_instance_name"])

    def execute(self, requests):
        self._handler.accept(requests)

    def finalize(self):
        self._handler.close()
