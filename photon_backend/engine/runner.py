"""What the device does in a step. Knows rows, pages and slots, nothing of requests or scheduling.

State that advances by itself lives here by row, on the device: next token, its kind, its spatial value, the automaton
state, the position. A decode step therefore needs nothing from the host but which rows take part, and token t reaches
forward t+1 without leaving the device (P6).

P1: everything here runs on the one compute stream, in the order in which it was queued; that order is what makes the
relay and the KV writes right. P5: arguments are never changed after they were handed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from photon_backend.engine.kv_cache import KVCache, PagedDecode, PagedPrefill, Segment
from photon_backend.engine.sampler import apply_bitmask, draw
from photon_backend.engine.slots import POISONED, DecodeSlot
from photon_backend.engine.tables import AutomatonTables, RowAutomata
from photon_backend.grammar.spatial import CHOOSES_OBJECT, DECODES_COORDINATE, NEXT, THINKING, State, suppressed_ids
from photon_backend.model.moondream import Moondream

TOKEN, COORDINATE, SIZE = 0, 1, 2  # kinds of the next input: an embedding of the id, or of the value beside it


@dataclass(frozen=True)
class PrefillRow:
    """One sequence of a prefill step. Immutable: the device may read it long after the launch."""

    row: int
    pages: list[int]
    cached_len: int  # positions already in its pages
    prefix_len: int
    prompt_ids: list[int]
    coords: list[float]
    sizes: list[tuple[float, float]]
    pixels: np.ndarray | None  # uint8 [C, side, side, 3] when the prefix is computed here
    tiling: tuple[int, int]
    load_tail: tuple[int, int] | None
    save_tail: tuple[int, int] | None
    state: int  # start of its automaton
    think_until: int  # position at which answer_id is forced
    temperature: float
    top_p: float
    top_k: int
    seed: int
    automaton: tuple[int, int, int]  # row_values of its tables, see tables.py

    @property
    def length(self) -> int:
        """Positions after this step."""
        return self.prefix_len + len(self.prompt_ids)


class Runner:
    def __init__(
        self, model: Moondream, cache: KVCache, rows: int, debug: bool, kernels: bool = True, grammar_mb: int = 64
    ) -> None:
        """`kernels`: use ours where they can run; otherwise, and elsewhere, plain torch. `grammar_mb`: of tables."""
        config = model.config
        self.model, self.cache, self.debug = model, cache, debug
        self.device = cache.k.device
        self.ids = config.tokenizer
        self.scratch = rows  # fills a batch up to the size of its graph; owns the cache's scratch page
        table_width = -(-config.text.max_context // cache.page_size)

        def by_row(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows + 1, *shape, dtype=dtype, device=self.device)

        self.next_token = by_row(torch.int64)
        self.kind = by_row(torch.int64)
        self.value = by_row(torch.float32, 2)
        self.state = by_row(torch.int64)
        self.position = by_row(torch.int64)
        self.page_table = by_row(torch.int64, table_width)
        self.think_until = by_row(torch.int64)
        self.temperature = by_row(torch.float32)
        self.top_p = by_row(torch.float32)
        self.top_k = by_row(torch.int64)
        self.seed = by_row(torch.int64)
        self.automata = RowAutomata(AutomatonTables(config.text.vocab_size, grammar_mb, self.device), rows + 1)
        self.page_table[self.scratch] = cache.scratch_page
        self._make_tables()
        self._fused, self._draw = None, draw
        if kernels and self.device.type == "cuda":  # Triton is there wherever torch has CUDA
            from photon_backend.engine.fused import FusedText
            from photon_backend.kernels.sample import draw as kernel_draw

            self._draw = kernel_draw
            if FusedText.supports(model.text):
                self._fused = FusedText(model.text, cache)

    def _make_tables(self) -> None:
        """Automaton tables, one line per state: what is suppressed, what follows, what is decoded."""
        states = list(State)
        self.suppress = torch.zeros(len(states), self.model.config.text.vocab_size, dtype=torch.bool)
        for state in states:
            self.suppress[state, suppressed_ids(state, self.model.config)] = True
        self.suppress = self.suppress.to(self.device)
        self.next_state = torch.tensor(NEXT, device=self.device)
        self.thinking = torch.tensor([s in THINKING for s in states], device=self.device)
        self.chooses = torch.tensor([s in CHOOSES_OBJECT for s in states], device=self.device)
        self.takes_coordinate = torch.tensor([s in DECODES_COORDINATE for s in states], device=self.device)
        self.takes_size = torch.tensor([s == State.BOX_SIZE for s in states], device=self.device)

    # ---- forward

    def prefill(self, slot: DecodeSlot, batch: list[PrefillRow]) -> None:
        """Encodes new pictures, writes KV of prefixes and prompts, leaves the last hidden state of each in the slot."""
        self._set_rows(slot, batch)
        self._copy_tails([r.load_tail for r in batch])
        x = self._prompt_embeddings(batch)
        positions = self._upload(np.concatenate([np.arange(r.cached_len, r.length) for r in batch]))
        attend = PagedPrefill(self.cache, *self._segments(batch))
        hidden = self.model.text(x, positions, attend)
        last = hidden[self._upload(np.cumsum([r.length - r.cached_len for r in batch]) - 1)]
        self._keep(slot, last, self.model.text.logits(last))
        self._copy_tails([r.save_tail for r in batch])

    def decode(self, slot: DecodeSlot, batch: int, num_pages: int, spatial: bool) -> None:
        """One token further for each of the slot's first `batch` rows, none of which needs more than `num_pages` pages.

        Every shape and address depends on the arguments alone, so the whole of it can be captured in a CUDA graph.
        """
        row = slot.rows[:batch]
        position = self.position[row]
        x = self._next_embeddings(row, spatial)
        if self._fused is not None:
            self._keep(slot, *self._fused.forward(x, row, self.position, self.page_table))
        else:
            attend = PagedDecode(self.cache, self.page_table[row, :num_pages], position)
            hidden = self.model.text(x, position, attend)
            self._keep(slot, hidden, self.model.text.logits(hidden))
        self.position[row] = torch.where(row == self.scratch, 0, position + 1)

    def _keep(self, slot: DecodeSlot, hidden: Tensor, logits: Tensor) -> None:
        """Leaves in the slot what sampling needs: hidden [B, D] before the final LN, logits [B, V]."""
        slot.hidden[: len(hidden)] = hidden
        slot.logits[: len(logits)] = logits

    def _next_embeddings(self, row: Tensor, spatial: bool) -> Tensor:
        """[B, D]: the embedding of each row's next token, or of the value that it stands for."""
        token = self.next_token[row]
        if self.debug:
            assert bool((token >= 0).all()), "a relay cell was read twice, or before it was written"
            self.next_token[row] = POISONED
        x = self.model.text.embed(token)
        if not spatial:
            return x
        kind, value, region = self.kind[row, None], self.value[row], self.model.region
        x = torch.where(kind == COORDINATE, region.encode_coordinate(value[:, :1]), x)
        return torch.where(kind == SIZE, region.encode_size(value), x)

    # ---- sampling

    def sample(self, slot: DecodeSlot, number: int, spatial: bool, masked: bool, automata: bool) -> None:
        """Samples the step in the slot, advances the automata and leaves the next input of each row on the device.

        `spatial`: some row may take a coordinate or a size; without it the region heads are not run. `masked`: apply
        the slot's mask of legal ids. `automata`: some row may have a token automaton.
        """
        row, logits = slot.rows[:number], slot.logits[:number]
        state, position = self.state[row], self.position[row]
        legal = logits.masked_fill(self.suppress[state], float("-inf"))
        if masked:
            legal = apply_bitmask(legal, slot.mask[:number])
        if automata:
            legal = apply_bitmask(legal, self.automata.masks(row, ~self.thinking[state], legal.shape[1]))
        ids = self._draw(legal, self.temperature[row], self.top_p[row], self.top_k[row], self.seed[row], position)
        kind = torch.zeros_like(ids)
        if spatial:
            ids, kind = self._spatial(slot, number, state, position, ids)
        if automata:
            self.automata.advance(row, ~self.thinking[state], ids)
        answers = self.thinking[state] & (ids == self.ids.answer_id)
        self.state[row] = torch.where(answers, int(State.TEXT_FIRST), self.next_state[state])
        self.next_token[row] = ids
        self.kind[row] = kind
        slot.ids[:number] = ids

    def _spatial(
        self, slot: DecodeSlot, number: int, state: Tensor, position: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids and kinds of rows whose state decides more than the sample does; fills slot.values and self.value."""
        row, hidden, region = slot.rows[:number], slot.hidden[:number], self.model.region
        coordinate, size = self.takes_coordinate[state], self.takes_size[state]
        ends = self.chooses[state] & (slot.logits[:number].argmax(-1) == self.ids.eos_id)
        forced = self.thinking[state] & (position >= self.think_until[row])
        ids = torch.where(forced, self.ids.answer_id, ids)
        ids = torch.where(coordinate, self.ids.coord_id, ids)
        ids = torch.where(size, self.ids.size_id, ids)
        ids = torch.where(ends, self.ids.eos_id, ids)
        coordinate = (coordinate & ~ends) | (self.thinking[state] & (ids == self.ids.coord_id))
        point = region.coordinate_value(region.decode_coordinate(hidden).argmax(-1))
        extent = region.size_value(region.decode_size(hidden).argmax(-1))
        value = torch.where(size[:, None], extent, torch.stack([point, point], -1))
        self.value[row] = value
        slot.values[:number] = value
        kind = torch.where(size, SIZE, torch.where(coordinate, COORDINATE, TOKEN))
        return ids, kind

    # ---- prefill input

    def _set_rows(self, slot: DecodeSlot, batch: list[PrefillRow]) -> None:
        """A row's state starts here: everything a former owner left is overwritten.

        It comes first, so a step that fails later leaves rows that write to their own pages only.
        """
        number = len(batch)
        slot.load_rows([r.row for r in batch])
        row = slot.rows[:number]
        self.next_token.index_fill_(0, row, 0)  # `[row] = 0` would copy a 0 from pageable memory, and wait for it
        self.state[row] = self._upload([r.state for r in batch])
        self.position[row] = self._upload([r.length for r in batch])
        self.think_until[row] = self._upload([r.think_until for r in batch])
        self.temperature[row] = self._upload([r.temperature for r in batch], np.float32)
        self.top_p[row] = self._upload([r.top_p for r in batch], np.float32)
        self.top_k[row] = self._upload([r.top_k for r in batch])
        self.seed[row] = self._upload([r.seed for r in batch])
        self.automata.start(row, self._upload([r.automaton for r in batch]))
        table = np.zeros((number, self.page_table.shape[1]), np.int64)
        for i, r in enumerate(batch):
            table[i, : len(r.pages)] = r.pages
        self.page_table[row] = self._upload(table)

    def _prompt_embeddings(self, batch: list[PrefillRow]) -> Tensor:
        """[T, D]: prefix, where it is computed, and prompt of each sequence, packed."""
        ids: list[int] = []
        pictures: list[int] = []  # where each picture's embeddings begin
        for r in batch:
            if r.pixels is not None:
                pictures.append(len(ids) + 1)
                ids += [self.ids.bos_id] * r.prefix_len  # placeholders but for the first
            ids += r.prompt_ids
        token = np.array(ids)
        x = self.model.text.embed(self._upload(token))
        if pictures:
            self._put_pictures(x, pictures, [r for r in batch if r.pixels is not None])
        region = self.model.region
        for kind, values, encode in (
            (self.ids.coord_id, [[c] for r in batch for c in r.coords], region.encode_coordinate),
            (self.ids.size_id, [s for r in batch for s in r.sizes], region.encode_size),
        ):
            if values:
                x[self._upload(np.flatnonzero(token == kind))] = encode(self._upload(values, np.float32))
        return x

    def _put_pictures(self, x: Tensor, begins: list[int], rows: list[PrefillRow]) -> None:
        pixels = self._upload(np.concatenate([r.pixels for r in rows if r.pixels is not None]), np.uint8)
        embeddings = self.model.vision.encode(pixels, [r.tiling for r in rows])
        for begin, embedding in zip(begins, embeddings, strict=True):
            x[begin : begin + len(embedding)] = embedding

    def _segments(self, batch: list[PrefillRow]) -> tuple[Tensor, list[Segment]]:
        """Flat positions that the step writes, and what each sequence sees."""
        size = self.cache.page_size
        writes, segments, begin = [], [], 0
        for r in batch:
            position = np.arange(r.length)
            flat = np.array(r.pages)[position // size] * size + position % size
            new = position[r.cached_len :, None]
            mask = (position <= new) | ((position < r.prefix_len) & (new < r.prefix_len))
            writes.append(flat[r.cached_len :])
            end = begin + len(new)
            segments.append(Segment(begin, end, self._upload(flat), self._upload(mask, np.bool_)))
            begin = end
        return self._upload(np.concatenate(writes)), segments

    def _copy_tails(self, pairs: list[tuple[int, int] | None]) -> None:
        present = [p for p in pairs if p is not None]
        if present:
            source, target = self._upload(present).unbind(1)
            self.cache.copy_pages(source, target)

    def _upload(self, values: object, dtype: type = np.int64) -> Tensor:
        """A device tensor; from pinned memory on a GPU, whose allocator keeps it until the copy has run."""
        host = torch.from_numpy(np.ascontiguousarray(values, dtype))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
