"""The record of one question with its right answer, and the ways in which people type the same question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from photon_backend.tiny.scenes import Box, Item, Printed

# What reasoning is made of. SEE is followed by a grounded label: its text, then a point for each thing found.
SEE = "I see"
SEE_NONE = "I see no {label}."
SEE_ALL = "I look at the whole picture."
SO = " So the answer is {answer}."


@dataclass(frozen=True)
class Mark:
    """Evidence that reasoning points at: what was looked for, and the centres found."""

    label: str
    centers: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Question:
    """`text` is the question, the object to find, or the caption's length. Spatial values are in 0..1."""

    task: str  # query, caption, detect, point
    category: str  # what is asked, for the accuracy table
    text: str
    answer: str = ""
    boxes: tuple[Box, ...] = ()  # of detect and point, in the order of the model's answer
    refs: tuple[tuple[float, ...], ...] = ()  # spatial references: (x, y) or a box
    marks: tuple[Mark, ...] = ()
    reasoning: bool = False
    picture: bool = True
    schema: str = ""  # of a JSON answer
    keys_given: bool = False  # a grammar gives the first punctuation and the keys of the JSON answer


def mark(label: str, things: Sequence[Item | Printed]) -> Mark:
    return Mark(label, tuple(thing.center for thing in things))


def query(
    rng: random.Random, category: str, phrasings: Sequence[str], answer: str, *marks: Mark, **blanks: str
) -> Question:
    """A query in one of the phrasings, with its blanks filled, typed in one of the usual ways."""
    return Question("query", category, typed(rng, rng.choice(phrasings).format(**blanks)), answer, marks=marks)


def typed(rng: random.Random, text: str) -> str:
    """Other words for picture, "what's", British spelling, small first letter, no question mark: each sometimes."""
    if rng.random() < 0.4:
        text = text.replace("picture", rng.choice(("image", "photo", "picture")))
    if rng.random() < 0.15:
        text = text.replace("What is", "What's").replace("Where is", "Where's")
    if rng.random() < 0.25:
        text = text.replace("color", "colour").replace("gray", "grey").replace("center", "centre")
    if rng.random() < 0.35:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.3:
        text = text.rstrip("?.")
    if rng.random() < 0.04:
        text = text.lower() if rng.random() < 0.7 else text.upper()
    return text


def with_reasoning(question: Question) -> Question:
    return replace(question, reasoning=True)
