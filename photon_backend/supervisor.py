"""Supervisor of one engine process; the logic behind the Triton model photon_engine.

States of the engine: down -> starting (a process runs, no heartbeat yet) -> up -> down. It goes down when its process
ends or its heartbeats stay away for `SILENCE_S`, and is started again after a pause that doubles from 0.2 to 5 s; a
minute of service resets the pause. After `MAX_FAILURES` failures in a row, or at once when the engine says that another
try would end the same way, the supervisor gives up: `status` says so and the sentence goes to the file `problem` beside
the sockets, at which the launcher ends the server.

photon and photon_unary are loaded while some engine is up and unloaded while none is, so that Triton's readiness of
these models is the truth. With several engines the supervisor of engine 0 does that; the others only watch theirs.

A request to stop a request by its name may come to any supervisor, so each passes it on to all engines. So may one to
record a trace of some engine: recordings.py.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from photon_backend.alive import Sign
from photon_backend.config import Settings
from photon_backend.engine.exit_codes import EXIT_UNUSABLE
from photon_backend.frontend.link import Link
from photon_backend.protocol import Status, Stop
from photon_backend.recordings import Answer, Recordings

FRONT_ENDS = ("photon", "photon_unary")
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
GOOD_SERVICE_S = 60.0  # of an engine that then fails: counts as a first failure
MAX_FAILURES = 8
START_S = 600.0  # from the start of the process to its first heartbeat: a large checkpoint on a slow disk takes minutes
MAX_LOAD_FAILURES = 3  # of the front-end models, in a row
STOP_S = 6.0  # between SIGTERM and SIGKILL; below Triton's own exit time-out
LAST_WORDS_S = 0.5  # of an engine whose connection broke, to end by itself and say how
TURN_MS = 100

log = logging.getLogger("photon.supervisor")


class Supervisor:
    """`start`, `close` and `status` are called by the stub's thread, the rest runs on the supervisor's own.

    load, unload: take the name of a Triton model; may block for seconds and raise.
    """

    def __init__(
        self, settings: Settings, index: int, load: Callable[[str], None], unload: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._index = index
        self._load, self._unload = load, unload
        self._process: subprocess.Popen[bytes] | None = None
        self._born = 0.0  # when the process started; while it is down, when to start it again
        self._failures = 0
        self._load_failures = 0
        self._loaded = False
        self._closing = False
        self._up = False
        self.problem: str | None = None  # why we gave up
        self.restarts = 0
        self.engine_status: Status | None = None  # of the last heartbeat
        self._stops: deque[str] = deque()  # names of requests to end
        self._recordings = Recordings(settings)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sign = Sign(settings.run_dir, f"photon_engine_{index}")
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._run, name="supervisor")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the engine process. The front ends are Triton's to unload now.

        Triton unloads a model when all its requests are answered, so no trace is open, except when a reload takes away
        an instance: then Triton takes no response any more. This process ends without withdrawing its sign, and with it
        the launcher ends the server, as when a front end goes like this.
        """
        self._closing = True
        self._thread.join(2 * STOP_S)  # it may wait in a send that nobody takes
        if self._thread.is_alive() or self._recordings.num_open:
            log.error("Triton ends this instance with %d open traces, or a call to it hangs", self._recordings.num_open)
            os._exit(1)
        os.close(self._wake_fd)
        self._sign.withdraw()

    def stop_request(self, name: str) -> None:
        """Ends every open request that a client gave this id, at any engine; without effect when there is none."""
        self._stops.append(name)
        os.eventfd_write(self._wake_fd, 1)

    def trace(self, engine: int, ticks: int, seconds: float, answer: Answer) -> None:
        """Records what an engine does; see Recordings.ask."""
        self._recordings.ask(engine, ticks, seconds, answer)
        self._sign.set_open(True)  # the supervisor's thread may be loading models for seconds
        os.eventfd_write(self._wake_fd, 1)

    def status(self) -> dict[str, object]:
        """Fields of the last heartbeat and what the supervisor knows itself."""
        process = self._process
        return {
            **msgspec.to_builtins(self.engine_status or Status()),
            "engine": self._index,
            "up": self._up,
            "pid": process.pid if process else None,
            "restarts": self.restarts,
            "problem": self.problem,
        }

    # ---- supervisor thread; the engine process dies with it

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        link = Link(self._settings, poller, range(self._settings.engines))
        while not self._closing:
            try:
                if self._wake_fd in dict(poller.poll(TURN_MS)):
                    os.eventfd_read(self._wake_fd)
                self._turn(link)
            except Exception:
                log.exception("a turn of the supervisor failed")
                time.sleep(TURN_MS / 1000)
        self._stop_engine()
        link.close()

    def _turn(self, link: Link) -> None:
        if os.getppid() != self._parent:  # Triton is gone, and a stub does not always notice that by itself
            self._stop_engine(at_once=True)
            os._exit(1)
        for peer, messages in link.receive():
            self._recordings.receive(peer, messages)
        while self._stops:
            link.send_all([Stop(self._stops.popleft())])
        lost = link.tend()
        self._recordings.turn(link.peers, lost)
        self._sign.set_open(self._recordings.num_open > 0)
        own = next(peer for peer in link.peers if peer.index == self._index)
        self._up = own.up
        self.engine_status = own.status or self.engine_status
        if self._process is not None:
            code = self._exit_status(LAST_WORDS_S if own in lost else 0)
            if code is not None:
                self._ended(f"ended with status {code}", unusable=code == EXIT_UNUSABLE)
            elif own in lost:
                self._ended("gave no sign of life")
            elif not own.up and time.monotonic() - self._born > START_S:
                self._ended(f"did not come up within {START_S:.0f} s")
        elif self.problem is None and time.monotonic() >= self._born:
            self._start_engine()
        if self._index == 0:
            self._match_front_ends(any(peer.up for peer in link.peers))

    def _exit_status(self, wait_s: float) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def _start_engine(self) -> None:
        self._born = time.monotonic()
        Path(self._settings.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have tidied up
        python = self._settings.engine_python or sys.executable
        command = [
            python,
            "-m",
            "photon_backend.engine.server",
            "--index",
            str(self._index),
            "--parent",
            str(os.getpid()),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_engine_environment())
        log.info("engine %d starts as process %d", self._index, self._process.pid)

    def _ended(self, how: str, unusable: bool = False) -> None:
        """Counts the failure and sets the time of the next start, or gives up."""
        self._stop_engine(at_once=True)
        now = time.monotonic()
        self._failures = 1 if now - self._born > GOOD_SERVICE_S else self._failures + 1
        if unusable or self._failures >= MAX_FAILURES:
            self._give_up(
                f"Engine {self._index} {how}"
                + ("" if unusable else f", {self._failures} times in a row")
                + "; its log says why."
            )
            return
        pause = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
        self._born = now + pause
        self.restarts += 1
        log.error("engine %d %s; starting it again in %.1f s", self._index, how, pause)

    def _give_up(self, problem: str) -> None:
        log.error("%s", problem)
        (Path(self._settings.run_dir) / "problem").write_text(problem)
        self.problem = problem

    def _stop_engine(self, at_once: bool = False) -> None:
        if self._process is None:
            return
        try:
            if not at_once:
                self._process.terminate()
                self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("engine %d did not stop within %.0f s", self._index, STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._up = False

    def _match_front_ends(self, some_engine_up: bool) -> None:
        """Loads or unloads the front ends when that is not as it should be."""
        if some_engine_up == self._loaded or self._load_failures >= MAX_LOAD_FAILURES:
            return
        change = self._load if some_engine_up else self._unload
        try:
            for name in FRONT_ENDS:
                change(name)
        except Exception as error:  # Triton's binding raises a class of its own per failure
            self._load_failures += 1
            log.error("Triton could not %s %s: %s", "load" if some_engine_up else "unload", name, error)
            if self._load_failures >= MAX_LOAD_FAILURES:
                self._give_up(f"Triton could not load the model {name}; its log says why.")
            return
        self._load_failures = 0
        self._loaded = some_engine_up


def _engine_environment() -> dict[str, str]:
    """Ours without the libraries of Triton, which are older than those that torch brings."""
    environment = dict(os.environ)
    environment.pop("LD_LIBRARY_PATH", None)
    original = environment.get("PHOTON_ENGINE_LIBRARY_PATH")
    if original:
        environment["LD_LIBRARY_PATH"] = original
    return environment
