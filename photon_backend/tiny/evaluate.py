"""Accuracy of a checkpoint on unseen scenes: `python -m photon_backend.tiny.evaluate [--scenes N] [--checkpoint DIR]`.

Prints a table; the last line is one JSON document. What counts as right:

- query: the exact answer; a list of things in any order, and what is described like a caption. `count` is also reported
  alone; `reasoning` (the answer after reasoning) and `json` (without a constraint, the exact text) apart.
- detect: F1 over all boxes, matched at IoU 0.5, false boxes for absent objects counted.
- point: a question is right when there are as many points as objects and each lies on the visible part of its own one.
- absent: an empty list, for detect and point of what is not there.
- caption: true in every part (see `captions.is_true`).
- constrained: right values of answers that have a schema or a list of choices (see constrained.py).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from photon_backend.config import TINY_CHECKPOINT, read_settings
from photon_backend.model.crops import make_crops
from photon_backend.model.moondream import Moondream
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import load_model
from photon_backend.tiny.captions import is_true
from photon_backend.tiny.constrained import evaluate_constrained
from photon_backend.tiny.decode import Answer, Decoder
from photon_backend.tiny.question import Question
from photon_backend.tiny.questions import draw_question
from photon_backend.tiny.scenes import TEXT_OWNER, Box, Scene, iou, make_scene
from photon_backend.tiny.spelling import Encoder

UNSEEN = 1 << 60  # first seed; training seeds are far below
QUESTIONS = 16  # of a scene
SCENES_AT_ONCE = 8


class Score:
    """Right and asked, by category; and the boxes of detect."""

    def __init__(self) -> None:
        self.right: dict[str, int] = defaultdict(int)
        self.asked: dict[str, int] = defaultdict(int)
        self.boxes = {"matched": 0, "said": 0, "true": 0}

    def add(self, category: str, right: bool) -> None:
        self.asked[category] += 1
        self.right[category] += right

    def share(self, *categories: str) -> float:
        asked = sum(self.asked[category] for category in categories)
        return round(sum(self.right[category] for category in categories) / max(1, asked), 4)

    def summary(self) -> dict[str, float]:
        spatial = ("detect", "point", "absent")
        apart = ("caption", "reasoning", "json")
        queries = [c for c in self.asked if c not in spatial and not c.startswith(apart)]
        captions = [c for c in self.asked if c.startswith("caption")]
        return {
            "query": self.share(*queries),
            "count": self.share("count"),
            "detect_f1": round(2 * self.boxes["matched"] / max(1, self.boxes["said"] + self.boxes["true"]), 4),
            "point": self.share("point"),
            "absent": self.share("absent"),
            "caption": self.share(*captions),
            "reasoning": self.share("reasoning"),
            "json": self.share("json"),
        }


def evaluate(model: Moondream, encoder: Encoder, tokenizer: TextTokenizer, seeds: Sequence[int]) -> Score:
    """Asks QUESTIONS of each scene, in float arithmetic of the model's dtype."""
    score, decoder = Score(), Decoder(model)
    for start in range(0, len(seeds), SCENES_AT_ONCE):
        scenes = [make_scene(seed) for seed in seeds[start : start + SCENES_AT_ONCE]]
        asked = [(index, question) for index, scene in enumerate(scenes) for question in _questions(scene)]
        index, questions = [i for i, _ in asked], [question for _, question in asked]
        prompts = [encoder.prompt(question) for question in questions]
        answers = decoder.run(encode(model, scenes), index, questions, prompts)
        for (number, question), answer in zip(asked, answers, strict=True):
            judge(score, scenes[number], question, answer, tokenizer.decode(answer.ids))
    return score


def encode(model: Moondream, scenes: Sequence[Scene]) -> Tensor:
    """Picture embeddings [pictures, N, D]."""
    crops, tilings = zip(*(make_crops(scene.pixels, model.config.vision) for scene in scenes), strict=True)
    with torch.no_grad():
        return model.vision.encode(torch.from_numpy(np.concatenate(crops)).to(model.text.wte.device), tilings)


def _questions(scene: Scene) -> Iterator[Question]:
    """Those that mean JSON without saying so need a grammar and are left to constrained.py."""
    rng = random.Random(scene.seed ^ 0xE7A1)
    asked = 0
    while asked < QUESTIONS:
        question = draw_question(rng, scene)
        if not question.keys_given:
            asked += 1
            yield question


def judge(score: Score, scene: Scene, question: Question, answer: Answer, text: str) -> None:
    if question.task == "caption":
        score.add(question.category, is_true(text, scene, question.text))
    elif question.task == "query":
        score.add("reasoning" if question.reasoning else question.category, is_right(text, question, scene))
    elif not question.boxes:
        score.boxes["said"] += len(answer.objects) if question.task == "detect" else 0
        score.add("absent", not answer.objects)
    elif question.task == "detect":
        said = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in answer.objects]
        matched = match(said, question.boxes)
        score.boxes["matched"] += matched
        score.boxes["said"] += len(said)
        score.boxes["true"] += len(question.boxes)
        score.add("detect", matched == len(said) == len(question.boxes))
    else:
        score.add("point", points_hit(scene, question, answer))


def is_right(text: str, question: Question, scene: Scene) -> bool:
    if question.category == "describe":
        return is_true(text, scene, "short")
    if question.category == "relation":
        return sorted(_things(text)) == sorted(_things(question.answer))
    return text == question.answer


def _things(text: str) -> list[str]:
    return re.split(r", | and ", text)


def match(said: Sequence[Box], true: Sequence[Box]) -> int:
    """Boxes matched one to one at IoU 0.5, best pairs first."""
    pairs = sorted(((iou(a, b), i, j) for i, a in enumerate(said) for j, b in enumerate(true)), reverse=True)
    used_said, used_true = set(), set()
    for overlap, i, j in pairs:
        if overlap >= 0.5 and i not in used_said and j not in used_true:
            used_said.add(i)
            used_true.add(j)
    return len(used_said)


def points_hit(scene: Scene, question: Question, answer: Answer) -> bool:
    """Every object asked for is hit by exactly one point."""
    height, width = scene.owner.shape
    hit = sorted(
        int(scene.owner[min(height - 1, int(y * height)), min(width - 1, int(x * width))]) for x, y in answer.objects
    )
    wanted = [i + 1 for i, item in enumerate(scene.items) if item.box in question.boxes]
    if scene.printed and scene.printed.box in question.boxes:
        wanted.append(TEXT_OWNER)
    return hit == wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--constrained", type=int, default=40, help="scenes for constrained answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    model = load_model(args.checkpoint, args.device, getattr(torch, args.dtype))
    tokenizer = TextTokenizer(args.checkpoint / "tokenizer.json")
    score = evaluate(model, Encoder(model.config, tokenizer), tokenizer, range(UNSEEN, UNSEEN + args.scenes))
    for category in sorted(score.asked):
        print(f"{category:16} {score.right[category]:6} of {score.asked[category]:6}  {score.share(category):.3f}")
    seeds = range(UNSEEN, UNSEEN + args.constrained)
    settings = msgspec.structs.replace(
        read_settings(), checkpoint=str(args.checkpoint), device=args.device, dtype=args.dtype
    )
    constrained = {name: asdict(tally) for name, tally in sorted(evaluate_constrained(settings, seeds).items())}
    for name, counts in constrained.items():
        print(f"constrained: {name:22} " + ", ".join(f"{key} {count}" for key, count in counts.items()))
    document = {"scenes": args.scenes, "questions": sum(score.asked.values()), **score.summary()}
    print(json.dumps({**document, "constrained": constrained}))


if __name__ == "__main__":
    main()
