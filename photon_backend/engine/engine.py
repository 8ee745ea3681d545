"""The engine: one thread that runs the tick, and a thread-safe door in front of it.

    tick:  intake -> commit the oldest step when both slots are taken -> finalize -> launch

In the steady state two steps are in flight when a tick starts: t, whose results have landed or are about to, and t+1,
which the device runs while t is committed. Launch comes last, so t+2 queues right behind t+1. When there is nothing to
launch, the oldest step is committed instead: the only time the loop waits with one step in flight. `overlap=False`
commits every step at once; same code, same results, kept for ever as the thing to compare with.

Invariants
- P7: every request that `post` took is answered by exactly one Done or Failed.
- A failure inside a step fails the requests of that step and nobody else. A failure of the tick itself, or of the
  device, ends the engine: everything open is answered UNAVAILABLE and `failure` says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from photon_backend.config import Settings
from photon_backend.engine.book import Book, MatcherFor
from photon_backend.engine.constraints import Compiled, Constraints
from photon_backend.engine.pages import PagePool
from photon_backend.engine.pipeline import Pipeline, Step
from photon_backend.engine.prefix_cache import PrefixCache
from photon_backend.engine.scheduler import Plan, Scheduler
from photon_backend.engine.sequence import Sequence
from photon_backend.engine.stepper import Stepper, default_num_pages
from photon_backend.engine.trace import Recorder
from photon_backend.grammar.compiler import Grammars
from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import load_model
from photon_backend.protocol import ALONE, FromEngine, Record, Status, ToEngine, unavailable

LONGEST_SLEEP_S = 3600.0  # a deadline may lie further off than a lock can wait
log = logging.getLogger("photon.engine")

SNAPSHOT_S = 0.02  # 15 to 30 us each: taken every tick it was a fifth of the host work of one row


class Engine:
    def __init__(
        self,
        settings: Settings,
        emit: Callable[[bytes, list[FromEngine]], None],
        model: Moondream | None = None,
        delay: Callable[[str], None] | None = None,
        matcher_for: MatcherFor = lambda request: None,
    ) -> None:
        """Loads the checkpoint, unless the model is given. `emit(client, messages)` is called on the engine thread and
        must not block.

        Raises FileNotFoundError or ValueError when the checkpoint cannot be loaded. `delay` is for tests, see
        streams.py. `matcher_for` gives the host grammar of a request, if it has one.
        """
        self.settings = settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._model_name = Path(settings.checkpoint).name
        if model is None:
            dtype = getattr(torch, settings.dtype)
            model = load_model(Path(settings.checkpoint), torch.device(settings.device), dtype)
        self.tick_limit_s = settings.tick_limit_s or _tick_limit_s(model, settings)
        pages = settings.pages or default_num_pages(model, settings)
        self.config = model.config
        self.pipeline = Pipeline()
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(settings, self.pool, self.cache)
        self.stepper = Stepper(model, settings, pages, delay)
        grammars = Grammars(Path(settings.checkpoint), self.config, self.stepper.tables.max_words)
        self.constraints = Constraints(grammars, self.stepper, lambda compiled: self._put(b"", compiled, None))
        self.book = Book(
            self.config, settings.max_waiting, self.scheduler, matcher_for, self._release, self.constraints
        )
        self.failure: BaseException | None = None
        self.trace = self.stepper.trace  # started and stopped between two ticks, or by the recorder
        self.recorder = Recorder(self.trace, emit)
        self._emit = emit
        self._wake = threading.Condition()
        self._inbox: deque[tuple[bytes, ToEngine | Compiled | None, np.ndarray | None]] = deque()
        self._stopping = False
        self._host_s = self._waited_s = 0.0
        self._ticks = self._deferred = self._tick_number = 0
        self._alone = dict.fromkeys(ALONE, 0)
        self._obstacle = "idle"  # why the last tick that launched nothing did not
        self._at_work = False
        self._next_snapshot = 0.0
        self._status = self.snapshot()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def post(self, client: bytes, message: ToEngine, pixels: np.ndarray | None = None) -> None:
        """Hands a message over. `pixels` belongs to a Picture: uint8 [C, side, side, 3], not changed afterwards."""
        self._put(client, message, pixels)

    def drop_client(self, client: bytes) -> None:
        """Cancels every request of a client that is gone; nothing more is emitted for it but their ends."""
        self._put(client, None, None)

    def status(self) -> Status:
        """A snapshot that the engine thread took between two ticks, so its counters add up. At most `SNAPSHOT_S` old
        while the engine works, up to date when it rests."""
        return self._status

    def pulse(self) -> int | None:
        """The number of the tick that is running; None while the engine rightly sleeps. One that stays the same for
        `tick_limit_s` is that of a device that hangs or a loop without end."""
        return self._tick_number if self._at_work else None

    def stop(self) -> None:
        """Ends the engine thread; everything open is answered UNAVAILABLE."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _put(self, client: bytes, message: ToEngine | Compiled | None, pixels: np.ndarray | None) -> None:
        with self._wake:
            self._inbox.append((client, message, pixels))
            self._wake.notify()

    # ---- engine thread

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self.stepper.compute.adopt()
            while not self._stopping:
                self._at_work = True
                if not self.tick():
                    self._at_work = bool(self.scheduler.running)  # idle beside running rows: not our plan, so no rest
                    self._idle()
        except BaseException as error:
            log.exception("the engine stops")
            self.failure = error
        self._finish()

    def tick(self) -> bool:
        """One turn of the loop; False when there was nothing to do and nothing is in flight."""
        self._tick_number += 1
        started, waited = time.perf_counter(), self._waited_s
        self._intake()
        now = self._mark("intake", started)
        if self.pipeline.full:
            self._commit()
            now = self._mark("commit", now)
        self._finalize()
        now = self._mark("finalize", now)
        if self.recorder.start():
            now = time.perf_counter()
        plan = self.scheduler.plan(self.pipeline.next_index)
        busy = plan is not None or bool(self.pipeline)  # a commit may free what the next plan waits for
        if plan is not None:
            if plan.kind == "prefill":  # whose launch takes milliseconds, for which no client is to wait
                self._flush()
                now = self._mark("emit", now)
            self._launch(plan)
            now = self._mark("launch", now)
        else:
            self._obstacle = self.scheduler.obstacle() if busy else "idle"
        if self.pipeline and (plan is None or not self.settings.overlap):
            self._commit()
            now = self._mark("commit", now)
        self._flush()
        ended = self._mark("emit", now)
        self.recorder.end_of_tick()
        if busy:
            self._ticks += 1
            self._host_s += ended - started - (self._waited_s - waited)
        if not busy or ended >= self._next_snapshot:
            self._next_snapshot = ended + SNAPSHOT_S
            self._status = self.snapshot()
        return busy

    def _mark(self, lane: str, begin: float) -> float:
        """The time now, where a phase of the tick ends."""
        end = time.perf_counter()
        if self.trace.on:
            self.trace.host(lane, self._tick_number, begin, end)
        return end

    def _intake(self) -> None:
        now = time.monotonic()
        while self._inbox:
            client, message, pixels = self._inbox.popleft()
            if isinstance(message, Compiled):
                error = self.constraints.take(message)
                if error is not None:
                    self.book.fail(message.sequence, error.code, error.message, now)
            elif isinstance(message, Record):
                self.recorder.take(client, message, now)
            else:
                if message is None:
                    self.recorder.drop(client)
                self.book.take(client, message, pixels, now)
        self.book.expire(now)

    def _commit(self) -> None:
        """Waits for the oldest step and applies its tokens."""
        step = self.pipeline.commit_oldest()
        started = time.perf_counter()
        try:
            ids, values = self.stepper.read(step)
        except Exception as error:
            if self._fatal(error):
                raise
            log.exception("step %d failed", step.index)
            self.book.fail_step(step, time.monotonic())
        else:
            self._waited_s += self._mark("wait", started) - started
            if step.kind == "prefill":
                self.scheduler.cost.observe(step.num_crops, step.num_tokens, step.done.ms_since(step.begun))
            self.book.apply(step, ids, values, time.monotonic())
        for sequence in self.pipeline.retire(step):
            self._release(sequence)

    def _finalize(self) -> None:
        """Samples the steps whose host grammars had to wait for a commit."""
        for step in self.pipeline.unsampled():
            self._sample_masked(step)

    def _launch(self, plan: Plan) -> None:
        if not self.pipeline:
            self._alone[self._obstacle if self.settings.overlap else "blocking"] += 1
        step = self.pipeline.launch(plan.kind, plan.sequences)
        step.entries, step.num_crops, step.num_tokens = plan.entries, plan.num_crops, plan.num_tokens
        constrained = [s for s in step.sequences if s.matcher is not None]
        self.stepper.launch(step, plan, samples=not constrained)
        self.book.launched(plan, time.monotonic())
        if not constrained:
            self.pipeline.sampled(step, self.stepper.copy_out(step))
        elif all(s.inflight == 1 for s in constrained):
            self._sample_masked(step)
        else:  # a matcher is a token behind: it is asked after the commit
            self._deferred += 1

    def _sample_masked(self, step: Step) -> None:
        for sequence in self.stepper.fill_masks(step):
            matcher = sequence.matcher
            reason = f"the grammar allows no further token: {matcher.failure or 'it has a dead end'}"
            self.book.fail(sequence, matcher.failure_code, reason, time.monotonic())
        self.stepper.sample_masked(step)
        self.pipeline.sampled(step, self.stepper.copy_out(step))

    def _release(self, sequence: Sequence) -> None:
        self.constraints.release(sequence)
        freed = self.scheduler.release(sequence)
        if self.settings.debug and freed:
            self.stepper.poison(freed)

    def _fatal(self, error: Exception) -> bool:
        """A CUDA error is sticky: no later call on that device can succeed. Running out of memory is not one."""
        on_gpu = self.settings.device != "cpu" and not isinstance(error, torch.OutOfMemoryError)
        return on_gpu and "CUDA" in str(error)

    def _flush(self) -> None:
        for client, messages in self.book.drain():
            self._emit(client, messages)

    def _idle(self) -> None:
        """Sleeps until a message comes or the next deadline passes."""
        self.stepper.pause()
        timeout = min(self.book.next_deadline(), self.recorder.deadline) - time.monotonic()
        with self._wake:
            if not self._inbox and not self._stopping:
                self._wake.wait(min(max(0.0, timeout), LONGEST_SLEEP_S))

    def _finish(self) -> None:
        self._intake()
        reason = "it failed" if self.failure else "it is shutting down"
        error = unavailable(f"the engine ended before the answer was complete: {reason}", 5)
        self.book.fail_all(error.code, error.message, time.monotonic())
        self.recorder.fail(error)
        self._flush()
        self._status = self.snapshot()
        self.constraints.close()
        self.stepper.close()

    def snapshot(self) -> Status:
        """Counters and gauges of this moment; between two ticks, on the thread that runs them."""
        status = self.book.status()
        status.model = self._model_name
        status.device = self.settings.device
        status.overlap = self.settings.overlap
        status.rows = self.settings.rows
        status.rows_in_use = len(self.scheduler.running)
        status.pages = self.pool.num_pages
        status.pages_in_use = self.pool.num_used
        status.waiting = len(self.scheduler.waiting)
        status.running = sum(not s.finished for s in self.scheduler.running.values())
        status.zombies = sum(s.zombie for s in self.scheduler.running.values())
        status.steps = self.pipeline.num_launched
        status.steps_overlapped = self.pipeline.num_overlapped - self._deferred
        status.steps_alone = dict(self._alone)
        status.prefix_entries = len(self.cache)
        status.prefix_hits = self.cache.hits
        status.prefix_misses = self.cache.misses
        status.host_ms = self._host_s * 1e3
        status.ticks = self._ticks
        status.steps_deferred = self._deferred
        status.constrained_device = self.constraints.num_device
        status.constrained_host = self.constraints.num_host
        status.constrained_fallback = self.constraints.num_fallback
        status.device_busy_ms = self.stepper.busy_ms
        status.device_idle_ms = self.stepper.idle_ms
        return status


def _tick_limit_s(model: Moondream, settings: Settings) -> float:
    """Far above the longest step: on a CPU a prefill of many crops through a large model takes minutes."""
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    return 15.0 + (200.0 * billions if settings.device == "cpu" else 0.0)
