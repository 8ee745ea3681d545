"""Questions about colour, kind, size, number, presence and printed text. Each function returns None when the scene does
not suit it, so no question has two right answers."""

from __future__ import annotations

import random

from photon_backend.tiny.captions import background, caption
from photon_backend.tiny.question import Question, mark, query
from photon_backend.tiny.scenes import COLORS, KINDS, SIZES, Item, Scene
from photon_backend.tiny.words import (
    ANY,
    Selector,
    colors_of,
    kinds_of,
    listing,
    name,
    plural,
    position,
    random_selector,
    selector_of,
    with_article,
)

CLEAR = 0.06  # a difference of centres that anyone would call a difference

COLOR_OF = (
    "What color is the {it}?",
    "What is the color of the {it}?",
    "Which color is the {it}?",
    "Which color does the {it} have?",
    "What color does the {it} have?",
    "Tell me the color of the {it}.",
    "The {it} is what color?",
)
COLORS_OF = ("What color are the {it}?", "Which colors do the {it} have?", "What colors are the {it}?")
ALL_COLORS = (
    "What colors do you see?",
    "Which colors are in the picture?",
    "What colors are there?",
    "What colors do the objects have?",
    "List the colors.",
)
KIND_OF = (
    "What shape is the {it}?",
    "What is the {it}?",
    "Which shape is the {it}?",
    "What kind of shape is the {it}?",
    "What shape does the {it} have?",
    "What is the shape of the {it}?",
)
KINDS_OF = ("What shapes are {it}?", "Which shapes are {it}?", "Which objects are {it}?", "What is {it}?")
ALL_KINDS = (
    "What shapes do you see?",
    "Which shapes are in the picture?",
    "What shapes are there?",
    "What kinds of shapes are there?",
    "List the shapes.",
)
SIZE_OF = ("What size is the {it}?", "How big is the {it}?", "How large is the {it}?", "What is the size of the {it}?")
COUNT_OF = (
    "How many {it} are there?",
    "How many {it} are there?",
    "How many {it} do you see?",
    "How many {it} are in the picture?",
    "How many {it} are in the image?",
    "How many {it} can you see?",
    "How many {it}?",
    "Count the {it}.",
    "What is the number of {it}?",
    "Number of {it}?",
)
PRESENCE_OF = (
    "Is there {a}?",
    "Is there {a} in the picture?",
    "Is there {a} in the image?",
    "Do you see {a}?",
    "Can you see {a}?",
    "Does the picture show {a}?",
    "Does the image contain {a}?",
    "Are there any {them}?",
    "Are there any {them} in the picture?",
    "Are there {them}?",
    "Do you see any {them}?",
)
WRITTEN = (
    "What is written?",
    "What is written in the picture?",
    "What is written here?",
    "What does the text say?",
    "What does it say?",
    "What text is in the picture?",
    "What text do you see?",
    "Read the text.",
    "Read it.",
    "Which {noun} is written?",
    "What {noun} is printed?",
    "What {noun} is shown?",
    "Which {noun} do you see?",
    "What is the {noun}?",
)
DESCRIBE = (
    "What do you see?",
    "What is in the picture?",
    "What is in this image?",
    "What is shown?",
    "Describe the picture.",
    "Describe the image.",
    "What does the picture show?",
    "What is this?",
)


def no_such(selector: Selector, noun: str = "object") -> str:
    return f"There is no {selector.phrase(noun=noun)}."


def ask_color(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.12:
        return query(rng, "color", ALL_COLORS, listing(colors_of(scene.items)), mark("objects", scene.items))
    if draw < 0.35:
        return _ask_extreme(rng, scene, "color")
    selector = Selector(rng.choice(SIZES) if rng.random() < 0.15 else None, None, _some_kind(rng, scene))
    found = selector.find(scene)
    evidence = mark(selector.phrase(many=len(found) != 1), found)
    if not found:
        return query(rng, "color", COLOR_OF, no_such(selector), evidence, it=selector.phrase())
    many = len(found) > 1 and rng.random() < 0.8
    phrasings = COLORS_OF if many else COLOR_OF
    return query(rng, "color", phrasings, listing(colors_of(found)), evidence, it=selector.phrase(many))


def ask_kind(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.12:
        return query(rng, "kind", ALL_KINDS, listing(kinds_of(scene.items)), mark("objects", scene.items))
    if draw < 0.35:
        return _ask_extreme(rng, scene, "kind")
    color = rng.choice(scene.items).color if scene.items and rng.random() < 0.9 else rng.choice(COLORS)
    selector = Selector(rng.choice(SIZES) if rng.random() < 0.15 else None, color)
    found = selector.find(scene)
    noun = rng.choice(ANY)
    evidence = mark(selector.phrase(len(found) != 1), found)
    if len(found) != 1 and selector.size is None:
        return query(rng, "kind", KINDS_OF, listing(kinds_of(found)), evidence, it=color)
    if len(found) > 1:
        return None
    if not found:
        return query(rng, "kind", KIND_OF, no_such(selector, noun), evidence, it=selector.phrase(noun=noun))
    return query(rng, "kind", KIND_OF, found[0].kind, evidence, it=selector.phrase(noun=noun))


def _some_kind(rng: random.Random, scene: Scene) -> str:
    return rng.choice(scene.items).kind if scene.items and rng.random() < 0.88 else rng.choice(KINDS)


EXTREMES = {
    "left": ("leftmost {it}", "{it} on the far left", "{it} furthest to the left", "first {it} from the left"),
    "right": ("rightmost {it}", "{it} on the far right", "{it} furthest to the right", "first {it} from the right"),
    "top": ("topmost {it}", "highest {it}", "{it} at the very top", "{it} furthest up"),
    "bottom": ("bottommost {it}", "lowest {it}", "{it} at the very bottom", "{it} furthest down"),
    "largest": ("largest {it}", "biggest {it}"),
    "smallest": ("smallest {it}",),
}


def extreme(scene: Scene, which: str) -> Item | None:
    """The item that is clearly the leftmost, topmost, largest, ...; None when it is not clear."""
    if len(scene.items) < 2:
        return None
    axis = {"left": 0, "right": 0, "top": 1, "bottom": 1}.get(which)
    if axis is None:
        keys = [float(SIZES.index(item.size)) for item in scene.items]
    else:
        keys = [item.center[axis] for item in scene.items]
    sign = -1 if which in ("right", "bottom", "largest") else 1
    order = sorted(range(len(keys)), key=lambda i: sign * keys[i])
    clear = abs(keys[order[0]] - keys[order[1]]) > CLEAR
    return scene.items[order[0]] if clear else None


def _ask_extreme(rng: random.Random, scene: Scene, asked: str) -> Question | None:
    which = rng.choice(tuple(EXTREMES))
    item = extreme(scene, which)
    if item is None:
        return None
    it = rng.choice(EXTREMES[which]).format(it=rng.choice(ANY))
    evidence = mark(it, [item])
    if asked == "color":
        return query(rng, "color", COLOR_OF, item.color, evidence, it=it)
    answer, phrasings = (with_article(name(item)), ("What is the {it}?",)) if rng.random() < 0.5 else (item.kind, ())
    return query(rng, "kind", phrasings or (KIND_OF[0], *KIND_OF[2:]), answer, evidence, it=it)


def ask_size(rng: random.Random, scene: Scene) -> Question | None:
    if not scene.items:
        return None
    item = rng.choice(scene.items)
    selector = Selector(color=item.color, kind=item.kind) if rng.random() < 0.5 else Selector(kind=item.kind)
    found = selector.find(scene)
    if len(found) != 1:
        return None
    return query(rng, "size", SIZE_OF, item.size, mark(selector.phrase(), found), it=selector.phrase())


def ask_count(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.06:
        of = rng.choice(("different colors", "colors"))
        return query(rng, "count", COUNT_OF, str(len(colors_of(scene.items))), mark("objects", scene.items), it=of)
    if draw < 0.1:
        of = rng.choice(("different shapes", "kinds of shapes", "different kinds of shapes"))
        return query(rng, "count", COUNT_OF, str(len(kinds_of(scene.items))), mark("objects", scene.items), it=of)
    selector = Selector() if draw < 0.28 else random_selector(rng, scene)
    found = selector.find(scene)
    phrase = selector.phrase(many=True, noun=rng.choice(ANY))
    return query(rng, "count", COUNT_OF, str(len(found)), mark(phrase, found), it=phrase)


def ask_compare(rng: random.Random, scene: Scene) -> Question | None:
    """More of one than of the other; the same colour."""
    kinds = kinds_of(scene.items)
    if len(kinds) < 2:
        return None
    first, second = rng.sample(kinds, 2)
    one, two = Selector(kind=first).find(scene), Selector(kind=second).find(scene)
    evidence = (mark(plural(first), one), mark(plural(second), two))
    if len(one) == len(two) == 1:
        phrasings = ("Do the {one} and the {two} have the same color?", "Are the {one} and the {two} the same color?")
        return query(rng, "compare", phrasings, _yes(one[0].color == two[0].color), *evidence, one=first, two=second)
    phrasings = ("Are there more {one} than {two}?",)
    return query(
        rng, "compare", phrasings, _yes(len(one) > len(two)), *evidence, one=plural(first), two=plural(second)
    )


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def ask_presence(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.1:
        phrasings = ("Is there any text?", "Is something written?", "Is there text in the picture?", "Do you see any text?")
        found = [scene.printed] if scene.printed else []
        return query(rng, "presence", phrasings, _yes(bool(found)), mark("text", found))
    if draw < 0.13:
        return query(
            rng, "presence", ("Is the picture empty?", "Is the image empty?"), _yes(not scene.items and not scene.printed)
        )
    if draw < 0.25:
        return _ask_verify(rng, scene)
    wanted = rng.random() < 0.5
    for _ in range(8):
        selector = random_selector(rng, scene)
        if bool(selector.find(scene)) == wanted:
            break
    found = selector.find(scene)
    noun = rng.choice(ANY)
    slots = {"a": with_article(selector.phrase(noun=noun)), "them": selector.phrase(True, noun)}
    return query(rng, "presence", PRESENCE_OF, _yes(bool(found)), mark(selector.phrase(True, noun), found), **slots)


def _ask_verify(rng: random.Random, scene: Scene) -> Question | None:
    """ "Is the circle red?" """
    if not scene.items:
        return None
    item = rng.choice(scene.items)
    color = item.color if rng.random() < 0.5 else rng.choice(COLORS)
    if len(Selector(kind=item.kind).find(scene)) != 1:
        return None
    evidence = mark(item.kind, [item])
    return query(rng, "presence", ("Is the {it} {color}?",), _yes(color == item.color), evidence, it=item.kind, color=color)


def ask_written(rng: random.Random, scene: Scene) -> Question | None:
    if scene.printed is None:
        return query(rng, "text", WRITTEN, "no text", mark("text", ()), noun=rng.choice(("text", "word", "number")))
    noun = rng.choice(("text", "number" if scene.printed.is_number else "word"))
    return query(rng, "text", WRITTEN, scene.printed.text, mark("text", [scene.printed]), noun=noun)


def ask_where(rng: random.Random, scene: Scene) -> Question | None:
    if scene.printed and rng.random() < 0.25:
        noun = rng.choice(("text", "number" if scene.printed.is_number else "word"))
        evidence = mark("text", [scene.printed])
        return query(rng, "where", ("Where is the {it}?",), position(scene.printed.center), evidence, it=noun)
    if rng.random() < 0.1 or not scene.items:
        selector = random_selector(rng, scene)
    else:
        selector = selector_of(rng, rng.choice(scene.items), scene) or Selector()
    found = selector.find(scene)
    if len(found) > 1:
        return None
    answer = position(found[0].center) if found else no_such(selector)
    phrasings = ("Where is the {it}?", "Where do you see the {it}?", "In which part of the picture is the {it}?")
    return query(rng, "where", phrasings, answer, mark(selector.phrase(), found), it=selector.phrase())


def ask_background(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.5:
        phrasings = ("What color is the background?", "What is the color of the background?", "Which color is the background?")
        return query(rng, "background", phrasings, scene.tone)
    if draw < 0.8:
        phrasings = ("What pattern does the background have?", "What kind of background is it?", "Is the background plain?")
        question = query(rng, "background", phrasings[:2], scene.style)
        return question if rng.random() < 0.7 else query(rng, "background", phrasings[2:], _yes(scene.style == "plain"))
    phrasings = ("Describe the background.", "What does the background look like?")
    return query(rng, "background", phrasings, background(scene))


def ask_describe(rng: random.Random, scene: Scene) -> Question | None:
    return query(rng, "describe", DESCRIBE, caption(scene, "short"), mark("objects", scene.items))
