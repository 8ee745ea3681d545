"""What the device does in a step. Knows rows, pages and slots, nothing of requests or scheduling.

State that advances by itself lives by row on the device (`rows.py`), so a decode step needs nothing from the host but
which rows take part, and token t reaches forward t+1 without leaving the device (P6).

P1: everything here runs on the one compute stream, in the order in which it was queued, but for pixels on their way up
(vision_graphs.py); that order is what makes the relay and the KV writes right. P5: arguments are never changed after
they were handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from photon_backend.engine.kv_cache import KVCache, PagedDecode, PagedPrefill, Segment, prefill_mask
from photon_backend.engine.rows import COORDINATE, SIZE, Asked, Rows
from photon_backend.engine.sampler import sample_step
from photon_backend.engine.slots import POISONED, DecodeSlot
from photon_backend.engine.vision_graphs import PictureEncoder
from photon_backend.model.moondream import Moondream
from photon_backend.model.region import Region

if TYPE_CHECKING:
    from photon_backend.engine.fused import FusedText
    from photon_backend.engine.prefill_graphs import PrefillGraphs

MOST_UPLOADS = 16  # of a step, of one size, pixels aside
MOST_UPLOADED = 1 << 17  # bytes of one


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


def relay_in_torch(
    row: Tensor, next_token: Tensor, position: Tensor, page_table: Tensor, embeddings: Tensor, scratch: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """As `kernels.relay.relay`."""
    positions = position[row]
    x.copy_(torch.nn.functional.embedding(next_token[row], embeddings))
    position[row] = torch.where(row == scratch, 0, positions + 1)
    return positions, page_table[row]


def encode_in_torch(region: Region, row: Tensor, kinds: Tensor, values: Tensor, x: Tensor) -> None:
    """As `kernels.region.encode_values`."""
    kind, value = kinds[row, None], values[row]
    x.copy_(torch.where(kind == COORDINATE, region.encode_coordinate(value[:, :1]), x))
    x.copy_(torch.where(kind == SIZE, region.encode_size(value), x))


def heads_in_torch(region: Region, hidden: Tensor, asked: Asked | None = None) -> tuple[Tensor, Tensor]:
    """hidden [B, D], before the final LN -> logits of a coordinate [B, bins], and of width and height [B, 2, bins].

    A head that no row asks for may say anything; here all are right.
    """
    return region.decode_coordinate(hidden), region.decode_size(hidden)


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
        num_pages = -(-config.text.max_context // cache.page_size)
        self.rows = Rows(config, model.region, rows + 1, num_pages, grammar_mb, self.device)
        self.rows.page_table[self.scratch] = cache.scratch_page
        self.automata = self.rows.automata
        self._fused: FusedText | None = None
        self._short: PrefillGraphs | None = None  # the layers of short prefills
        self._prefill: Callable[[Tensor, list[PrefillRow], Tensor, Tensor], None] = self._prefill_in_torch
        self._relay: Callable[..., tuple[Tensor, Tensor]] = relay_in_torch
        self._embed_values: Callable[..., None] = partial(encode_in_torch, model.region)
        self._heads: Callable[..., tuple[Tensor, Tensor]] = partial(heads_in_torch, model.region)
        self._encode_crops: Callable[[Tensor], Tensor] = model.vision.encode_crops
        self._sample: Callable[..., None] = partial(sample_step, self.rows)
        self._encoder: PictureEncoder | None = None
        self._encode_pictures: Callable[[Sequence[np.ndarray], Sequence[tuple[int, int]]], Tensor] = (
            self._encode_at_once
        )
        if kernels and self.device.type == "cuda":  # Triton is there wherever torch has CUDA
            self.use_kernels()

    def use_kernels(self) -> None:
        """From now on steps run through our kernels; on a CPU that is for tests, under TRITON_INTERPRET=1."""
        from photon_backend.engine import fused_vision
        from photon_backend.engine.fused import FusedText
        from photon_backend.engine.fused_region import FusedRegion
        from photon_backend.kernels.relay import relay
        from photon_backend.kernels.sample import SampleKernel

        self._relay, self._sample = relay, SampleKernel(self.rows)
        if FusedText.supports(self.model.text):
            self._fused = FusedText(self.model.text, self.cache)
            self._prefill = self._prefill_fused
        if fused_vision.supports(self.model.vision):
            self._encode_crops = partial(fused_vision.encode_crops, self.model.vision)
        if FusedRegion.supports(self.model.region):
            region = FusedRegion(self.model.region)
            self._embed_values, self._heads = region.encode, region.heads

    def use_prefill_graphs(self) -> None:
        """From now on short prefills go through CUDA graphs, captured here, where there are kernels for it."""
        if self._fused is not None:
            from photon_backend.engine.prefill_graphs import PrefillGraphs

            self._short = PrefillGraphs(self._fused, self.rows.page_table, self.scratch)
            self._short.capture()

    def use_vision_graphs(self, uploads: torch.cuda.Stream) -> None:
        """From now on pictures are encoded through CUDA graphs, captured here, and their pixels go up on `uploads`."""
        self._encoder = PictureEncoder(self.model.vision, self._encode_crops, uploads)
        self._encoder.capture()
        self._encode_pictures = self._encoder.encode

    def pin_ahead(self, steps: int, crops: int) -> None:
        """Makes the allocator keep pinned memory for the uploads of so many steps, in each of which all pictures but
        the last have fewer than `crops` crops. What it lacks a tick must pin: 2 ms for the first small blocks, 4 to 7
        for one of 8 MB.

        After all captures, which give up the pinned memory that nobody uses. Price: 8 MB, and that of the encoder.
        """
        if self.device.type == "cuda":
            sizes = [1 << bits for bits in range(3, MOST_UPLOADED.bit_length())] * steps * MOST_UPLOADS
            _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]  # all at once
            if self._encoder is not None:
                self._encoder.pin_ahead(steps, self.scratch, crops)  # a row for each picture

    # ---- forward

    def prefill(self, slot: DecodeSlot, batch: list[PrefillRow]) -> None:
        """Encodes new pictures, writes KV of prefixes and prompts, leaves the last hidden state of each in the slot."""
        self._set_rows(slot, batch)
        self._copy_tails([r.load_tail for r in batch])
        x = self._prompt_embeddings(batch)
        self._prefill(x, batch, slot.hidden[: len(batch)], slot.logits[: len(batch)])
        self._copy_tails([r.save_tail for r in batch])

    def _prefill_in_torch(self, x: Tensor, batch: list[PrefillRow], hidden: Tensor, logits: Tensor) -> None:
        """x [T, D]: inputs; writes the hidden state and logits of the last token of each sequence."""
        positions = self._upload(np.concatenate([np.arange(r.cached_len, r.length) for r in batch]))
        attend = PagedPrefill(self.cache, *self._segments(batch))
        ends = self._upload(np.cumsum([r.length - r.cached_len for r in batch]) - 1)
        hidden.copy_(self.model.text(x, positions, attend)[ends])
        logits.copy_(self.model.text.logits(hidden))

    def _prefill_fused(self, x: Tensor, batch: list[PrefillRow], hidden: Tensor, logits: Tensor) -> None:
        """As `_prefill_in_torch`, through the kernels."""
        from photon_backend.kernels.prefill import pack, unpack

        assert self._fused is not None
        sequences = [(r.row, r.cached_len, r.prefix_len, r.length) for r in batch]
        encodes = any(r.pixels is not None for r in batch)
        if self._short is not None and len(x) <= self._short.most and not encodes:
            x, parts, last = self._short.layers(x, sequences)
        else:
            packed = unpack(self._upload(pack(sequences)), len(x), len(batch))
            x, parts = self._fused.prefill_layers(x, packed, self.rows.page_table)
            last = packed.last
        self._fused.prefill_head(x, parts, last, hidden, logits)

    def compile_prefill(self, slot: DecodeSlot) -> None:
        """Runs the kernels of a prefill too long for a graph once, on a page that nobody reads: they are compiled now,
        not in a tick. Those of short ones are compiled as they are captured."""
        if self._fused is not None:
            from photon_backend.engine.prefill_graphs import BUCKETS
            from photon_backend.kernels.norm import MANY
            from photon_backend.kernels.prefill import pack, unpack

            tokens = max(BUCKETS[-1], MANY) + 1
            packed = unpack(self._upload(pack([(self.scratch, 0, 0, 1)] * tokens)), tokens, tokens)
            x = slot.hidden.new_zeros(tokens, slot.hidden.shape[1])
            x, parts = self._fused.prefill_layers(x, packed, self.rows.page_table)
            self._fused.prefill_head(x, parts, packed.last[:1], slot.hidden[:1], slot.logits[:1])

    def decode(self, slot: DecodeSlot, batch: int, num_pages: int, spatial: bool) -> None:
        """One token further for each of the slot's first `batch` rows, none of which needs more than `num_pages` pages.

        Every shape and address depends on the arguments alone, so the whole of it can be captured in a CUDA graph.
        """
        x, logits = slot.hidden[:batch], slot.logits[:batch]
        position, pages = self._next_inputs(slot.rows[:batch], x, spatial)
        if self._fused is not None:
            self._fused.forward(x, position, pages, logits)
        else:
            attend = PagedDecode(self.cache, pages[:, :num_pages], position)
            x.copy_(self.model.text(x, position, attend))
            logits.copy_(self.model.text.logits(x))

    def _next_inputs(self, row: Tensor, x: Tensor, spatial: bool) -> tuple[Tensor, Tensor]:
        """x [B, D]: the embedding of each row's next token, or of the value that it stands for.

        Moves the rows' positions on; returns those of the new tokens, int64 [B], and the rows' pages, int64 [B, P].
        """
        rows = self.rows
        if self.debug:
            assert bool((rows.next_token[row] >= 0).all()), "a relay cell was read twice, or before it was written"
        embeddings = self.model.text.wte
        position, pages = self._relay(row, rows.next_token, rows.position, rows.page_table, embeddings, self.scratch, x)
        if self.debug:
            rows.next_token.index_fill_(0, row, POISONED)
        if spatial:
            self._embed_values(row, rows.kind, rows.value, x)
        return position, pages

    def sample(self, slot: DecodeSlot, number: int, spatial: bool, masked: bool, automata: bool) -> None:
        """Samples the step in the slot and leaves the next input of each row on the device: see `sample_step`.

        `spatial`: some row may take a coordinate or a size; without it the region heads are not run.
        """
        heads = self._heads(slot.hidden[:number], self.rows.asked(slot.rows[:number])) if spatial else None
        self._sample(slot, number, heads, masked, automata)

    # ---- prefill input

    def _set_rows(self, slot: DecodeSlot, batch: list[PrefillRow]) -> None:
        """A row's state starts here: everything a former owner left is overwritten.

        It comes first, so a step that fails later leaves rows that write to their own pages only. Two copies up, one
        for each dtype.
        """
        rows, most = self.rows, self.rows.page_table.shape[1]  # pages of a row
        slot.load_rows([r.row for r in batch])
        row = slot.rows[: len(batch)]
        table = np.zeros((len(batch), 8 + most), np.int64)
        for line, r in zip(table, batch, strict=True):
            line[:8] = r.state, r.length, r.think_until, r.top_k, r.seed, *r.automaton
            line[8 : 8 + len(r.pages)] = r.pages
        numbers = self._upload(table)
        rows.next_token.index_fill_(0, row, 0)
        for column, of_row in enumerate((rows.state, rows.position, rows.think_until, rows.top_k, rows.seed)):
            of_row[row] = numbers[:, column]
        rows.automata.start(row, numbers[:, 5:8])
        rows.page_table[row] = numbers[:, 8:]
        fractions = self._upload([[r.temperature, r.top_p] for r in batch], np.float32)
        rows.temperature[row], rows.top_p[row] = fractions.unbind(1)

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
        embeddings = self._encode_pictures([r.pixels for r in rows if r.pixels is not None], [r.tiling for r in rows])
        for begin, embedding in zip(begins, embeddings, strict=True):
            x[begin : begin + len(embedding)] = embedding

    def _encode_at_once(self, pictures: Sequence[np.ndarray], tilings: Sequence[tuple[int, int]]) -> Tensor:
        """As `PictureEncoder.encode`, all crops in one pass of the encoder."""
        features = self._encode_crops(self._upload(np.concatenate(pictures), np.uint8))
        return self.model.vision.project(self.model.vision.merge_all(features, tilings))

    def _segments(self, batch: list[PrefillRow]) -> tuple[Tensor, list[Segment]]:
        """Flat positions that the step writes, and what each sequence sees. One copy up for all of it."""
        size = self.cache.page_size
        flat = [np.array(r.pages)[np.arange(r.length) // size] * size + np.arange(r.length) % size for r in batch]
        writes = [f[r.cached_len :] for f, r in zip(flat, batch, strict=True)]
        reads = [f if r.cached_len else f[:0] for f, r in zip(flat, batch, strict=True)]
        ends = np.cumsum([len(w) for w in writes]).tolist()
        write, *keys = self._upload(np.concatenate(writes + reads)).split([ends[-1], *map(len, reads)])
        segments = []
        for r, begin, end, seen in zip(batch, [0, *ends], ends, keys, strict=False):
            mask = prefill_mask(r.cached_len, r.prefix_len, r.length, self.model.text.wte)
            segments.append(Segment(begin, end, seen if r.cached_len else None, mask))
        return write, segments

    def _copy_tails(self, pairs: list[tuple[int, int] | None]) -> None:
        present = [p for p in pairs if p is not None]
        if present:
            source, target = self._upload(present).unbind(1)
            self.cache.copy_pages(source, target)

    def _upload(self, values: object, dtype: type = np.int64) -> Tensor:
        """A device tensor; from pinned memory on a GPU, whose allocator keeps it until the copy has run.

        The allocator hands out powers of two and gives none back; `pin_ahead` has made it keep enough of them. These
        few kilobytes go up in the order of the steps that read them; on the copy stream they would need an event each
        and gain nothing (docs/numbers.md).
        """
        host = torch.from_numpy(np.ascontiguousarray(values, dtype))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
