"""The requests of the golden tests: what is asked of the reference and of this model alike."""

from __future__ import annotations

import msgspec

from photon_backend.model.config import ModelConfig
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.protocol import Task
from tests.model.tiny_checkpoint import PICTURES

MAX_TOKENS = 24
MAX_OBJECTS = 5

Reference = tuple[float, float] | tuple[float, float, float, float]  # a point, or a box x_min, y_min, x_max, y_max


class Case(msgspec.Struct, frozen=True):
    name: str
    picture: str | None
    task: Task
    text: str = ""  # the question, the object, or the caption length
    reasoning: bool = False
    refs: tuple[Reference, ...] = ()
    max_objects: int = MAX_OBJECTS


def cases() -> list[Case]:
    found = [
        Case("none/query", None, "query", "how many days are in a week?"),
        Case("none/reasoning", None, "query", "what is 7 and 5?", reasoning=True),
    ]
    for name in PICTURES:
        found += _cases_of(name)
    return found


def _cases_of(name: str) -> list[Case]:
    captions = [Case(f"{name}/caption/{length}", name, "caption", length) for length in ("short", "normal", "long")]
    refs: tuple[Reference, ...] = ((0.25, 0.7), (0.1, 0.2, 0.55, 0.9))
    return [
        *captions,
        Case(f"{name}/query", name, "query", "what colour is the star?"),
        Case(f"{name}/query/refs", name, "query", "what is here?", refs=refs),
        Case(f"{name}/query/reasoning", name, "query", "is there a dog?", reasoning=True),
        Case(f"{name}/query/reasoning2", name, "query", "how many circles are here?", reasoning=True),
        Case(f"{name}/detect", name, "detect", "red circle"),
        Case(f"{name}/detect/other", name, "detect", "house"),
        Case(f"{name}/detect/two", name, "detect", "star", max_objects=2),
        Case(f"{name}/point", name, "point", "cat"),
        Case(f"{name}/point/other", name, "point", "black ring"),
    ]


def prompt(
    case: Case, config: ModelConfig, tokenizer: TextTokenizer
) -> tuple[list[int], list[float], list[tuple[float, float]]]:
    """Ids, coordinate values and sizes of a case, laid out as the reference does it."""
    ids, templates = config.tokenizer, config.tokenizer.templates
    assert templates.caption and templates.query and templates.detect and templates.point
    if case.task == "caption":
        return list(getattr(templates.caption, case.text)), [], []
    if case.task in ("detect", "point"):
        span = templates.detect if case.task == "detect" else templates.point
        return [*span.prefix, *tokenizer.encode(" " + case.text), *span.suffix], [], []
    start = [] if case.picture else [ids.bos_id]
    spatial: list[int] = []
    coords: list[float] = []
    sizes: list[tuple[float, float]] = []
    for ref in case.refs:
        spatial += [ids.coord_id, ids.coord_id]
        if len(ref) == 2:
            coords += ref
        else:
            spatial.append(ids.size_id)
            coords += [(ref[0] + ref[2]) / 2, (ref[1] + ref[3]) / 2]
            sizes.append((ref[2] - ref[0], ref[3] - ref[1]))
    opener = [ids.thinking_id] if case.reasoning else templates.query.suffix
    question = tokenizer.encode(case.text)
    return [*start, *templates.query.prefix, *spatial, *question, *templates.query.suffix, *opener], coords, sizes
