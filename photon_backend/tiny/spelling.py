"""From questions to ids, values and targets: exactly the sequences that front end and engine make of them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from photon_backend.model.config import ModelConfig
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.tiny.question import SEE, SEE_ALL, SEE_NONE, SO, Mark, Question

NONE = -1  # no target here
_GIVEN = re.compile(r'^\W+|(?<=[{,]")[a-z]+(?=":)')  # what a JSON answer starts with, and its keys
INPUT_NOISE = 1.5  # bins; values are fed back a little wrong, as the model's own predictions are


@dataclass
class Spelling:
    """Ids, and what the model is to say at each place. Filled by `Encoder`. The dictionaries go by place."""

    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # next token wanted after this place, or NONE
    values: dict[int, tuple[float, float]] = field(default_factory=dict)  # of coord and size ids
    coords: dict[int, float] = field(default_factory=dict)  # coordinate wanted after this place, in bins
    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)  # width and height wanted, in bins

    @property
    def last(self) -> int:
        return len(self.ids) - 1

    def extend(self, ids: Sequence[int]) -> None:
        """Ids that are given."""
        self.ids.extend(ids)
        self.tokens.extend([NONE] * len(ids))

    def say(self, ids: Sequence[int]) -> None:
        """Ids that the model is to say itself."""
        self.extend(ids)
        self.tokens[-len(ids) - 1 : -1] = ids

    def value(self, token: int, width: float, height: float = 0.0) -> None:
        """A coord or size id with its value."""
        self.extend((token,))
        self.values[self.last] = (width, height)


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
            spelling.extend(getattr(self.templates.caption, question.text))
            return spelling
        template = getattr(self.templates, question.task)
        if not question.picture:
            spelling.extend([self.special.bos_id])
        spelling.extend(template.prefix)
        for ref in question.refs:
            self._reference(spelling, ref)
        spelling.extend(self.text(question.text if question.task == "query" else " " + question.text))
        spelling.extend(template.suffix)
        if question.task == "query":
            spelling.extend([self.special.thinking_id] if question.reasoning else template.suffix)
        return spelling

    def example(self, question: Question, rng: random.Random) -> Spelling:
        """Prompt and right answer with every target set."""
        spelling = self.prompt(question)
        if question.task in ("detect", "point"):
            self._objects(spelling, question, rng)
        else:
            if question.reasoning:
                self._reasoning(spelling, question, rng)
                spelling.say([self.special.answer_id])
            for text, is_given in _pieces(question):
                (spelling.extend if is_given else spelling.say)(self.text(text))
        spelling.tokens[-1] = self.special.eos_id
        return spelling

    def _reference(self, spelling: Spelling, ref: Sequence[float]) -> None:
        if len(ref) == 2:
            center, size = ref, None
        else:
            center = ((ref[0] + ref[2]) / 2, (ref[1] + ref[3]) / 2)
            size = (ref[2] - ref[0], ref[3] - ref[1])
        for value in center:
            spelling.value(self.special.coord_id, value)
        if size:
            spelling.value(self.special.size_id, *size)

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
        spelling.sizes[spelling.last] = (wanted[0], wanted[1])
        chosen = [min(top, max(0, round(side + rng.gauss(0, INPUT_NOISE)))) for side in wanted]
        width, height = (2 ** (side / top * 10 - 10) for side in chosen)
        spelling.value(self.special.size_id, width, height)

    def _reasoning(self, spelling: Spelling, question: Question, rng: random.Random) -> None:
        for index, evidence in enumerate(question.marks or (None,)):
            space = " " if index else ""
            if evidence is None:
                spelling.say(self.text(SEE_ALL))
            elif not evidence.centers:
                spelling.say(self.text(space + SEE_NONE.format(label=evidence.label)))
            else:
                spelling.say(self.text(space + SEE))
                self._ground(spelling, evidence, rng)
        spelling.say(self.text(SO.format(answer=question.answer.rstrip("."))))

    def _ground(self, spelling: Spelling, evidence: Mark, rng: random.Random) -> None:
        special = self.special
        spelling.say([special.start_ground_points_id, *self.text(" " + evidence.label)])
        for center in evidence.centers:
            for value in center:
                spelling.tokens[-1] = special.coord_id
                self._coordinate(spelling, value, rng)
        spelling.say([special.end_ground_id, *self.text(".")])

    def _coordinate(self, spelling: Spelling, value: float, rng: random.Random) -> None:
        """Wants and then feeds the value, rounded to a bin."""
        bins = self.config.region.coord_out_dim
        spelling.coords[spelling.last] = value * bins
        chosen = min(bins - 1, max(0, round(value * bins + rng.gauss(0, INPUT_NOISE))))
        spelling.value(self.special.coord_id, chosen / bins)


def _pieces(question: Question) -> Iterator[tuple[str, bool]]:
    """The answer in pieces, and whether a piece is given. Letters never meet letters at a cut, so the pieces have the
    ids that the whole has."""
    end = 0
    for match in _GIVEN.finditer(question.answer) if question.keys_given else ():
        if match.start() > end:
            yield question.answer[end : match.start()], False
        yield match.group(), True
        end = match.end()
    yield question.answer[end:], False
