"""The bundled model's world: the same seed gives the same scene, and what is said of a scene is true."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from photon_backend.tiny import pictures
from photon_backend.tiny.captions import LENGTHS, caption, is_true
from photon_backend.tiny.questions import draw_question
from photon_backend.tiny.scenes import COLORS, KINDS, MIN_VISIBLE, SIZES, TEXT_OWNER, Item, Scene, make_scene
from photon_backend.tiny.words import ANY, plural

SCENES = [make_scene(seed) for seed in range(1 << 50, (1 << 50) + 60)]


def test_same_seed_same_scene() -> None:
    one, two = make_scene(7), make_scene(7)
    assert np.array_equal(one.pixels, two.pixels)
    assert one.items == two.items
    assert not np.array_equal(make_scene(8).pixels, one.pixels)


def test_items_lie_where_they_are_said_to_lie() -> None:
    for scene in SCENES:
        height, width = scene.owner.shape
        assert [item.center for item in scene.items] == sorted(item.center for item in scene.items)
        for number, item in enumerate(scene.items, 1):
            rows, columns = np.nonzero(scene.owner == number)
            x_min, y_min, x_max, y_max = item.box
            assert columns.min() / width >= x_min and (columns.max() + 1) / width <= x_max + 1e-9
            assert rows.min() / height >= y_min and (rows.max() + 1) / height <= y_max + 1e-9
            center = scene.owner[int(item.center[1] * height), int(item.center[0] * width)]
            assert center == number, "an item's centre may not be hidden"


def test_most_of_every_item_is_visible() -> None:
    for scene in SCENES:
        height, width = scene.owner.shape
        for number, item in enumerate(scene.items, 1):
            area = (item.box[2] - item.box[0]) * width * (item.box[3] - item.box[1]) * height
            least = {"star": 0.3, "triangle": 0.45, "diamond": 0.45, "cross": 0.5}.get(item.kind, 0.6)
            assert (scene.owner == number).sum() >= MIN_VISIBLE * least * area


def test_scenes_vary() -> None:
    counts = Counter(len(scene.items) for scene in SCENES)
    assert set(counts) >= set(range(1, 7))
    assert {item.size for scene in SCENES for item in scene.items} == set(SIZES)
    assert 10 < sum(scene.printed is not None for scene in SCENES) < 50
    assert len({scene.pixels.shape for scene in SCENES}) > 30


def test_text_is_left_uncovered() -> None:
    for scene in SCENES:
        if scene.printed:
            height, width = scene.owner.shape
            x_min, y_min, x_max, y_max = scene.printed.box
            shape = round((y_max - y_min) * height) * round((x_max - x_min) * width)
            assert (scene.owner == TEXT_OWNER).sum() == shape


@pytest.mark.parametrize("length", LENGTHS)
def test_captions_are_true_and_changed_ones_are_not(length: str) -> None:
    for scene in SCENES:
        text = caption(scene, length)
        assert is_true(text, scene, length)
        assert not is_true(text.replace(".", " and a red moon.", 1), scene, length)
        if scene.items:
            kind = scene.items[0].kind
            assert not is_true(text.replace(kind, "moon", 1), scene, length)


def test_caption_may_say_one_by_one() -> None:
    scene = next(s for s in SCENES if s.printed is None and _has_twins(s))
    one_by_one = " and ".join(f"a {item.color} {item.kind}" for item in scene.items) + "."
    assert one_by_one != caption(scene, "short").lower() and is_true(one_by_one, scene, "short")


def _has_twins(scene: Scene) -> bool:
    return len({(item.color, item.kind) for item in scene.items}) < len(scene.items)


def test_answers_agree_with_the_scene() -> None:
    """Counts and boxes, worked out here from the words of the question."""
    checked = Counter[str]()
    for scene in SCENES:
        rng = random.Random(scene.seed)
        for _ in range(40):
            question = draw_question(rng, scene)
            words = question.text.lower().replace("?", "").replace(".", "").split()
            if question.category == "count" and not {"different", "kinds", "colors", "colours"} & set(words):
                assert int(question.answer) == sum(_meant(words, item) for item in scene.items), question
                checked["count"] += 1
            elif question.task in ("detect", "point") and not _about_text(words):
                wanted = [item.box for item in scene.items if _meant(words, item)]
                assert list(question.boxes) == wanted, question
                checked["boxes"] += 1
    assert checked["count"] > 100 and checked["boxes"] > 200


def _meant(words: list[str], item: Item) -> bool:
    sizes, colors = set(SIZES) & set(words), set(COLORS) & set(words)
    kinds = {kind for kind in KINDS if {kind, plural(kind)} & set(words)}
    things = kinds or {noun for noun in ANY if {noun, plural(noun)} & set(words)}
    return (
        bool(things)
        and (not sizes or item.size in sizes)
        and (not colors or item.color in colors)
        and (not kinds or item.kind in kinds)
    )


def _about_text(words: list[str]) -> bool:
    return bool({"text", "word", "words", "number", "writing"} & set(words))


def test_committed_pictures_are_what_the_command_writes() -> None:
    for layout in pictures.LAYOUTS:
        scene = pictures.build(layout)
        stored = np.asarray(Image.open(pictures.DIRECTORY / f"{layout.name}.png"))
        difference = np.abs(stored.astype(int) - scene.pixels.astype(int))
        assert difference.mean() < 1, "Pillow versions may differ in an edge, not in the picture"
        document = json.loads((pictures.DIRECTORY / f"{layout.name}.json").read_text())
        assert document == json.loads(json.dumps(pictures.truth(layout, scene)))
