"""From questions to ids, values and targets: exactly the sequences that front end and engine make of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from photon_backend.model.config import ModelConfig
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.tiny.question import SEE, SEE_ALL, SEE_NONE, SO, Mark, Question

NONE = -1  # no target here
INPUT_NOISE = 1.5  # bins; values are fed back a little wrong, as the model's own predictions are


@dataclass
class Spelling:
    """Ids with their values, and what the model is to say at each place. Filled by `Encoder`."""

    ids: list[int] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)  # of coord and size ids, else zeros
    tokens: list[int] = field(default_factory=list)  # next token wanted after this place
    coords: list[float] = field(default_factory=list)  # coordinate wanted after this place
    sizes: list[tuple[float, float]] = field(default_factory=list)

    def add(self, token: int, value: tuple[float, float] = (0.0, 0.0)) -> None:
        self.ids.append(token)
        self.values.append(value)
        self.tokens.append(NONE)
        self.coords.append(NONE)
        self.sizes.append((NONE, NONE))


class Encoder:
    """Spells prompts and answers in ids, as the front end and the engine do."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config, self.special, self.templates = config, config.tokenizer, config.tokenizer.templates
        self.text = lru_cache(maxsize=65536)(lambda text: tuple(tokenizer.encode(text)))

    def prompt(self, question: Question) -> Spelling:
        """What follows BOS and picture; with BOS when there is no picture."""
        spelling = Spelling()
        if question.task == "caption":
            assert self.templates.caption is not None
            self._ids(spelling, getattr(self.templates.caption, question.text))
            return spelling
        template = getattr(self.templates, question.task)
        if not question.picture:
            spelling.add(self.special.bos_id)
        self._ids(spelling, template.prefix)
        for ref in question.refs:
            self._reference(spelling, ref)
        self._ids(spelling, self.text(question.text if question.task == "query" else " " + question.text))
        self._ids(spelling, template.suffix)
        if question.task == "query":
            self._ids(spelling, [self.special.thinking_id] if question.reasoning else template.suffix)
        return spelling

    def example(self, question: Question, rng: random.Random) -> Spelling:
        """Prompt and right answer with every target set."""
        spelling = self.prompt(question)
        if question.task in ("detect", "point"):
            self._objects(spelling, question, rng)
        else:
            if question.reasoning:
                self._reasoning(spelling, question, rng)
                self._say(spelling, [self.special.answer_id])
            self._say(spelling, self.text(question.answer))
        spelling.tokens[-1] = self.special.eos_id
        return spelling

    def _ids(self, spelling: Spelling, ids: Sequence[int]) -> None:
        for token in ids:
            spelling.add(token)

    def _say(self, spelling: Spelling, ids: Sequence[int]) -> None:
        for token in ids:
            spelling.tokens[-1] = token
            spelling.add(token)

    def _reference(self, spelling: Spelling, ref: Sequence[float]) -> None:
        if len(ref) == 2:
            center, size = ref, None
        else:
            center = ((ref[0] + ref[2]) / 2, (ref[1] + ref[3]) / 2)
            size = (ref[2] - ref[0], ref[3] - ref[1])
        for value in center:
            spelling.add(self.special.coord_id, (value, 0.0))
        if size:
            spelling.add(self.special.size_id, size)

    def _objects(self, spelling: Spelling, question: Question, rng: random.Random) -> None:
        for box in question.boxes:
            spelling.tokens[-1] = self.special.coord_id
            self._point(spelling, ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), rng)
            if question.task == "detect":
                self._size(spelling, (box[2] - box[0], box[3] - box[1]), rng)

    def _point(self, spelling: Spelling, center: tuple[float, float], rng: random.Random) -> None:
        for value in center:
            self._coordinate(spelling, value, rng)

    def _size(self, spelling: Spelling, size: tuple[float, float], rng: random.Random) -> None:
        top = self.config.region.size_bins - 1
        wanted = [(math.log2(max(side, 1 / 1024)) + 10) / 10 * top for side in size]
        spelling.sizes[-1] = (wanted[0], wanted[1])
        chosen = [min(top, max(0, round(side + rng.gauss(0, INPUT_NOISE)))) for side in wanted]
        width, height = (2 ** (side / top * 10 - 10) for side in chosen)
        spelling.add(self.special.size_id, (width, height))

    def _reasoning(self, spelling: Spelling, question: Question, rng: random.Random) -> None:
        for index, evidence in enumerate(question.marks or (None,)):
            space = " " if index else ""
            if evidence is None:
                self._say(spelling, self.text(SEE_ALL))
            elif not evidence.centers:
                self._say(spelling, self.text(space + SEE_NONE.format(label=evidence.label)))
            else:
                self._say(spelling, self.text(space + SEE))
                self._ground(spelling, evidence, rng)
        self._say(spelling, self.text(SO.format(answer=question.answer.rstrip("."))))

    def _ground(self, spelling: Spelling, evidence: Mark, rng: random.Random) -> None:
        special = self.special
        self._say(spelling, [special.start_ground_points_id, *self.text(" " + evidence.label)])
        for center in evidence.centers:
            for value in center:
                spelling.tokens[-1] = special.coord_id
                self._coordinate(spelling, value, rng)
        self._say(spelling, [special.end_ground_id, *self.text(".")])

    def _coordinate(self, spelling: Spelling, value: float, rng: random.Random) -> None:
        """Wants and then feeds the value, rounded to a bin."""
        bins = self.config.region.coord_out_dim
        spelling.coords[-1] = value * bins
        chosen = min(bins - 1, max(0, round(value * bins + rng.gauss(0, INPUT_NOISE))))
        spelling.add(self.special.coord_id, (chosen / bins, 0.0))
