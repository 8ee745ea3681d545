"""Detect, point, and questions about a place in the picture (spatial references)."""

from __future__ import annotations

import random

from photon_backend.tiny.question import Question, query
from photon_backend.tiny.scenes import TEXT_OWNER, Box, Item, Printed, Scene
from photon_backend.tiny.words import ANY, Selector, name, random_selector, with_article

_ABSENT = (
    "dog cat person car tree house bird flower chair table bottle phone book face hand fish horse boat plane bus bike "
    "cup cloud moon sun apple banana ball hat shoe door window road sign mountain river man woman child animal "
    "building sky grass line arrow logo button hexagon pentagon oval rectangle cube bear cow sheep train clock lamp bag"
)
ABSENT = tuple(_ABSENT.split())
HERE = ("What is here?", "What is this?", "What object is this?", "What do you see here?", "What is at this point?")
COLOR_HERE = ("What color is this?", "What color is it here?", "What color is this object?")
KIND_HERE = ("What shape is this?", "Which shape is here?", "What kind of shape is this?")
IN_BOX = ("What is in this box?", "What is in the box?", "What is here?", "What is this?", "What do you see here?")
COUNT_BOX = ("How many objects are in this box?", "How many objects are here?", "How many objects are in this region?")


def ask_detect(rng: random.Random, scene: Scene) -> Question:
    return _find(rng, scene, "detect")


def ask_point(rng: random.Random, scene: Scene) -> Question:
    return _find(rng, scene, "point")


def _find(rng: random.Random, scene: Scene, task: str) -> Question:
    phrase, found = _object_to_find(rng, scene)
    if rng.random() < 0.15:
        phrase = rng.choice(("the ", "all ", "every ", "each ")) + phrase
    if rng.random() < 0.12:
        phrase = rng.choice((str.capitalize, str.title, str.upper))(phrase)
    category = task if found else "absent"
    return Question(task, category, phrase, boxes=tuple(thing.box for thing in found))


def _object_to_find(rng: random.Random, scene: Scene) -> tuple[str, list[Item | Printed]]:
    draw = rng.random()
    if draw < 0.05:
        return rng.choice(ABSENT), []
    if draw < 0.17:
        return _text_to_find(rng, scene)
    selector = Selector() if draw < 0.3 else random_selector(rng, scene)
    noun = rng.choice(ANY)
    return selector.phrase(rng.random() < 0.4, noun), list(selector.find(scene))


def _text_to_find(rng: random.Random, scene: Scene) -> tuple[str, list[Item | Printed]]:
    printed = scene.printed
    noun = rng.choice(("text", "text", "word", "number", "writing", "printed text", "words"))
    if printed and rng.random() < 0.2:
        noun = name(printed).replace('"', "")
    fits = printed is not None and not (
        (noun == "number" and not printed.is_number) or (noun in ("word", "words") and printed.is_number)
    )
    return noun, [printed] if printed is not None and fits else []


def ask_reference(rng: random.Random, scene: Scene) -> Question | None:
    return _ask_box(rng, scene) if rng.random() < 0.4 else _ask_place(rng, scene)


def _ask_place(rng: random.Random, scene: Scene) -> Question | None:
    """A point on a thing, or on the empty background."""
    height, width = scene.owner.shape
    x, y = rng.random(), rng.random()
    if scene.items and rng.random() < 0.8:
        box = rng.choice(scene.items).box
        x = box[0] + (box[2] - box[0]) * rng.uniform(0.3, 0.7)
        y = box[1] + (box[3] - box[1]) * rng.uniform(0.3, 0.7)
    around = scene.owner[max(0, int(y * height) - 3) :, max(0, int(x * width) - 3) :][:7, :7]
    owner = int(around.flat[0])
    if (around != owner).any():  # too near an edge to be sure
        return None
    refs = ((x, y),)
    if owner == 0 or owner == TEXT_OWNER:
        answer = "nothing" if owner == 0 or scene.printed is None else f"the {name(scene.printed)}"
        return _with_refs(query(rng, "reference", HERE, answer), refs)
    return _about(rng, scene.items[owner - 1], refs)


def _about(rng: random.Random, item: Item, refs: tuple[tuple[float, ...], ...]) -> Question:
    draw = rng.random()
    if draw < 0.4:
        return _with_refs(query(rng, "reference", HERE, with_article(name(item))), refs)
    if draw < 0.7:
        return _with_refs(query(rng, "reference", COLOR_HERE, item.color), refs)
    return _with_refs(query(rng, "reference", KIND_HERE, item.kind), refs)


def _ask_box(rng: random.Random, scene: Scene) -> Question | None:
    """A box drawn loosely around one item, or a region whose items are counted."""
    if scene.items and rng.random() < 0.6:
        item = rng.choice(scene.items)
        refs = (_loosened(rng, item.box),)
        if rng.random() < 0.5:
            return _with_refs(query(rng, "reference", IN_BOX, with_article(name(item))), refs)
        return _about(rng, item, refs)
    left, top = rng.uniform(0, 0.6), rng.uniform(0, 0.6)
    region = (left, top, min(1.0, left + rng.uniform(0.3, 0.9)), min(1.0, top + rng.uniform(0.3, 0.9)))
    inside = [_inside(item, region) for item in scene.items]
    if None in inside:
        return None
    return _with_refs(query(rng, "reference", COUNT_BOX, str(sum(map(bool, inside)))), (region,))


def _loosened(rng: random.Random, box: Box) -> Box:
    width, height = box[2] - box[0], box[3] - box[1]
    left, top = (
        max(0.0, box[0] - width * rng.uniform(-0.05, 0.15)),
        max(0.0, box[1] - height * rng.uniform(-0.05, 0.15)),
    )
    right, bottom = box[2] + width * rng.uniform(-0.05, 0.15), box[3] + height * rng.uniform(-0.05, 0.15)
    return left, top, min(1.0, right), min(1.0, bottom)


def _inside(item: Item, region: Box) -> bool | None:
    """Whether the whole item lies in the region; None when an edge cuts it."""
    box = item.box
    if box[0] >= region[0] and box[1] >= region[1] and box[2] <= region[2] and box[3] <= region[3]:
        return True
    apart = box[2] <= region[0] or box[0] >= region[2] or box[3] <= region[1] or box[1] >= region[3]
    return False if apart else None


def _with_refs(question: Question, refs: tuple[tuple[float, ...], ...]) -> Question:
    return Question("query", question.category, question.text, question.answer, refs=refs)
