"""Questions about colour, kind, size, number, presence and printed text. Each function returns None when the scene does
not suit it, so no question has two right answers."""

from __future__ import annotations

import random

from photon_backend.tiny.captions import background, caption
from photon_backend.tiny.phrasings import (
    ALL_COLORS,
    ALL_KINDS,
    ANY_TEXT,
    BACKGROUND,
    BACKGROUND_COLOR,
    BACKGROUND_STYLE,
    COLOR_OF,
    COLORS_OF,
    COUNT_OF,
    DESCRIBE,
    EMPTY,
    EXTREMES,
    KIND_OF,
    KINDS_OF,
    MORE,
    PRESENCE_OF,
    SAME_COLOR,
    SHAPE_OF,
    SIZE_OF,
    WHERE,
    WRITTEN,
)
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
    if rng.random() < 0.5:
        return query(rng, "kind", ("What is the {it}?",), with_article(name(item)), evidence, it=it)
    return query(rng, "kind", SHAPE_OF, item.kind, evidence, it=it)


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
        same = _yes(one[0].color == two[0].color)
        return query(rng, "compare", SAME_COLOR, same, *evidence, one=first, two=second)
    more = _yes(len(one) > len(two))
    return query(rng, "compare", MORE, more, *evidence, one=plural(first), two=plural(second))


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def ask_presence(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.1:
        texts = [scene.printed] if scene.printed else []
        return query(rng, "presence", ANY_TEXT, _yes(bool(texts)), mark("text", texts))
    if draw < 0.13:
        return query(rng, "presence", EMPTY, _yes(not scene.items and not scene.printed))
    if draw < 0.25:
        return _ask_verify(rng, scene)
    wanted = rng.random() < 0.5
    for _ in range(8):
        selector = random_selector(rng, scene)
        if bool(selector.find(scene)) == wanted:
            break
    found = selector.find(scene)
    noun = rng.choice(ANY)
    blanks = {"a": with_article(selector.phrase(noun=noun)), "them": selector.phrase(True, noun)}
    return query(rng, "presence", PRESENCE_OF, _yes(bool(found)), mark(selector.phrase(True, noun), found), **blanks)


def _ask_verify(rng: random.Random, scene: Scene) -> Question | None:
    """ "Is the circle red?" """
    if not scene.items:
        return None
    item = rng.choice(scene.items)
    color = item.color if rng.random() < 0.5 else rng.choice(COLORS)
    if len(Selector(kind=item.kind).find(scene)) != 1:
        return None
    evidence = mark(item.kind, [item])
    return query(
        rng, "presence", ("Is the {it} {color}?",), _yes(color == item.color), evidence, it=item.kind, color=color
    )


def ask_written(rng: random.Random, scene: Scene) -> Question | None:
    if scene.printed is None:
        return query(rng, "text", WRITTEN, "no text", mark("text", ()), noun=rng.choice(("text", "word", "number")))
    noun = rng.choice(("text", "number" if scene.printed.is_number else "word"))
    return query(rng, "text", WRITTEN, scene.printed.text, mark("text", [scene.printed]), noun=noun)


def ask_where(rng: random.Random, scene: Scene) -> Question | None:
    if scene.printed and rng.random() < 0.25:
        noun = rng.choice(("text", "number" if scene.printed.is_number else "word"))
        evidence = mark("text", [scene.printed])
        return query(rng, "where", WHERE[:1], position(scene.printed.center), evidence, it=noun)
    if rng.random() < 0.1 or not scene.items:
        selector = random_selector(rng, scene)
    else:
        selector = selector_of(rng, rng.choice(scene.items), scene) or Selector()
    found = selector.find(scene)
    if len(found) > 1:
        return None
    answer = position(found[0].center) if found else no_such(selector)
    return query(rng, "where", WHERE, answer, mark(selector.phrase(), found), it=selector.phrase())


def ask_background(rng: random.Random, scene: Scene) -> Question | None:
    draw = rng.random()
    if draw < 0.5:
        return query(rng, "background", BACKGROUND_COLOR, scene.tone)
    if draw < 0.7:
        return query(rng, "background", BACKGROUND_STYLE, scene.style)
    if draw < 0.8:
        return query(rng, "background", ("Is the background plain?",), _yes(scene.style == "plain"))
    return query(rng, "background", BACKGROUND, background(scene))


def ask_describe(rng: random.Random, scene: Scene) -> Question | None:
    if len(scene.items) < 4 and rng.random() < 0.5:  # as with short captions
        return None
    return query(rng, "describe", DESCRIBE, caption(scene, "short"), mark("objects", scene.items))
