"""Draws questions about a scene: which tasks, how often, and the reasoning that some answers start with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from photon_backend.tiny import queries, relations, spatial
from photon_backend.tiny.captions import LENGTHS, caption
from photon_backend.tiny.chat import ask_without_picture
from photon_backend.tiny.json_queries import ask_json
from photon_backend.tiny.question import Question, with_reasoning
from photon_backend.tiny.scenes import Scene

CROWD = 4  # objects
Asker = Callable[[random.Random, Scene], Question | None]


def ask_caption(rng: random.Random, scene: Scene) -> Question | None:
    """Short ones mostly of crowded scenes: to gather things in groups is what is learned last."""
    length = rng.choice(LENGTHS)
    if length == "short" and len(scene.items) < CROWD and rng.random() < 0.5:
        return None
    return Question("caption", f"caption {length}", length, caption(scene, length))


# Shares of the training questions. Reading and counting get more, because they are learned last.
ASKERS: tuple[tuple[Asker, float], ...] = (
    (ask_caption, 2.2),
    (spatial.ask_detect, 2.4),
    (spatial.ask_point, 2.0),
    (queries.ask_color, 1.5),
    (queries.ask_kind, 1.5),
    (queries.ask_size, 0.6),
    (queries.ask_count, 2.4),
    (queries.ask_compare, 0.4),
    (queries.ask_presence, 1.6),
    (queries.ask_written, 1.3),
    (queries.ask_where, 0.9),
    (queries.ask_background, 0.4),
    (queries.ask_describe, 0.5),
    (relations.ask_relation, 2.4),
    (spatial.ask_reference, 1.4),
    (ask_json, 2.2),
)
_FUNCTIONS = tuple(asker for asker, _ in ASKERS)
_CUMULATIVE = tuple(itertools.accumulate(share for _, share in ASKERS))
REASONING_SHARE = 0.12  # of the queries that have evidence to point at
CHAT_SHARE = 0.035


def draw_question(rng: random.Random, scene: Scene) -> Question:
    """One question that the scene answers."""
    if rng.random() < CHAT_SHARE:
        return ask_without_picture(rng)
    question = None
    while question is None:
        question = rng.choices(_FUNCTIONS, cum_weights=_CUMULATIVE)[0](rng, scene)
    if question.task == "query" and question.marks and rng.random() < REASONING_SHARE:
        return with_reasoning(question)
    return question
