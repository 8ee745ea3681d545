"""Owner thread of a front end: everything that happens to its requests happens on this one thread.

Triton's Python back end breaks when two threads touch one request (corrupt tensors, a dead server), when a request is
asked for cancellation beside or after its last response (segmentation fault), and lets the client wait for ever when a
request is dropped. Hence the rules kept here:

- the stub's own thread only puts requests into a queue and wakes the owner; threads that decode a picture or look at a
  grammar hand over in the same way; parsing, sending, receiving, cancelling and responding are the owner's;
- a request is in `_unchecked` while a thread looks at its grammar, then in `_open` from its acceptance to its last
  response; `is_cancelled` is asked of open ones only;
- whatever happens, `_respond` sends exactly one response with the FINAL flag, and that removes it from `_open`;
- a failure in one request ends that request, with one sentence for the client and the traceback for the log.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import zmq

from photon_backend.alive import Sign
from photon_backend.config import Settings, read_settings
from photon_backend.draining import ENDING, marked
from photon_backend.frontend.link import EnginePeer, Link
from photon_backend.frontend.session import FrontEnd, Response, Session, check_grammar
from photon_backend.frontend.tensors import error_response, read_request, triton_response
from photon_backend.log import set_up_logging
from photon_backend.numbers import Account, Sender, Tally
from photon_backend.processes import return_memory
from photon_backend.protocol import (
    Cancel,
    Done,
    Failed,
    GrammarSpec,
    Heard,
    NeedPicture,
    PhotonError,
    Picture,
    Tokens,
    unavailable,
)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCEL_POLL_MS = 50  # how often open requests are asked whether their client has left
CANCEL_POLL_MAX = 128  # of them at a time: one question costs 15 to 45 us
REPORT_S = 0.5  # how often the numbers of this front end are sent to the publisher
IDLE_MS = 500  # the longest sleep of the owner
STOPPING = "the server is stopping"
CLOSE_S = 5.0  # for the owner to end, unless it waits in a send that Triton will never take
FIRST_BEAT_S = 5.0  # how long loading waits for an engine, so that a loaded model answers

log = logging.getLogger("photon.frontend")


class _Open:
    """A request that has not had its last response."""

    def __init__(self, sender: Any, session: Session, peer: EnginePeer, account: Account, image_bytes: int) -> None:
        self.sender = sender
        self.session = session
        self.peer = peer
        self.account = account
        self.image_bytes = image_bytes  # 0 once the engine has the picture or does not need it
        self.cancel_sent = False


@dataclass(frozen=True)
class _Accepted:
    """A request that was read and is not at an engine yet. `arrival`: seconds, monotonic."""

    sender: Any
    session: Session
    arrival: float
    image_bytes: int


class Handler:
    """One per stub process. `accept` and `close` are called by the stub's thread, the rest runs on the owner thread."""

    def __init__(self, name: str) -> None:
        self._settings: Settings = read_settings()
        return_memory()
        set_up_logging(name, self._settings.log_level)
        self._front_end = FrontEnd(self._settings)
        self._sign = Sign(self._settings.run_dir, name)
        self._inbox: deque[tuple[Any, Any, float]] = deque()  # requests, their senders, and when they came
        self._pictures: deque[tuple[str, Future[tuple[tuple[int, int], np.ndarray]]]] = deque()
        self._checked: deque[tuple[str, GrammarSpec, Future[float]]] = deque()  # what was looked at
        self._unchecked: dict[str, _Accepted] = {}
        self._open: dict[str, _Open] = {}
        self._image_bytes = 0  # of all requests that are held
        self._numbers = itertools.count()
        self._tally = Tally()
        self._next_report = 0.0
        self._next_cancel_poll = 0.0
        self._next_settling = 0.0
        self._cancel_cursor = 0
        self._closing = False
        self._parent = os.getppid()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._decoders = ThreadPoolExecutor(self._settings.decode_threads, thread_name_prefix="decode")
        self._checkers = ThreadPoolExecutor(1, thread_name_prefix="check")  # no picture waits behind a large grammar
        self._connected = threading.Event()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._link = Link(self._settings, self._poller, range(self._settings.engines))  # the owner's from its start on
        self._reports = Sender(self._settings.run_dir)
        self._owner = threading.Thread(target=self._run, name="owner")
        self._owner.start()
        if not self._connected.wait(FIRST_BEAT_S):
            log.warning("no engine has answered yet; requests are refused until one does")
        self._sign.set_open(True)

    def accept(self, requests: list[Any]) -> None:
        """Takes the requests over. Never blocks: the stub keeps the interpreter while it is in here."""
        now = time.monotonic()
        self._inbox.extend((request, request.get_response_sender(), now) for request in requests)
        os.eventfd_write(self._wake_fd, 1)

    @property
    def _num_held(self) -> int:
        """Requests that were read and have not had their last response."""
        return len(self._open) + len(self._unchecked)

    def close(self) -> None:
        """Ends the owner thread. Triton unloads a model when all its requests are answered, so nothing is open, except
        when a reload takes away an instance: then Triton has stopped taking responses, a send waits for ever, and so
        would the clients. This process ends without withdrawing its sign, and with it the launcher ends the server.
        """
        self._closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._owner.join(CLOSE_S)
        number = self._num_held + len(self._inbox)
        if self._owner.is_alive() or number:
            log.error("Triton removed this instance with %d open requests, which cannot be answered", number)
            os._exit(1)
        self._sign.withdraw()
        for threads in (self._decoders, self._checkers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                log.exception("a turn of the owner thread failed")
                self._fail_all(PhotonError("INTERNAL", "The front end failed; its log says why."))
                time.sleep(CANCEL_POLL_MS / 1000)  # a fault that stays must not take a whole core
        self._link.close()
        self._reports.send(self._tally, self._num_held)
        self._reports.close()

    def _turn(self) -> None:
        if os.getppid() != self._parent:  # Triton is gone, and a stub does not always notice that by itself
            os._exit(1)
        events = self._poller.poll(CANCEL_POLL_MS if self._num_held else IDLE_MS)
        if any(source == self._wake_fd for source, _ in events):
            os.eventfd_read(self._wake_fd)
        while self._inbox:
            self._start(*self._inbox.popleft())
        while self._checked:
            self._go_on(*self._checked.popleft())
        while self._pictures:
            self._send_picture(*self._pictures.popleft())
        for _, messages in self._link.receive():
            self._feed(messages)
        for peer in self._link.tend():
            level = logging.WARNING if peer.load else logging.INFO
            log.log(level, "engine %d is gone with %d requests", peer.index, peer.load)
            self._fail_all(unavailable("the engine went away and is being restarted", 5), peer)
        if any(peer.up for peer in self._link.peers):
            self._connected.set()
        self._poll_cancelled()
        self._settle()
        self._send_report()

    def _settle(self) -> None:
        """While the server stops: answers what is open when its time is over, and says when nothing is; draining.py."""
        now = time.monotonic()
        if now < self._next_settling:
            return
        self._next_settling = now + CANCEL_POLL_MS / 1000
        if not marked(self._settings.run_dir):
            return
        if marked(self._settings.run_dir, ENDING):
            self._fail_all(unavailable(STOPPING, 5))
        if not self._num_held and not self._inbox:
            self._sign.set_open(False)

    def _send_report(self) -> None:
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_S
            self._reports.send(self._tally, self._num_held)

    # requests in

    def _start(self, request: Any, sender: Any, arrival: float) -> None:
        """From Triton's request to Submit. Whatever fails here is answered here."""
        self._tally.start()
        try:
            request_id = f"{os.getpid():x}-{next(self._numbers):x}"
            self._admit_request()
            raw = read_request(request)
            size = len(raw.image or b"")
            self._admit_image(size)
            accepted = _Accepted(sender, self._front_end.open(raw, request_id), arrival, size)
            grammar = accepted.session.submit.grammar
            if grammar is None or self._front_end.is_good(grammar):
                self._submit(request_id, accepted)
            else:
                self._check(request_id, accepted, grammar)
        except RecursionError:
            self._refuse(sender, PhotonError("INVALID_ARG", "The request's JSON is nested too deeply."))
        except UnicodeDecodeError:
            self._refuse(sender, PhotonError("INVALID_ARG", "The request's id and parameters must be UTF-8."))
        except Exception as error:
            self._refuse(sender, _as_photon_error(error, "a request could not be started"))

    def _submit(self, request_id: str, accepted: _Accepted) -> None:
        session, size = accepted.session, accepted.image_bytes
        peer = self._link.choose(session.submit.digest)
        peer.send([session.submit])
        peer.load += 1
        self._image_bytes += size
        self._open[request_id] = _Open(accepted.sender, session, peer, Account(self._tally, accepted.arrival), size)

    def _check(self, request_id: str, accepted: _Accepted, grammar: GrammarSpec) -> None:
        """Has the grammar looked at beside this thread: all others would wait for a large one, for up to a second."""

        def hand_over(future: Future[float]) -> None:
            self._checked.append((request_id, grammar, future))
            os.eventfd_write(self._wake_fd, 1)

        self._unchecked[request_id] = accepted
        self._image_bytes += accepted.image_bytes
        self._checkers.submit(check_grammar, grammar).add_done_callback(hand_over)

    def _go_on(self, request_id: str, grammar: GrammarSpec, future: Future[float]) -> None:
        accepted = self._unchecked.pop(request_id, None)
        if accepted is None:
            return  # answered already
        self._image_bytes -= accepted.image_bytes
        try:
            accepted.session.preprocess_ms += future.result()
            self._front_end.good(grammar)
            self._submit(request_id, accepted)
        except Exception as error:
            self._refuse(accepted.sender, _as_photon_error(error, "a grammar could not be looked at"))

    def _refuse(self, sender: Any, error: PhotonError) -> None:
        self._tally.end("refused", error.code)
        self._tally.respond()
        try:
            sender.send(error_response(error), flags=FINAL)
        except Exception:  # this one cannot be told; the others must not pay for it
            log.exception("a refusal could not be sent")

    def _admit_request(self) -> None:
        if marked(self._settings.run_dir):
            raise unavailable(STOPPING, 5)
        if self._num_held >= self._settings.max_open_requests:
            raise unavailable(f"this front end already has {self._num_held} requests", 1)

    def _admit_image(self, image_bytes: int) -> None:
        limit = self._settings.waiting_pictures * self._settings.max_image_bytes
        if self._image_bytes and self._image_bytes + image_bytes > limit:
            raise unavailable(f"pictures of {self._image_bytes} bytes are waiting in this front end", 1)

    def _send_picture(self, request_id: str, future: Future[tuple[tuple[int, int], np.ndarray]]) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        try:
            tiling, pixels = future.result()
            request.peer.send([Picture(request_id, tiling)], np.ascontiguousarray(pixels).data)
            self._release_image(request)
        except Exception as error:
            self._cancel(request_id, request)
            self._respond(request_id, request, _failure(_as_photon_error(error, "a picture could not be prepared")))

    # messages of the engine

    def _feed(self, messages: list[Heard]) -> None:
        """Groups the events by request, so that a request that fell behind answers once for many tokens."""
        events: dict[str, list[Tokens | Done | Failed]] = {}
        for message in messages:
            if isinstance(message, NeedPicture):
                self._decode(message.request_id)
            elif isinstance(message, (Tokens, Done, Failed)):
                events.setdefault(message.request_id, []).append(message)
        for request_id, of_request in events.items():
            request = self._open.get(request_id)
            if request is None:
                continue  # answered already: cancelled by a stop string, or failed here
            if request.image_bytes:
                self._release_image(request)
            request.account.take(of_request)
            try:
                responses = request.session.feed(of_request)
            except Exception as error:
                self._cancel(request_id, request)
                responses = [_failure(_as_photon_error(error, "the engine's answer could not be read"))]
            if request.session.cancel_wanted:
                self._cancel(request_id, request)
            for response in responses:
                if request_id in self._open:
                    self._respond(request_id, request, response)

    def _decode(self, request_id: str) -> None:
        request = self._open.get(request_id)
        if request is None:
            return

        def hand_over(future: Future[tuple[tuple[int, int], np.ndarray]]) -> None:
            self._pictures.append((request_id, future))
            os.eventfd_write(self._wake_fd, 1)

        self._decoders.submit(request.session.picture).add_done_callback(hand_over)

    def _release_image(self, request: _Open) -> None:
        self._image_bytes -= request.image_bytes
        request.image_bytes = 0

    # responses and ends

    def _respond(self, request_id: str, request: _Open, response: Response) -> None:
        """Sends one response; a final one closes the request even when sending fails."""
        try:
            message = triton_response(response)
        except Exception as error:
            self._cancel(request_id, request)
            response = _failure(_as_photon_error(error, "a response could not be written"))
            message = triton_response(response)
        self._tally.respond()
        try:
            request.sender.send(message, flags=FINAL if response.final else 0)
        except Exception:
            log.exception("a response of request %s could not be sent", request_id)
            self._cancel(request_id, request)
        if response.final:
            self._close_request(request_id, request, response)

    def _close_request(self, request_id: str, request: _Open, last: Response) -> None:
        if self._open.pop(request_id, None) is None:
            return
        request.peer.load -= 1
        self._release_image(request)
        code = last.error.code if last.error else None
        request.account.close(code, last.finish_reason, request.session.preprocess_ms)

    def _cancel(self, request_id: str, request: _Open) -> None:
        """Tells the engine once; it answers with Done unless the request was answered before."""
        if not request.cancel_sent:
            request.cancel_sent = True
            request.peer.send([Cancel(request_id)])

    def _fail_all(self, error: PhotonError, lost: EnginePeer | None = None) -> None:
        """Ends every request, or those of an engine that is lost and needs no Cancel. Raises nothing."""
        while lost is None and self._unchecked:
            _, accepted = self._unchecked.popitem()
            self._image_bytes -= accepted.image_bytes
            self._refuse(accepted.sender, error)
        for request_id, request in list(self._open.items()):
            if lost is None or request.peer is lost:
                try:
                    self._respond(request_id, request, _failure(error))
                    if lost is None:
                        self._cancel(request_id, request)
                except Exception:  # this one cannot be ended in order; the others must not pay for it
                    log.exception("request %s could not be ended", request_id)

    def _poll_cancelled(self) -> None:
        """Asks some of the open requests, in turn, whether their client has left."""
        now = time.monotonic()
        if now < self._next_cancel_poll or not self._open:
            return
        self._next_cancel_poll = now + CANCEL_POLL_MS / 1000
        waiting = [item for item in self._open.items() if not item[1].cancel_sent]
        start = self._cancel_cursor % max(1, len(waiting))
        for request_id, request in (waiting[start:] + waiting[:start])[:CANCEL_POLL_MAX]:
            try:
                left = request.sender.is_cancelled()
            except Exception as error:  # of Triton's binding; the others must not pay for it
                self._cancel(request_id, request)
                self._respond(request_id, request, _failure(_as_photon_error(error, "a client could not be asked for")))
                continue
            if left:
                self._cancel(request_id, request)
        self._cancel_cursor = start + CANCEL_POLL_MAX


def _failure(error: PhotonError) -> Response:
    return Response(error=error, final=True)


def _as_photon_error(error: Exception, what: str) -> PhotonError:
    """Ours as it is; anything else is a bug: its traceback is for the log, the client gets a sentence."""
    if isinstance(error, PhotonError):
        return error
    log.error("%s", what, exc_info=error)
    return PhotonError("INTERNAL", f"Inside the server {what}; its log says why.")
