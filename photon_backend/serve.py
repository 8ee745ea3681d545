"""Launcher: `python -m photon_backend.serve` runs Triton with the three models until SIGTERM, SIGINT or SIGHUP.

The first signal drains (draining.py): new requests are refused with UNAVAILABLE, running ones finish within
`--drain-seconds`, the rest is answered UNAVAILABLE, then everything is killed. A second one answers the rest at once.

Process tree, each tied to the one above it by the kernel (`processes.end_with_parent`), so that nothing outlives a
killed launcher:

    launcher -> tritonserver -> stubs of photon, photon_unary, photon_engine
                                photon_engine's stub -> engine process
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from photon_backend import alive, draining, layout
from photon_backend.config import TINY_CHECKPOINT, idle_variables, read_settings
from photon_backend.draining import ANSWER_S
from photon_backend.layout import LaunchError, Layout
from photon_backend.log import LEVELS
from photon_backend.processes import STOP_SIGNALS, end_group, signals_held

FLUSH_S = 1.0  # for Triton to write the last answers to their connections; it does not tell when it has
GONE_S = 10.0  # from SIGKILL until the last process is gone: a driver that frees a large GPU's memory takes seconds
LEFT_S = 5.0  # for stubs to see that a tritonserver is gone which ended by itself
STOP_S = ANSWER_S + FLUSH_S + GONE_S + LEFT_S  # the most that `Server.stop` takes; usually 1.5 s
EXIT_SECONDS = 8  # time-out of Triton's own end, which only comes when this process was killed
STDERR = 2
NOISE = (b"CudaDriverHelper has not been initialized",)  # no GPU
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is never behind a proxy
_hurry = threading.Event()  # set by the second signal


class Server:
    """A running tritonserver with its private directory. `stop()` ends it and removes what it left."""

    def __init__(
        self, layout_: Layout, process: subprocess.Popen[bytes], host: str, ports: Mapping[str, int], secret: str
    ) -> None:
        self.layout = layout_
        # what the restricted doors ask for, over HTTP and over gRPC
        self.operator_headers = {OPERATOR_HEADER: secret, f"triton-grpc-protocol-{OPERATOR_HEADER}": secret}
        self.process = process
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = (ports[name] for name in PORTS)

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        return self.process.pid

    @property
    def http_url(self) -> str:
        return f"http://{self._address(self.http_port)}"

    @property
    def grpc_url(self) -> str:
        """host:port, as tritonclient wants it."""
        return self._address(self.grpc_port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self._address(self.metrics_port)}/metrics"

    def _address(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def problem(self) -> str | None:
        """Why the server cannot go on, or None while it can: it or a stub died, or a supervisor gave its engine up."""
        if self.process.poll() is not None:
            return f"tritonserver ended with status {self.process.returncode}."
        dead = alive.dead(self.layout.run_dir)
        if dead:
            return f"The process of {dead[0]} died; its requests would hang."
        with contextlib.suppress(FileNotFoundError):
            return (self.layout.run_dir / "problem").read_text() or None  # empty: being written
        return None

    def is_ready(self, model: str = "photon") -> bool:
        try:
            with _opener.open(f"{self.http_url}/v2/models/{model}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when both front-end models answer. Raises LaunchError when they never will, or too late."""
        end = time.monotonic() + timeout_s
        while not (self.is_ready("photon") and self.is_ready("photon_unary")):
            problem = self.problem()
            if problem:
                raise LaunchError(problem)
            if time.monotonic() > end:
                raise LaunchError(f"The model photon was not ready within {timeout_s:.0f} s.")
            time.sleep(0.05)

    def drain(self, timeout_s: float, hurry: threading.Event) -> None:
        """Refuses new requests and waits until none is open, until `timeout_s`, or until `hurry` is set."""
        if timeout_s <= 0 or self.problem() is not None:
            return

        def given_up() -> bool:
            return hurry.is_set() or self.problem() is not None

        if not draining.drain(self.layout.run_dir, timeout_s, given_up):
            _say("photon: not all requests could be finished; the rest is answered UNAVAILABLE.")

    def stop(self) -> None:
        """Has what is open answered, then kills; returns when tritonserver, its stubs and the engines are gone, and so
        is what they held of a GPU's memory.

        No process tidies up: what outlives it is removed here, and Triton would wait for what nobody needs
        (draining.py). May be called twice.
        """
        if self.process.poll() is None:
            with contextlib.suppress(OSError):  # a full disk takes no mark
                for name in draining.answer_rest(self.layout.run_dir):
                    _say(f"photon: {name} does not respond; what is open there ends without an answer.")
            time.sleep(FLUSH_S)
            for pid in end_group(self.pid, GONE_S):
                _say(f"photon: process {pid} does not end; it may still hold GPU memory.")
            self.process.wait()
        end = time.monotonic() + LEFT_S
        while self.layout.owned_elsewhere() and time.monotonic() < end:
            time.sleep(0.02)
        for pid in alive.living(self.layout.run_dir):  # a stub that is stopped or hangs would stay for ever
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.layout.remove()


RESTRICTED = "model-repository,shared-memory,logging,trace"  # doors of Triton that are for its operator only
OPERATOR_HEADER = "x-photon-operator"
PORTS = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")


@contextlib.contextmanager
def start_server(
    checkpoint: Path | str = TINY_CHECKPOINT,
    device: str = "cpu",
    dtype: str = "float32",
    front_ends: int = 2,
    engines: int = 1,
    host: str = "127.0.0.1",
    ports: tuple[int, int, int] = (0, 0, 0),
    log_level: str = "warning",
    log: Path | None = None,
    wait: bool = True,
    drain_s: float = 0.0,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A real server for the length of the `with` block.

    Must be entered from a thread that lives as long as the server. `ports` are HTTP, gRPC and metrics; 0 takes a free
    one. `log` is a file for everything the processes print, default the terminal. At the end open requests have
    `drain_s` seconds. `settings` are more `PHOTON_*` variables (with their prefix). Raises LaunchError.
    """
    if front_ends < 1 or engines < 1:
        raise LaunchError(f"FRONT_ENDS and ENGINES must be 1 or more, got {front_ends} and {engines}.")
    free = iter(layout.free_ports(host, ports.count(0)))
    taken = {name: port or next(free) for name, port in zip(PORTS, ports, strict=True)}
    stubs = front_ends + layout.unary_front_ends(front_ends) + engines
    layout.check(Path(checkpoint), host, taken, stubs)
    environment = {
        "PHOTON_CHECKPOINT": str(Path(checkpoint).resolve()),
        "PHOTON_DEVICE": device,
        "PHOTON_DTYPE": dtype,
        "PHOTON_ENGINES": str(engines),
        "PHOTON_LOG_LEVEL": log_level,
        "PHOTON_ENGINE_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        **(settings or {}),
    }
    try:
        read_settings({**os.environ, **environment})
    except ValueError as error:
        raise LaunchError(f"{error}.") from error
    with contextlib.ExitStack() as stack:
        with signals_held():  # one that came between a directory or a process and the note of its end would leave it
            private = Layout(front_ends, engines)
            stack.callback(private.remove)
            environment["PHOTON_RUN_DIR"] = str(private.run_dir)
            secret = secrets.token_hex(16)
            process = _start_triton(private, host, taken, log_level, environment, log, secret)
            server = Server(private, process, host, taken, secret)
            stack.callback(server.stop)
            stack.callback(server.drain, drain_s, _hurry)
        if wait:
            server.wait_ready()
        yield server


def _start_triton(
    private: Layout,
    host: str,
    ports: Mapping[str, int],
    log_level: str,
    environment: Mapping[str, str],
    log: Path | None,
    secret: str,
) -> subprocess.Popen[bytes]:
    level = list(LEVELS).index(log_level)
    command = [
        f"{layout.triton_home()}/bin/tritonserver",
        f"--model-repository={private.models}",
        f"--backend-directory={private.backends}",
        "--model-control-mode=explicit",
        "--load-model=photon_engine",
        "--disable-auto-complete-config",
        # a client that may load models may run code here
        f"--http-restricted-api={RESTRICTED}:{OPERATOR_HEADER}={secret}",
        f"--grpc-restricted-protocol={RESTRICTED}:{OPERATOR_HEADER}={secret}",
        f"--http-address={host}",
        f"--http-port={ports['HTTP_PORT']}",
        f"--grpc-address={host}",
        f"--grpc-port={ports['GRPC_PORT']}",
        f"--metrics-address={host}",
        f"--metrics-port={ports['METRICS_PORT']}",
        f"--exit-timeout-secs={EXIT_SECONDS}",
        f"--backend-config=python,shm-default-byte-size={layout.SHM_BYTES}",
        f"--backend-config=python,shm-growth-byte-size={layout.SHM_BYTES}",
        f"--backend-config=python,shm-region-prefix-name={private.directory.name}",
        # Triton itself needs no GPU memory, and no metrics library for it
        "--pinned-memory-pool-byte-size=0",
        "--allow-gpu-metrics=false",
        f"--log-warning={str(level >= 1).lower()}",
        f"--log-info={str(level >= 2).lower()}",
        f"--log-verbose={int(level >= 3)}",
    ]
    libraries = f"{layout.triton_libraries()}:{private.libraries}"
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if log else os.dup(STDERR)
    process = subprocess.Popen(
        [sys.executable, "-m", "photon_backend.processes", str(os.getpid()), *command],
        env={
            **os.environ,
            **environment,
            # the stub runs the first python3
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}",
            "LD_LIBRARY_PATH": ":".join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")])),
        },
        pass_fds=[private.lock_fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the launcher only, which ends the rest in order
    )
    threading.Thread(target=_relay, args=(process.stdout, sink), name="log", daemon=True).start()
    return process


def _relay(lines: IO[bytes], sink: int) -> None:
    """Copies what the processes print, to their last word, without Triton's lines that mean nothing here.

    A line that cannot be written (disk full, nobody reads any more) is lost: all processes would stop in their next
    one if this thread did not go on reading. `sink` is a descriptor, closed at the end.
    """
    for line in lines:
        if not any(noise in line for noise in NOISE):
            with contextlib.suppress(OSError):
                os.write(sink, line)
    os.close(sink)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Every option has a variable of the same name, so that `make serve DEVICE=cuda` and containers can set it."""
    parser = argparse.ArgumentParser(prog="python -m photon_backend.serve", description=__doc__.split("\n")[0])

    def option(name: str, default: object, text: str, **more: object) -> None:
        variable = name.upper().replace("-", "_")
        value = os.environ.get(variable) or default
        kind = type(default)
        parser.add_argument(f"--{name}", default=value, type=kind, help=f"{text} [{variable}, {value}]", **more)  # type: ignore[arg-type]
        choices = more.get("choices")
        if isinstance(choices, list) and value not in choices:  # argparse does not look at a default
            parser.error(f"{variable} must be one of {', '.join(choices)}, got {value}")

    option("checkpoint", str(TINY_CHECKPOINT), "directory with config.json, model.safetensors, tokenizer.json")
    option("device", "cpu", "cpu or cuda")
    option("dtype", "float32", "float32 or bfloat16", choices=["float32", "bfloat16"])
    option("front-ends", 2, "instances of photon")
    option("engines", 1, "engine processes, one GPU each")
    option("host", "127.0.0.1", "address to listen on")
    option("http-port", 8000, "port of HTTP")
    option("grpc-port", 8001, "port of gRPC")
    option("metrics-port", 8002, "port of the metrics")
    option("drain-seconds", 20.0, "for open requests after SIGTERM")
    option("log-level", "warning", "what is printed", choices=list(LEVELS))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    for sentence in idle_variables():
        _say(f"photon: {sentence}")
    _on_signals(_leave)
    begun = time.monotonic()
    try:
        with start_server(
            checkpoint=options.checkpoint,
            device=options.device,
            dtype=options.dtype,
            front_ends=options.front_ends,
            engines=options.engines,
            host=options.host,
            ports=(options.http_port, options.grpc_port, options.metrics_port),
            log_level=options.log_level,
            drain_s=options.drain_seconds,
        ) as server:
            urls = f"HTTP {server.http_url}, gRPC {server.grpc_url}, metrics {server.metrics_url}"
            what = f"{Path(options.checkpoint).name} on {options.device}"
            ready = f"Photon is ready after {time.monotonic() - begun:.1f} s ({what}): {urls}. Ctrl-C ends it."
            _say(ready, sys.stdout)
            while (problem := server.problem()) is None:
                time.sleep(0.2)
            raise LaunchError(problem)
    except (LaunchError, OSError) as error:  # OSError: a directory that is full or may not be written
        _say(f"photon: {error}")
        return 1


def _say(text: str, stream: TextIO | None = None) -> None:
    """A line for the operator, on stderr. One that cannot be written (disk full, a closed terminal) is lost."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    """The first signal ends the `with` block above in order; while it does, a second one ends the draining."""
    _on_signals(lambda *_: _hurry.set())
    _say("photon: stopping, running requests finish first; a second signal ends them")
    sys.exit(0)


def _on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """SIGHUP is that of a closed terminal, and stays ignored under nohup."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
