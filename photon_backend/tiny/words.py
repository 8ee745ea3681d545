"""Names of things: nouns, lists, positions, and selectors such as "large red circles"."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from photon_backend.tiny.scenes import COLORS, KINDS, SIZES, Item, Printed, Scene

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
ANY = ("object", "shape", "thing")
POSITIONS = {
    (0, 0): "at the top left",
    (1, 0): "at the top",
    (2, 0): "at the top right",
    (0, 1): "on the left",
    (1, 1): "in the center",
    (2, 1): "on the right",
    (0, 2): "at the bottom left",
    (1, 2): "at the bottom",
    (2, 2): "at the bottom right",
}


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(parts: Sequence[str]) -> str:
    """ "a, b and c"; "none" for nothing."""
    if not parts:
        return "none"
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def position(center: tuple[float, float]) -> str:
    """The ninth of the picture that holds the point."""
    return POSITIONS[min(2, int(center[0] * 3)), min(2, int(center[1] * 3))]


def positions_near(center: tuple[float, float], slack: float = 0.03) -> set[str]:
    """The ninths that the point lies in or nearly in."""
    shifts = (-slack, 0.0, slack)
    return {
        position((min(1.0, max(0.0, center[0] + x)), min(1.0, max(0.0, center[1] + y)))) for x in shifts for y in shifts
    }


def name(thing: Item | Printed) -> str:
    if isinstance(thing, Item):
        return f"{thing.color} {thing.kind}"
    return f"number {thing.text}" if thing.is_number else f'word "{thing.text}"'


def mention(thing: Item | Printed) -> str:
    """The name with its article: "a red circle", "the number 42"."""
    return with_article(name(thing)) if isinstance(thing, Item) else f"the {name(thing)}"


def colors_of(items: Iterable[Item]) -> list[str]:
    """Distinct colours, in the fixed order of COLORS."""
    present = {item.color for item in items}
    return [color for color in COLORS if color in present]


def kinds_of(items: Iterable[Item]) -> list[str]:
    """Distinct kinds, in the fixed order of KINDS."""
    present = {item.kind for item in items}
    return [kind for kind in KINDS if kind in present]


@dataclass(frozen=True)
class Selector:
    """Which items are meant. A part that is None matches all."""

    size: str | None = None
    color: str | None = None
    kind: str | None = None

    def matches(self, item: Item) -> bool:
        return self.size in (None, item.size) and self.color in (None, item.color) and self.kind in (None, item.kind)

    def find(self, scene: Scene) -> list[Item]:
        return [item for item in scene.items if self.matches(item)]

    def phrase(self, many: bool = False, noun: str = "object") -> str:
        head = self.kind or noun
        return " ".join(part for part in (self.size, self.color, plural(head) if many else head) if part)


def selector_of(rng: random.Random, item: Item, scene: Scene) -> Selector | None:
    """The shortest selector, drawn among equals, that means this item only; None when there is none."""
    short = [Selector(kind=item.kind), Selector(color=item.color)]
    rng.shuffle(short)
    long = [Selector(color=item.color, kind=item.kind), Selector(size=item.size, kind=item.kind)]
    if rng.random() < 0.4:
        short = []
    for selector in (*short, *long, Selector(item.size, item.color, item.kind)):
        if len(selector.find(scene)) == 1:
            return selector
    return None


def random_selector(rng: random.Random, scene: Scene) -> Selector:
    """Of one, two or three parts; mostly taken from items of the scene, sometimes a mixture of two, sometimes free."""
    near = scene.items or [Item(rng.choice(KINDS), rng.choice(COLORS), rng.choice(SIZES), (0, 0, 1, 1))]
    draw = rng.random()
    if draw < 0.65:
        one = two = rng.choice(near)
    elif draw < 0.8:
        one, two = rng.choice(near), rng.choice(near)
    else:
        one = two = Item(rng.choice(KINDS), rng.choice(COLORS), rng.choice(SIZES), (0, 0, 1, 1))
    parts = rng.choices(((0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1), (1, 0, 0)), (36, 20, 28, 7, 4, 5))[0]
    return Selector(one.size if parts[0] else None, two.color if parts[1] else None, one.kind if parts[2] else None)
