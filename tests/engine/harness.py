"""Drives an engine in the test's own thread, tick by tick, so that arrivals and ends fall where a test wants them."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from photon_backend.config import Settings
from photon_backend.engine.engine import Engine
from photon_backend.model.config import load_config
from photon_backend.model.crops import make_crops
from photon_backend.protocol import (
    Cancel,
    Done,
    Failed,
    FromEngine,
    NeedPicture,
    Picture,
    Sampling,
    Submit,
    Tokens,
    unpacked,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from tiny_checkpoint import PICTURES, picture

CLIENT = b"client"


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    end: Done | Failed | None = None

    @property
    def reason(self) -> str:
        assert self.end is not None, "never answered"
        return self.end.reason if isinstance(self.end, Done) else self.end.code

    @property
    def told(self) -> tuple[list[int], list[float], str]:
        """What must not depend on overlap, batch or cache."""
        return self.ids, [round(v, 5) for v in self.values], self.reason


class Bench:
    """An engine on the seeded checkpoint, its clients' pictures, and what it answered."""

    def __init__(self, checkpoint: Path, delay=None, matcher_for=lambda request: None, **settings) -> None:
        # float64: a batch of another size rounds elsewhere, and a test of tokens must not hang on the last bit
        defaults = {"checkpoint": str(checkpoint), "dtype": "float64", "debug": True, "rows": 8, "pages": 400}
        self.settings = Settings(**(defaults | settings))
        self.engine = Engine(self.settings, self._emit, delay=delay, matcher_for=matcher_for)
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.pictures: dict[str, str] = {}
        self.deliver = True  # answer NeedPicture at once
        self.ended = threading.Semaphore(0)  # once for each answer; for an engine that runs on its own thread

    def _emit(self, client: bytes, messages: list[FromEngine]) -> None:
        for message in unpacked(messages):
            answer = self.answers.setdefault(message.request_id, Answer())
            assert answer.end is None, "something came after the end"
            if isinstance(message, NeedPicture):
                self.asked.append(message.request_id)
                if self.deliver:
                    self.bring(message.request_id)
            elif isinstance(message, Tokens):
                answer.ids += message.ids
                answer.values += message.values
            else:
                answer.end = message
                self.ended.release()

    def bring(self, request_id: str) -> None:
        pixels, tiling = make_crops(picture(self.pictures[request_id]), self.engine.config.vision)
        self.engine.post(CLIENT, Picture(request_id, tiling), pixels)

    def submit(self, request: Submit, name: str | None = None) -> None:
        if name is not None:
            self.pictures[request.request_id] = name
        self.engine.post(CLIENT, request)

    def cancel(self, request_id: str) -> None:
        self.engine.post(CLIENT, Cancel(request_id))

    @torch.inference_mode()
    def tick(self) -> bool:
        return self.engine.tick() or bool(self.engine._inbox)

    def drain(self, limit: int = 5000) -> dict[str, Answer]:
        """Ticks until nothing is left to do."""
        for _ in range(limit):
            if not self.tick():
                return self.answers
        raise AssertionError(f"not done after {limit} ticks")

    def close(self) -> None:
        self.engine.stepper.close()

    def assert_baseline(self) -> None:
        """Every row free, and no page held but by the prefix cache."""
        engine = self.engine
        assert not engine.scheduler.running and not engine.scheduler.waiting and not len(engine.pipeline)
        assert engine.book.num_open == 0 and engine.book.num_bringers == 0
        assert engine.book.next_deadline() == float("inf"), "a deadline outlived its request"
        engine.cache.clear()
        assert engine.pool.num_used == 0
        status = engine.book.status()
        assert status.submitted == status.done + status.failed + status.cancelled


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def request(request_id: str, checkpoint: Path, number: int, **changes) -> tuple[Submit, str | None]:
    """The random request of that number, as a front end would send it, and the name of its picture."""
    config, chance = load_config(checkpoint), random.Random(number)
    special = config.tokenizer
    task = changes.pop("task", None) or chance.choice(["query", "caption", "detect", "point"])
    name = changes.pop("picture", "") or chance.choice(sorted(PICTURES))
    words = [chance.randrange(20, config.text.vocab_size) for _ in range(chance.randint(1, 9))]
    coords: list[float] = []
    sizes: list[tuple[float, float]] = []
    if task == "caption":
        ids = list(chance.choice([special.templates.caption.short, special.templates.caption.long]))
    elif task == "query":
        reasoning = changes.setdefault("reasoning", chance.random() < 0.4)
        references: list[int] = []
        if chance.random() < 0.3:
            references, coords, sizes = [special.coord_id] * 2 + [special.size_id], [0.25, 0.5], [(0.5, 0.125)]
        template = special.templates.query
        opener = [special.thinking_id] if reasoning else template.suffix
        ids = template.prefix + references + words + template.suffix + opener
        if name == "none":
            ids = [special.bos_id, *ids]
    else:
        template = getattr(special.templates, task)
        ids = template.prefix + words + template.suffix
    sampling = Sampling(
        temperature=changes.pop("temperature", chance.choice([0.0, 0.7, 1.2])),
        top_p=changes.pop("top_p", chance.choice([0.3, 0.9, 1.0])),
        top_k=changes.pop("top_k", chance.choice([0, 0, 5])),
        max_tokens=changes.pop("max_tokens", chance.randint(1, 24)),
        seed=changes.pop("seed", number),
    )
    changes.setdefault("max_objects", chance.randint(1, 5))
    picture_digest = None if name == "none" else digest(name)
    submit = Submit(request_id, task, ids, picture_digest, coords, sizes, sampling=sampling, **changes)
    return submit, None if name == "none" else name
