"""Greedy generation for one request, the slow simple way: the whole sequence again for every token.

No cache, no pages, no batch. It states what the engine must produce, and tests compare the engine with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from photon_backend.model.attention import dense_attend, prefix_mask
from photon_backend.model.moondream import Moondream
from photon_backend.protocol import FinishReason, Task


@torch.no_grad()
def generate(
    model: Moondream,
    crops: Tensor | None,
    tiling: tuple[int, int],
    prompt_ids: Sequence[int],
    coords: Sequence[float],
    sizes: Sequence[tuple[float, float]],
    task: Task,
    reasoning: bool,
    max_tokens: int,
    max_objects: int,
) -> tuple[list[int], list[float], FinishReason]:
    """Token ids, the values of the coord and size ids among them, and why it ended.

    crops: uint8 [C, side, side, 3] on the model's device, or None without a picture (then `tiling` is not looked at).
    prompt_ids: what follows BOS and picture; starts with BOS when there is none. At least one id must still fit.
    coords and sizes: the values of the coord and size ids in it, in order. max_tokens bounds reasoning and answer each.
    The terminating eos is not among the ids; the answer id that ends reasoning is. Prompt and ids fit max_context.
    """
    run = GreedyRun(model)
    run.feed_prompt(crops, tiling, prompt_ids, coords, sizes)
    run.run(task, reasoning, max_tokens, max_objects)
    return run.ids, run.values, run.reason


class GreedyRun:
    """One request: the embeddings so far, and what came out of it."""

    def __init__(self, model: Moondream) -> None:
        self.model = model
        self.special = model.config.tokenizer
        self.device = model.text.wte.device
        self.prefix_len = 0  # positions that see one another: BOS and picture
        self.x = model.text.wte.new_empty(0, model.config.text.dim)  # [positions, D]
        self.room = 0  # ids that may still be emitted before the context is full
        self.ids: list[int] = []
        self.values: list[float] = []
        self.reason: FinishReason = "stop"

    def run(self, task: Task, reasoning: bool, max_tokens: int, max_objects: int) -> None:
        """From the prompt on."""
        if task in ("detect", "point"):
            self.find_objects(max_objects, with_size=task == "detect")
            return
        if reasoning:
            self.think(max_tokens)
        self.answer(max_tokens)

    def feed_prompt(
        self,
        crops: Tensor | None,
        tiling: tuple[int, int],
        prompt_ids: Sequence[int],
        coords: Sequence[float],
        sizes: Sequence[tuple[float, float]],
    ) -> None:
        if crops is not None:
            self.feed_id(self.special.bos_id)
            self.feed(self.model.vision.encode(crops, [tiling])[0])
            self.prefix_len = len(self.x)
        coord_values, size_values = iter(coords), iter(sizes)
        for token in prompt_ids:
            if token == self.special.coord_id:
                self.feed_coordinate(next(coord_values))
            elif token == self.special.size_id:
                self.feed_size(next(size_values))
            else:
                self.feed_id(token)
        self.room = self.model.config.text.max_context - len(self.x)

    def feed(self, embeddings: Tensor) -> None:
        """embeddings: [n, D]."""
        self.x = torch.cat([self.x, embeddings])

    def feed_id(self, token: int) -> None:
        self.feed(self.model.text.embed(torch.tensor([token], device=self.device)))

    def feed_coordinate(self, value: float) -> None:
        self.feed(self.model.region.encode_coordinate(torch.tensor([[value]], device=self.device)))

    def feed_size(self, size: tuple[float, float]) -> None:
        self.feed(self.model.region.encode_size(torch.tensor([size], device=self.device)))

    def hidden(self) -> Tensor:
        """[D] of the last position, before the final LayerNorm."""
        positions = torch.arange(len(self.x), device=self.device)
        mask = prefix_mask(len(self.x), self.prefix_len, self.device)
        return self.model.text(self.x[None], positions, dense_attend(mask))[0, -1]

    def choose(self, hidden: Tensor, suppressed: Sequence[int] = ()) -> int:
        logits = self.model.text.logits(hidden)
        logits[list(suppressed)] = float("-inf")
        return int(logits.argmax())

    def emit(self, token: int, *values: float) -> None:
        self.ids.append(token)
        self.values.extend(values)
        self.room -= 1

    def think(self, max_tokens: int) -> None:
        """Reasoning until the model says answer_id; forced when the allowance is used up."""
        special = self.special
        suppressed: tuple[int, ...] = ()  # the first token is free
        for _ in range(min(max_tokens, self.room - 1)):
            hidden = self.hidden()
            token = self.choose(hidden, suppressed)
            if token == special.answer_id:
                break
            if token == special.coord_id:
                self.emit_coordinate(hidden)
            else:
                self.emit(token)
                self.feed_id(token)
            suppressed = (special.eos_id, special.size_id)
        self.emit(special.answer_id)
        self.feed_id(special.answer_id)

    def answer(self, max_tokens: int) -> None:
        suppressed: tuple[int, ...] = ()  # the first token is free
        for _ in range(min(max_tokens, self.room)):
            token = self.choose(self.hidden(), suppressed)
            if token == self.special.eos_id:
                return
            self.emit(token)
            self.feed_id(token)
            suppressed = (self.special.answer_id,)
        self.reason = "length"

    def find_objects(self, max_objects: int, with_size: bool) -> None:
        """x, y and, for boxes, size of one object after the other, until eos is likelier than anything else."""
        for _ in range(min(max_objects, self.room // (3 if with_size else 2))):
            hidden = self.hidden()
            if self.choose(hidden) == self.special.eos_id:
                return
            self.emit_coordinate(hidden)
            self.emit_coordinate(self.hidden())
            if with_size:
                self.emit_size(self.hidden())
        self.reason = "length"

    def emit_coordinate(self, hidden: Tensor) -> None:
        region = self.model.region
        value = region.coordinate_value(region.decode_coordinate(hidden).argmax()).item()
        self.emit(self.special.coord_id, value)
        self.feed_coordinate(value)

    def emit_size(self, hidden: Tensor) -> None:
        region = self.model.region
        width, height = region.size_value(region.decode_size(hidden).argmax(dim=-1)).tolist()
        self.emit(self.special.size_id, width, height)
        self.feed_size((width, height))
