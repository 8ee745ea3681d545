"""Greedy decoding of many questions at once, for the evaluation: a plain batch with a dense key/value cache.

It follows `model/generate.py`, which states the rules, and is faster because the prefix of a batch is computed once and
every step feeds one position per question. The engine is not needed to measure the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from photon_backend.model.attention import Attend
from photon_backend.model.moondream import Moondream
from photon_backend.tiny.question import Question
from photon_backend.tiny.spelling import Spelling

MAX_OBJECTS = 12
MAX_NEW = 160  # positions after the prompt


@dataclass
class Answer:
    """What the model said. `ids` has no terminating eos; objects are (x, y) or (x, y, width, height)."""

    ids: list[int] = field(default_factory=list)
    reasoning_ids: list[int] = field(default_factory=list)
    objects: list[tuple[float, ...]] = field(default_factory=list)


class _Row:
    """The state of one question; `take` is the grammar of its task."""

    def __init__(self, question: Question) -> None:
        self.question, self.answer = question, Answer()
        self.thinking, self.done, self.first = question.reasoning, False, True
        self.partial: list[float] = []

    def wanted(self) -> str:
        """What the next hidden state is read as."""
        if self.question.task not in ("detect", "point"):
            return "token"
        return ("object", "coord", "size")[len(self.partial)]


class Decoder:
    def __init__(self, model: Moondream) -> None:
        self.model, self.special = model, model.config.tokenizer
        self.device = model.text.wte.device

    @torch.no_grad()
    def run(
        self, pictures: Tensor, index: Sequence[int], questions: Sequence[Question], prompts: Sequence[Spelling]
    ) -> list[Answer]:
        """pictures: embeddings [pictures, N, D]; index: the picture of each question. Returns an answer for each."""
        rows = [_Row(question) for question in questions]
        x, lengths, prefix = self._inputs(pictures, index, questions, prompts)
        cache = _Cache(lengths, x.shape[1] + MAX_NEW)
        positions = torch.arange(x.shape[1], device=self.device).expand(len(rows), -1)
        hidden = self.model.text(x, positions, cache.prefill(prefix, x.shape[1]))
        last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
        for _ in range(MAX_NEW):
            fed = self._take(rows, last)
            if all(row.done for row in rows):
                break
            last = self.model.text(fed[:, None], cache.lengths[:, None], cache.step())[:, 0]
            cache.lengths += 1
        return [row.answer for row in rows]

    def _inputs(
        self, pictures: Tensor, index: Sequence[int], questions: Sequence[Question], prompts: Sequence[Spelling]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Right-padded embeddings [B, T, D], lengths [B], and prefix lengths [B] (0 without a picture)."""
        bos = self.model.text.embed(torch.tensor([self.special.bos_id], device=self.device))
        sequences = []
        for number, question, prompt in zip(index, questions, prompts, strict=True):
            embedded = self.embed_prompt(prompt)
            sequences.append(torch.cat([bos, pictures[number], embedded]) if question.picture else embedded)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self.device)
        prefix_len = self.model.config.prefix_len
        prefix = torch.tensor([prefix_len if question.picture else 0 for question in questions], device=self.device)
        return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True), lengths, prefix

    def embed_prompt(self, prompt: Spelling) -> Tensor:
        """[n, D]."""
        x = self.model.text.embed(torch.tensor(prompt.ids, device=self.device))
        for place, value in prompt.values.items():
            values = torch.tensor(value, device=self.device)
            is_size = prompt.ids[place] == self.special.size_id
            x[place] = (
                self.model.region.encode_size(values) if is_size else self.model.region.encode_coordinate(values[:1])
            )
        return x

    def _take(self, rows: list[_Row], hidden: Tensor) -> Tensor:
        """Reads what each row wants from hidden [B, D] and returns the next inputs [B, D]."""
        region, special = self.model.region, self.special
        logits = self.model.text.logits(hidden).float()
        for number, row in enumerate(rows):
            if not row.first and row.wanted() == "token":
                logits[number, [special.eos_id, special.size_id] if row.thinking else [special.answer_id]] = -torch.inf
        tokens = logits.argmax(-1)
        coords = region.coordinate_value(region.decode_coordinate(hidden).argmax(-1))
        sizes = region.size_value(region.decode_size(hidden).argmax(-1))
        fed = self.model.text.embed(tokens)
        as_coord, as_size = region.encode_coordinate(coords[:, None]), region.encode_size(sizes)
        token_list, coord_list, size_list = tokens.tolist(), coords.tolist(), sizes.tolist()
        for number, row in enumerate(rows):
            kind = "done" if row.done else self._apply(row, token_list[number], coord_list[number], size_list[number])
            if kind == "coord":
                fed[number] = as_coord[number]
            elif kind == "size":
                fed[number] = as_size[number]
        return fed

    def _apply(self, row: _Row, token: int, coord: float, size: list[float]) -> str:
        """Advances one row. Returns which embedding it is fed: token, coord or size."""
        wanted = row.wanted()
        row.first = False
        if wanted == "token":
            return self._apply_token(row, token)
        if wanted == "object" and (token == self.special.eos_id or len(row.answer.objects) == MAX_OBJECTS):
            row.done = True
            return "done"
        row.partial += size if wanted == "size" else [coord]
        if len(row.partial) == (4 if row.question.task == "detect" else 2):
            row.answer.objects.append(tuple(row.partial))
            row.partial = []
        return "size" if wanted == "size" else "coord"

    def _apply_token(self, row: _Row, token: int) -> str:
        if row.thinking:
            row.answer.reasoning_ids.append(token)
            if token == self.special.answer_id:
                row.thinking = False
                row.first = True
            return "coord" if token == self.special.coord_id else "token"
        if token == self.special.eos_id:
            row.done = True
        else:
            row.answer.ids.append(token)
        return "token"


class _Cache:
    """Keys and values of every layer, [B, H, capacity, E]; row b holds lengths[b] positions."""

    def __init__(self, lengths: Tensor, capacity: int) -> None:
        self.lengths, self.capacity = lengths.clone(), capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def prefill(self, prefix: Tensor, num_positions: int) -> Attend:
        place = torch.arange(num_positions, device=self.lengths.device)
        inside = (place[:, None] < prefix[:, None, None]) & (place < prefix[:, None, None])  # [B, T, T]
        mask = (inside | (place <= place[:, None]))[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            room = (0, 0, 0, self.capacity - num_positions)
            self.keys.append(F.pad(k, room))
            self.values.append(F.pad(v, room))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

        return attend

    def step(self) -> Attend:
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        mask = (torch.arange(self.capacity, device=self.lengths.device) <= self.lengths[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer][rows, :, self.lengths] = k[:, 0]
            self.values[layer][rows, :, self.lengths] = v[:, 0]
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), self.keys[layer], self.values[layer], attn_mask=mask
            ).transpose(1, 2)

        return attend
