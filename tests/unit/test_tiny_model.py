"""The committed weights: small enough, and right about the demo pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.model.crops import make_crops
from photon_backend.model.generate import generate
from photon_backend.model.moondream import Moondream
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.model.weights import load_model
from photon_backend.tiny.captions import is_true
from photon_backend.tiny.decode import Answer, Decoder
from photon_backend.tiny.evaluate import UNSEEN, encode, evaluate, match
from photon_backend.tiny.pictures import DIRECTORY, LAYOUTS, Layout, build
from photon_backend.tiny.question import Question
from photon_backend.tiny.scenes import iou
from photon_backend.tiny.spelling import Encoder

PICTURES = sorted(DIRECTORY.glob("*.png"))


@pytest.fixture(scope="module")
def model() -> Moondream:
    torch.set_num_threads(1)  # threads that wait for a busy core cost seconds
    return load_model(TINY_CHECKPOINT, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TINY_CHECKPOINT / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(model: Moondream, tokenizer: TextTokenizer) -> Encoder:
    return Encoder(model.config, tokenizer)


def ask(model: Moondream, encoder: Encoder, layout: Layout, questions: list[Question]) -> list[Answer]:
    prompts = [encoder.prompt(question) for question in questions]
    return Decoder(model).run(encode(model, [build(layout)]), [0] * len(questions), questions, prompts)


def test_size_of_the_checkpoint() -> None:
    assert sum(path.stat().st_size for path in TINY_CHECKPOINT.iterdir()) <= 12_000_000


@pytest.mark.parametrize("text", ["What color is it?", "STOP 1804", "Größe 東京 🙂\n\t", "<|end|><|coord|>", ""])
def test_vocabulary_spells_any_text(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(token > 16 for token in ids), "no control token may come from text"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_answers_about_the_demo_pictures(
    model: Moondream, encoder: Encoder, tokenizer: TextTokenizer, layout: Layout
) -> None:
    questions = [Question("query", "demo", question, answer) for question, answer in layout.queries]
    answers = ask(model, encoder, layout, questions)
    said = {question.text: tokenizer.decode(answer.ids) for question, answer in zip(questions, answers, strict=True)}
    assert said == dict(layout.queries)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_captions_of_the_demo_pictures(
    model: Moondream, encoder: Encoder, tokenizer: TextTokenizer, layout: Layout
) -> None:
    lengths = ["short", "normal", "long"]
    answers = ask(model, encoder, layout, [Question("caption", "demo", length) for length in lengths])
    for length, answer in zip(lengths, answers, strict=True):
        text = tokenizer.decode(answer.ids)
        assert is_true(text, build(layout), length), text


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_objects_of_the_demo_pictures(model: Moondream, encoder: Encoder, layout: Layout) -> None:
    scene = build(layout)
    names = sorted({f"{item.color} {item.kind}" for item in scene.items})
    wanted = [[item.box for item in scene.items if f"{item.color} {item.kind}" == name] for name in names]
    names, wanted = [*names, "objects", "dog"], [*wanted, [item.box for item in scene.items], []]
    found = ask(model, encoder, layout, [Question("detect", "demo", name) for name in names])
    points = ask(model, encoder, layout, [Question("point", "demo", name) for name in names])
    for boxes, answer, pointed in zip(wanted, found, points, strict=True):
        said = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in answer.objects]
        assert len(said) == len(pointed.objects) == len(boxes)
        assert match(said, boxes) == len(boxes)
        for (x, y), box in zip(pointed.objects, boxes, strict=True):
            assert box[0] < x < box[2] and box[1] < y < box[3]


def test_the_evaluation_decodes_as_the_oracle_does(
    model: Moondream, encoder: Encoder, tokenizer: TextTokenizer
) -> None:
    """A query, reasoning with a grounded point, and a detection from the PNG file, token for token."""
    picture = np.asarray(Image.open(DIRECTORY / "shapes.png"))
    crops, tiling = make_crops(picture, model.config.vision)
    layout = next(layout for layout in LAYOUTS if layout.name == "shapes")
    questions = [
        Question("query", "demo", "What color is the circle?"),
        Question("query", "demo", "What color is the circle?", reasoning=True),
        Question("detect", "demo", "square"),
        Question("query", "demo", "What is one plus two?", picture=False),
    ]
    answers = ask(model, encoder, layout, questions)
    for question, answer in zip(questions, answers, strict=True):
        prompt = encoder.prompt(question).ids
        image = torch.from_numpy(crops) if question.picture else None
        ids, values, reason = generate(
            model,
            image,
            tiling,
            prompt,
            [],
            [],
            question.task,
            question.reasoning,
            40,
            12,  # type: ignore[arg-type]
        )
        assert reason == "stop"
        if question.task == "detect":
            assert values == pytest.approx([value for box in answer.objects for value in box])
        else:
            assert ids == answer.reasoning_ids + answer.ids


def test_evaluation_of_a_few_unseen_scenes(model: Moondream, encoder: Encoder, tokenizer: TextTokenizer) -> None:
    """Far below the real figures (docs/tiny.md): it tells a broken model from a good one, no more."""
    score = evaluate(model, encoder, tokenizer, range(UNSEEN, UNSEEN + 2))
    summary = score.summary()
    assert sum(score.asked.values()) == 32
    assert summary["query"] > 0.8 and summary["detect_f1"] > 0.8


def test_boxes_are_matched_one_to_one() -> None:
    box = (0.0, 0.0, 0.5, 0.5)
    assert iou(box, box) == pytest.approx(1.0)
    assert iou(box, (0.5, 0.5, 1.0, 1.0)) == 0.0
    assert match([box, box], [box]) == 1
    assert match([(0.0, 0.0, 0.5, 0.2)], [box]) == 0


def test_every_picture_has_its_truth() -> None:
    assert len(PICTURES) == len(LAYOUTS)
    for path in PICTURES:
        assert json.loads(Path(path).with_suffix(".json").read_text())["queries"]
