"""Puts a step on the streams and reads its results: the join between the plan (Python) and the runner (device).

Stream order per step:  compute: forward, sample, event   copy: wait for that event, ids and values down, event
With host grammars:     copy: masks up, event             compute: wait for that event before sampling
With pictures:          copy: pixels up, event            compute: wait for that event before the encoder (with graphs)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from photon_backend.config import Settings
from photon_backend.engine.capture import can_capture
from photon_backend.engine.graphs import DecodeGraphs, buckets_for
from photon_backend.engine.kv_cache import KVCache, page_bytes
from photon_backend.engine.pipeline import NUM_SLOTS, Step
from photon_backend.engine.runner import PrefillRow, Runner
from photon_backend.engine.scheduler import Admission, Plan
from photon_backend.engine.sequence import Sequence
from photon_backend.engine.slots import DecodeSlot
from photon_backend.engine.streams import CudaStream, Event, Stream, make_streams
from photon_backend.engine.tables import Block
from photon_backend.engine.trace import Trace
from photon_backend.grammar.constraint import ALL_LEGAL, TokenAutomaton, fill_lines
from photon_backend.model.moondream import Moondream


class Stepper:
    def __init__(
        self, model: Moondream, settings: Settings, num_pages: int, delay: Callable[[str], None] | None = None
    ) -> None:
        """`delay`: see streams.py."""
        table = model.text.wte
        cache = KVCache(model.config.text, num_pages, settings.page_size, table.device, table.dtype)
        buckets = buckets_for(settings.rows)
        self.debug = settings.debug
        self.page_size = settings.page_size
        self.runner = Runner(model, cache, settings.rows, settings.debug, settings.kernels, settings.grammar_mb)
        self.tables = self.runner.automata.tables
        self.slots = [DecodeSlot(model.config, buckets[-1], table.device, table.dtype) for _ in range(NUM_SLOTS)]
        self.compute, self.copy = make_streams(table.device, delay)
        self.graphs: DecodeGraphs | None = None
        wanted = settings.graphs and not settings.debug  # whose asserts wait for the device
        if wanted and isinstance(self.copy, CudaStream) and can_capture():
            self.graphs = DecodeGraphs(self.runner, self.slots, buckets)
            self.runner.use_prefill_graphs()
            self.runner.use_vision_graphs(self.copy.stream)
        self.runner.pin_ahead(NUM_SLOTS, settings.prefill_crops)
        if isinstance(self.copy, CudaStream):
            torch.cuda.synchronize(table.device)  # all above was queued on this thread's stream; no step waits for it
        self.trace = Trace(self.compute)
        self.busy_ms = self.idle_ms = 0.0  # of the device, while steps followed each other
        self._last_done: Event | None = None

    def launch(self, step: Step, plan: Plan, samples: bool) -> None:
        """Queues the forward of a step; `samples`: and its sampling, which needs no mask."""
        slot = self.slots[step.slot]
        step.begun = self.compute.record()
        if self.debug:
            slot.poison()
        sampled_inside = False
        if plan.kind == "prefill":
            self.compute.run(
                self.runner.prefill, slot, [_prefill_row(a, self.tables.free_row) for a in plan.admissions]
            )
            self._wait_for_tables(plan.admissions)
        else:
            sampled_inside = self._launch_decode(step, slot, samples)
        forwarded = self._span(step, "prefill" if plan.kind == "prefill" else "forward", self.compute, step.begun)
        if samples and not sampled_inside:
            self.compute.run(self.runner.sample, slot, len(step.sequences), _spatial(step), False, _automata(step))
            self._span(step, "sampling", self.compute, forwarded)

    def _launch_decode(self, step: Step, slot: DecodeSlot, samples: bool) -> bool:
        """Whether the sampling is in it too: where there are graphs."""
        rows = [s.row for s in step.sequences]
        if self.graphs is not None:
            self.compute.run(self._replay, slot, rows, _spatial(step), samples)
            return True
        # planned already counts this step; the token that it feeds is the one before the token that it samples
        position = max(s.prompt_len + s.planned - 2 for s in step.sequences)
        self.compute.run(self._decode, slot, rows, position // self.page_size + 1, _spatial(step))
        return False

    def _replay(self, slot: DecodeSlot, rows: list[int], spatial: bool, samples: bool) -> None:
        assert self.graphs is not None
        batch = self.graphs.bucket(len(rows))
        slot.load_rows(rows + [self.runner.scratch] * (batch - len(rows)))
        self.graphs.replay(slot, batch, spatial, samples)

    def _decode(self, slot: DecodeSlot, rows: list[int], num_pages: int, spatial: bool) -> None:
        slot.load_rows(rows)
        self.runner.decode(slot, len(rows), num_pages, spatial)

    def sample_masked(self, step: Step) -> None:
        """Queues the sampling of a step with the masks that `fill_masks` has written."""
        slot, number = self.slots[step.slot], len(step.sequences)
        begun = self._now(self.copy)
        self.copy.run(slot.upload_mask, number)
        self._span(step, "copy", self.copy, begun)
        self.compute.wait(self.copy.record())
        begun = self._now(self.compute)
        self.compute.run(self.runner.sample, slot, number, _spatial(step), True, _automata(step))
        self._span(step, "sampling", self.compute, begun)

    def copy_out(self, step: Step) -> Event:
        """Queues the copy of a sampled step's results; the event lets the host read them."""
        slot = self.slots[step.slot]
        step.done = self.compute.record()
        self.copy.wait(step.done)
        begun = self._now(self.copy)
        self.copy.run(slot.copy_out)
        self._span(step, "copy", self.copy, begun)
        return self.copy.record()

    def _now(self, stream: Stream) -> Event | None:
        """While a trace is on: an event amid the work of a step. An error before it stays with the step, whose last
        event must carry it."""
        if not self.trace.on:
            return None
        event = stream.record()
        stream.wait(event)
        return event

    def _span(self, step: Step, lane: str, stream: Stream, begun: Event | None) -> Event | None:
        """While a trace is on: notes what the stream did for the step since `begun`; the event where that ends."""
        ended = self._now(stream)
        if ended is not None:
            step.spans.append((lane, begun, ended))
        return ended

    def fill_masks(self, step: Step) -> list[Sequence]:
        """Writes the legal ids of every sequence of the step; returns those that have none, which must fail."""
        mask = self.slots[step.slot].host_mask.numpy()
        mask[: len(step.sequences)] = ALL_LEGAL
        asked = [(i, s) for i, s in enumerate(step.sequences) if s.asks_matcher]
        fill_lines([(s.matcher, i) for i, s in asked], mask)
        stuck = [(i, s) for i, s in asked if not mask[i].any()]
        for i, _ in stuck:
            mask[i] = ALL_LEGAL  # a row without a legal token would be NaN; its sequence fails instead
        return [s for _, s in stuck]

    def place(self, automaton: TokenAutomaton, words: Tensor | None) -> Block | None:
        """Tables on the device for one more sequence, or None when all room is in use. Nothing waits for the upload
        but the first step that reads them. `words`: its `host_words`, unless it has a block."""
        placed = self.tables.place(automaton)
        if placed is None:
            return None
        block, new = placed
        if new:
            assert words is not None
            self.copy.run(self.tables.write, block.base, words)
            block.ready = self.copy.record()
        return block

    def _wait_for_tables(self, admissions: list[Admission]) -> None:
        for admission in admissions:
            block = admission.sequence.tables
            if block is not None and block.ready is not None:
                self.compute.wait(block.ready)
                block.ready = None

    def read(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the step's own copy. Returns ids int64 [B] and values float32 [B, 2] where they landed: the slot's,
        so to be read before the step is retired. Raises what the step raised."""
        last, self._last_done = self._last_done, None  # time lost to a step that fails is no bubble
        step.copied.wait()
        self._account(step, last)
        if self.trace.on:
            for lane, begun, ended in step.spans:
                self.trace.device(lane, step.index, begun, ended)
        slot, number = self.slots[step.slot], len(step.sequences)
        ids = slot.host_ids[:number]
        assert not self.debug or ids.min() >= 0, "a mirror was read before its copy had landed"
        return ids, slot.host_values[:number]

    def _account(self, step: Step, last: Event | None) -> None:
        """The bubble: what the device did nothing between two steps that followed each other. No call here waits."""
        self.busy_ms += step.done.ms_since(step.begun)
        if last is not None:
            self.idle_ms += step.begun.ms_since(last)
        self._last_done = step.done

    def pause(self) -> None:
        """Nothing is in flight and nothing to do: the time until the next step is no bubble."""
        self._last_done = None

    def poison(self, pages: list[int]) -> None:
        """Debug: spoils freed pages, in stream order."""
        self.compute.run(self.runner.cache.poison, pages)

    def close(self) -> None:
        self.compute.close()
        self.copy.close()


def _automata(step: Step) -> bool:
    return any(s.tables is not None for s in step.sequences)


def _spatial(step: Step) -> bool:
    return any(s.program.spatial for s in step.sequences)


def _prefill_row(admission: Admission, free_row: tuple[int, int, int]) -> PrefillRow:
    s = admission.sequence
    request, sampling = s.request, s.request.sampling
    return PrefillRow(
        row=s.row,
        pages=list(s.pages),
        cached_len=s.cached_len,
        prefix_len=s.prefix_len,
        prompt_ids=request.prompt_ids,
        coords=request.coords,
        sizes=request.sizes,
        pixels=s.pixels if admission.computes_prefix else None,
        tiling=s.tiling,
        load_tail=admission.load_tail,
        save_tail=admission.save_tail,
        state=s.program.start,
        think_until=s.prompt_len + s.program.think_limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        automaton=s.tables.row_values if s.tables is not None else free_row,
    )


def default_num_pages(model: Moondream, settings: Settings) -> int:
    """Pages when the settings give none: twice what full contexts in all rows need, so that prefixes stay cached, but
    within the memory that is meant for it (2 GiB on a CPU, `kv_fraction` on a GPU), and enough for one full row."""
    per_row = -(-model.config.text.max_context // settings.page_size)
    device, dtype = model.text.wte.device, model.text.wte.dtype
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - settings.kv_fraction) * total)
    else:
        budget = 2 << 30
    fitting = budget // page_bytes(model.config.text, settings.page_size, dtype)
    return max(per_row + 1, min(settings.rows * per_row * 2, fitting))
