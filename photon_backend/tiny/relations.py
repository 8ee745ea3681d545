"""Questions about where things stand to each other. "Left of" compares centres; near ties are never asked."""

from __future__ import annotations

import random

from photon_backend.tiny.queries import CLEAR
from photon_backend.tiny.question import Question, mark, query
from photon_backend.tiny.scenes import Item, Printed, Scene
from photon_backend.tiny.words import Selector, listing, mention, random_selector, selector_of

MOST_ANSWERS = 3  # things named in one answer
WORDING = {
    "left": ("left of", "to the left of", "on the left side of"),
    "right": ("right of", "to the right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath"),
}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
OPEN = ("What is {how} the {it}?", "Which objects are {how} the {it}?", "What do you see {how} the {it}?")
CLOSED = ("Is the {one} {how} the {two}?", "Is the {one} {how} the {two} in the picture?")


def offset(relation: str, thing: Item | Printed, other: Item | Printed) -> float:
    """How far `thing` lies in that direction from `other`; negative on the other side."""
    axis = 0 if relation in ("left", "right") else 1
    difference = thing.center[axis] - other.center[axis]
    return difference if relation in ("right", "below") else -difference


def ask_relation(rng: random.Random, scene: Scene) -> Question | None:
    if not scene.items:
        return None
    return _ask_closed(rng, scene) if rng.random() < 0.35 else _ask_open(rng, scene)


def _ask_open(rng: random.Random, scene: Scene) -> Question | None:
    """ "What is left of the red star?", answered with everything there, from left to right."""
    relation = rng.choice(tuple(WORDING))
    if rng.random() < 0.05:
        absent = random_selector(rng, scene)
        if not absent.find(scene):
            return _open(rng, relation, absent, f"There is no {absent.phrase()}.", [], [])
    item = rng.choice(scene.items)
    selector = selector_of(rng, item, scene)
    others: list[Item | Printed] = [other for other in (*scene.items, scene.printed) if other not in (item, None)]
    offsets = [offset(relation, other, item) for other in others]
    if selector is None or any(abs(value) < CLEAR for value in offsets):
        return None
    there = [other for other, value in zip(others, offsets, strict=True) if value > 0]
    if len(there) > MOST_ANSWERS or (len(there) < MOST_ANSWERS and rng.random() < 0.3):  # lists are learned last
        return None
    answer = listing([mention(thing) for thing in there]) if there else "nothing"
    return _open(rng, relation, selector, answer, [item], there)


def _open(
    rng: random.Random,
    relation: str,
    selector: Selector,
    answer: str,
    found: list[Item],
    there: list[Item | Printed],
) -> Question:
    how = rng.choice(WORDING[relation])
    evidence = [mark(selector.phrase(), found)]
    if found:
        evidence.append(mark(f"things {WORDING[relation][0]} it", there))
    return query(rng, "relation", OPEN, answer, *evidence, how=how, it=selector.phrase())


def _ask_closed(rng: random.Random, scene: Scene) -> Question | None:
    """ "Is the circle left of the square?", or "... above or below ...?"."""
    if len(scene.items) < 2:
        return None
    one, two = rng.sample(scene.items, 2)
    first, second = selector_of(rng, one, scene), selector_of(rng, two, scene)
    relation = rng.choice(tuple(WORDING))
    distance = offset(relation, one, two)
    if first is None or second is None or abs(distance) < CLEAR:
        return None
    blanks = {"one": first.phrase(), "two": second.phrase()}
    evidence = (mark(first.phrase(), [one]), mark(second.phrase(), [two]))
    if rng.random() < 0.2:
        pair = "left or right of" if relation in ("left", "right") else "above or below"
        answer = relation if distance > 0 else OPPOSITE[relation]
        return query(rng, "relation", ("Is the {one} {how} the {two}?",), answer, *evidence, how=pair, **blanks)
    how = rng.choice(WORDING[relation])
    return query(rng, "relation", CLOSED, "yes" if distance > 0 else "no", *evidence, how=how, **blanks)
