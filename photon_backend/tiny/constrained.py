"""Accuracy of constrained answers on unseen scenes, through front end and engine, as a server gives them.

Every question comes with the constraint that a user would give: a JSON schema, a colour out of a list (`choice`), a
number as an integer (`json_schema`). Right values are counted leaf by leaf: {"color":"red","count":2} has two, and a
list has one more for its length.
"""

from __future__ import annotations

import io
import json
import queue
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from photon_backend.config import Settings
from photon_backend.engine.engine import Engine
from photon_backend.frontend.session import FrontEnd, RawRequest
from photon_backend.protocol import Done, Failed, FromEngine, NeedPicture, Picture, Tokens, unpacked
from photon_backend.tiny import queries
from photon_backend.tiny.json_queries import INTEGER, ask_json
from photon_backend.tiny.scenes import COLORS, Scene, make_scene

CLIENT = b"evaluate"
JSON_QUESTIONS, CHOICES, NUMBERS = 6, 2, 2  # of a scene
SCENES_AT_ONCE = 8


@dataclass(frozen=True)
class Task:
    """A question with its constraint and the right answer, as text and as a value."""

    category: str
    question: str
    option: dict[str, Any]
    value: Any


def tasks_of(scene: Scene) -> Iterator[Task]:
    rng = random.Random(scene.seed ^ 0xC0DE)
    for _ in range(JSON_QUESTIONS):
        question = ask_json(rng, scene)
        if question is not None:
            option = {"json_schema": json.loads(question.schema)}
            category = "json, keys by schema" if question.keys_given else "json"
            yield Task(category, question.text, option, json.loads(question.answer))
    for _ in range(CHOICES):
        color = queries.ask_color(rng, scene)
        if color is not None and color.answer in COLORS:
            yield Task("choice of colors", color.text, {"choice": [*COLORS]}, color.answer)
    for _ in range(NUMBERS):
        count = queries.ask_count(rng, scene)
        if count is not None:
            yield Task("count as integer", count.text, {"json_schema": INTEGER}, int(count.answer))


@dataclass
class Tally:
    """Of one category: answers, answers that are right as a whole, values, right values, answers cut or not JSON."""

    asked: int = 0
    right: int = 0
    values: int = 0
    values_right: int = 0
    broken: int = 0

    def add(self, said: Any, value: Any) -> None:
        expected, got = dict(leaves(value)), dict(leaves(said))
        matching = sum(path in got and got[path] == leaf for path, leaf in expected.items())
        self.asked += 1
        self.right += said == value
        self.values += max(len(expected), len(got))
        self.values_right += matching


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every scalar with its path, and the length of every list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        yield (*path, "length"), len(value)
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def evaluate_constrained(settings: Settings, seeds: Sequence[int]) -> dict[str, Tally]:
    """By category. Raises what `Engine` raises."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with Service(settings) as service:
        for start in range(0, len(seeds), SCENES_AT_ONCE):
            scenes = [make_scene(seed) for seed in seeds[start : start + SCENES_AT_ONCE]]
            asked = [(_png(scene), task) for scene in scenes for task in tasks_of(scene)]
            answers = service.ask([_request(png, task) for png, task in asked])
            for (_, task), text in zip(asked, answers, strict=True):
                _judge(tallies[task.category], task, text)
    return tallies


def _request(png: bytes, task: Task) -> RawRequest:
    options = json.dumps({"temperature": 0, **task.option})
    return RawRequest(text_input=task.question, image=png, sampling_parameters=options)


class Service:
    """A front end and an engine in this process."""

    def __init__(self, settings: Settings) -> None:
        self.front_end = FrontEnd(settings)
        self.inbox: queue.SimpleQueue[list[FromEngine]] = queue.SimpleQueue()
        self.engine = Engine(settings, lambda client, messages: self.inbox.put(messages))

    def __enter__(self) -> Service:
        self.engine.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.stop()

    def ask(self, requests: Sequence[RawRequest]) -> list[str]:
        """All at once; the texts in the order of the requests. Raises the first PhotonError that answers one."""
        sessions = {str(number): self.front_end.open(raw, str(number)) for number, raw in enumerate(requests)}
        texts: dict[str, str] = {}
        for session in sessions.values():
            self.engine.post(CLIENT, session.submit)
        while len(texts) < len(requests):
            for message in unpacked(self.inbox.get()):
                assert isinstance(message, NeedPicture | Tokens | Done | Failed)
                session = sessions[message.request_id]
                if isinstance(message, NeedPicture):
                    tiling, pixels = session.picture()
                    self.engine.post(CLIENT, Picture(message.request_id, tiling), pixels)
                    continue
                for response in session.feed([message]):
                    if response.error is not None:
                        raise response.error
                    texts[message.request_id] = response.text or ""
        return [texts[name] for name in sessions]


def _judge(tally: Tally, task: Task, text: str) -> None:
    if "choice" in task.option:
        tally.add(text, task.value)
        return
    try:
        tally.add(json.loads(text), task.value)
    except ValueError:  # cut at max_tokens
        tally.broken += 1
        tally.add(None, task.value)


def _png(scene: Scene) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(scene.pixels).save(encoded, "PNG")
    return encoded.getvalue()
