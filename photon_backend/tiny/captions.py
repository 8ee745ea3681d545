"""Captions of a scene in three lengths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from photon_backend.tiny.scenes import Item, Printed, Scene
from photon_backend.tiny.words import (
    NUMBERS,
    listing,
    mention,
    name,
    plural,
    position,
    positions_near,
    sentence,
    with_article,
)

LENGTHS = ("short", "normal", "long")


def caption(scene: Scene, length: str) -> str:
    return {"short": _short, "normal": _normal, "long": _long}[length](scene)


def _short(scene: Scene) -> str:
    """ "A red circle and two blue squares." Groups come in the order of their leftmost item."""
    counts: dict[tuple[str, str], int] = {}
    for item in scene.items:
        counts[item.color, item.kind] = counts.get((item.color, item.kind), 0) + 1
    parts = [
        with_article(f"{color} {kind}") if count == 1 else f"{NUMBERS[count]} {color} {plural(kind)}"
        for (color, kind), count in counts.items()
    ]
    if scene.printed:
        parts.append(mention(scene.printed))
    return sentence(listing(parts)) + "." if parts else "An empty picture."


def _normal(scene: Scene) -> str:
    """Every item with its place, from left to right, then the text."""
    parts = [f"{mention(item)} {position(item.center)}" for item in scene.items]
    sentences = [sentence(listing(parts)) + "."] if parts else []
    if scene.printed:
        sentences.append(_written(scene.printed))
    return " ".join(sentences) or f"An empty picture with {background(scene)}."


def _long(scene: Scene) -> str:
    """Background, number, and every item with size and place, then the text."""
    count = len(scene.items)
    noun = "object" if count == 1 else "objects"
    text = f"The picture shows {NUMBERS[count]} {noun} on {background(scene)}"
    parts = [f"{with_article(f'{item.size} {item.color} {item.kind}')} {position(item.center)}" for item in scene.items]
    text += f": {listing(parts)}." if parts else "."
    if scene.printed:
        return f"{text} {_written(scene.printed)}"
    return text + " There is no text."


def _written(printed: Printed) -> str:
    return sentence(f"{mention(printed)} is written {position(printed.center)}.")


def background(scene: Scene) -> str:
    return f"a {scene.style} {scene.tone} background"


def is_true(text: str, scene: Scene, length: str) -> bool:
    """Whether a caption says all that it should and nothing else: in any order, near a border any position."""
    if length == "short":
        return _counted(_parts(text)) == _counted(_parts(caption(scene, length)))
    said = _parts(text)
    for part in _parts(caption(scene, length)):
        allowed = [part, *_nearby(part, scene)]
        found = next((candidate for candidate in allowed if candidate in said), None)
        if found is None:
            return False
        said.remove(found)
    return not said


def _parts(text: str) -> list[str]:
    return [part[0].lower() + part[1:] for part in re.split(r", | and |: |\. |\.$", text) if part]


def _counted(parts: list[str]) -> Counter[str]:
    """How many of each: "a red star and a red star" says the same as "two red stars"."""
    counts: Counter[str] = Counter()
    for part in parts:
        number, _, noun = part.partition(" ")
        if number in NUMBERS[2:]:
            counts[noun] += NUMBERS.index(number)
        else:
            counts[plural(noun)] += 1
    return counts


def _nearby(part: str, scene: Scene) -> Iterator[str]:
    """The same part with the other positions that a thing so near a border may be said to have."""
    things: list[Item | Printed] = [*scene.items, *([scene.printed] if scene.printed else [])]
    for thing in things:
        true = position(thing.center)
        if name(thing) in part and part.endswith(true):
            yield from (part.removesuffix(true) + other for other in positions_near(thing.center))
