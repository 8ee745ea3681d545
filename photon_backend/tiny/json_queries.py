"""Questions that are answered in JSON, spelled as the constraint `json_schema` spells it: no white space, keys in the
order of the schema. Each brings the schema that a user would give with it.

Three ways to ask: the question names the keys ("... as JSON with color and shape."); it only says JSON, which means the
keys that are usual; or it says nothing of JSON and the schema alone decides (`keys_given`): then the grammar forces the
keys, so the model is taught what follows them and not to say them itself.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from photon_backend.tiny import queries
from photon_backend.tiny.phrasings import DESCRIBE, EXTREMES
from photon_backend.tiny.question import Question, typed
from photon_backend.tiny.scenes import COLORS, KINDS, SIZES, TONES, Item, Scene
from photon_backend.tiny.words import (
    ANY,
    POSITIONS,
    Selector,
    colors_of,
    kinds_of,
    listing,
    position,
    random_selector,
    selector_of,
)

Field = tuple[Any, dict[str, Any]]  # a value and its schema
MOST_OBJECTS, MOST_LETTERS = 12, 8  # bounds in the schemas
COLOR, SHAPE, SIZE, TONE = ({"enum": [*names]} for names in (COLORS, KINDS, SIZES, TONES))
PLACE = {"enum": [where.split(" the ")[1] for where in POSITIONS.values()]}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 20}
TEXT = {"type": ["string", "null"], "maxLength": MOST_LETTERS}
ALIASES = {"shape": ("kind", "type"), "position": ("place", "where"), "count": ("number", "total"), "text": ("word",)}
NAMED = (" as JSON with {keys}", " as JSON with {keys}", " as JSON with the keys {keys}", " in JSON with {keys}")
UNNAMED = (" as JSON", " as JSON", " in JSON", " as a JSON object")
DESCRIBE_IT = ("Describe the {it}", "Give a description of the {it}", "Tell me about the {it}", "What is the {it}?")
DESCRIBE_ALL = ("Describe the picture", "Describe the scene", "Describe the image", "Tell me about the picture")
LIST = ("List the {it}", "List all {it}", "Name the {it}", "Give a list of the {it}")
EACH = ("Count the objects of each {it} as JSON", "How many objects of each {it} are there? Answer as JSON")


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def place(center: tuple[float, float]) -> str:
    """ "top left": the position without its preposition."""
    return position(center).split(" the ")[1]


def of_item(item: Item) -> dict[str, Field]:
    return {
        "color": (item.color, COLOR),
        "shape": (item.kind, SHAPE),
        "size": (item.size, SIZE),
        "position": (place(item.center), PLACE),
    }


def of_scene(scene: Scene) -> dict[str, Field]:
    items = scene.items
    return {
        "count": (len(items), INTEGER),
        "colors": (colors_of(items), _array(COLOR)),
        "shapes": (kinds_of(items), _array(SHAPE)),
        "background": (scene.tone, TONE),
        "objects": _listed(items, ("color", "shape")),
        "text": (scene.printed.text if scene.printed else None, TEXT),
    }


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": MOST_OBJECTS}


def _object(fields: dict[str, Field]) -> Field:
    values = {name: value for name, (value, _) in fields.items()}
    properties = {name: schema for name, (_, schema) in fields.items()}
    return values, {
        "type": "object",
        "properties": properties,
        "required": [*fields],
        "additionalProperties": False,
    }


def _listed(items: Sequence[Item], keys: Sequence[str], names: Sequence[str] = ()) -> Field:
    """One object for each item; `names` replace the keys."""
    pairs = tuple(zip(keys, names or keys, strict=True))
    rows = [_object({name: of_item(item)[key] for key, name in pairs})[0] for item in items]
    schemas = {"color": COLOR, "shape": SHAPE, "size": SIZE, "position": PLACE}
    return rows, _array(_object({name: (None, schemas[key]) for key, name in pairs})[1])


def ask_json(rng: random.Random, scene: Scene) -> Question | None:
    asker = rng.choices((_ask_scene, _ask_item, _ask_list, _ask_each, _ask_value), (30, 20, 15, 7, 28))[0]
    return asker(rng, scene)


def _ask_scene(rng: random.Random, scene: Scene) -> Question:
    return _ask_fields(rng, DESCRIBE_ALL, DESCRIBE, of_scene(scene), ("background", "objects", "text"), "picture")


def _ask_item(rng: random.Random, scene: Scene) -> Question | None:
    found = _one_item(rng, scene)
    if found is None:
        return None
    item, it = found
    usual = ("color", "shape", "size", "position")
    plain = [text.format(it=it) for text in DESCRIBE_IT]
    if rng.random() < 0.3:
        keys, names = _some_keys(rng, usual)
        answer = _object({name: of_item(item)[key] for key, name in zip(keys, names, strict=True)})
        return _json(f"Give the {listing(names)} of the {it} as JSON.", answer)
    return _ask_fields(rng, plain[:3], plain, of_item(item), usual, it)


def _one_item(rng: random.Random, scene: Scene) -> tuple[Item, str] | None:
    """An item, and words that mean it and nothing else."""
    if not scene.items:
        return None
    if rng.random() < 0.3:
        which = rng.choice(tuple(EXTREMES))
        item = queries.extreme(scene, which)
        return (item, rng.choice(EXTREMES[which]).format(it=rng.choice(ANY))) if item else None
    item = rng.choice(scene.items)
    selector = selector_of(rng, item, scene)
    return (item, selector.phrase()) if selector else None


def _ask_fields(
    rng: random.Random,
    heads: Sequence[str],
    plain: Sequence[str],
    fields: dict[str, Field],
    usual: Sequence[str],
    about: str,
) -> Question:
    """Asks for the usual fields of a thing, for some by name, or for some by schema alone."""
    draw = rng.random()
    if draw < 0.35:
        answer = _object({key: fields[key] for key in usual})
        return _json(typed(rng, rng.choice(heads)) + rng.choice(UNNAMED) + _stop(rng), answer)
    keys, names = _some_keys(rng, tuple(fields))
    answer = _object({name: fields[key] for key, name in zip(keys, names, strict=True)})
    if draw < 0.7:
        tail = rng.choice(NAMED).format(keys=listing(names))
        return _json(typed(rng, rng.choice(heads)) + tail + _stop(rng), answer)
    return _json(typed(rng, rng.choice(plain)), answer, keys_given=True)


def _some_keys(rng: random.Random, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """One to four keys in any order, and the names that they are given: mostly their own."""
    chosen = rng.sample(keys, min(len(keys), rng.choices((1, 2, 3, 4), (2, 4, 3, 1))[0]))
    return chosen, [rng.choice(ALIASES[key]) if key in ALIASES and rng.random() < 0.2 else key for key in chosen]


def _ask_list(rng: random.Random, scene: Scene) -> Question:
    selector = Selector() if rng.random() < 0.6 else random_selector(rng, scene)
    keys, names = ["color", "shape"], ["color", "shape"]
    tail = rng.choice(UNNAMED[:3])
    if rng.random() < 0.4:
        keys, names = _some_keys(rng, ("color", "shape", "size", "position"))
        tail = rng.choice(NAMED).format(keys=listing(names))
    head = rng.choice(LIST).format(it=selector.phrase(many=True, noun=rng.choice(ANY)))
    return _json(typed(rng, head) + tail + _stop(rng), _listed(selector.find(scene), keys, names))


def _ask_each(rng: random.Random, scene: Scene) -> Question:
    """How many of each colour or shape; what is not there is left out."""
    it, names = rng.choice((("color", COLORS), ("shape", KINDS)))
    counts = Counter(item.color if it == "color" else item.kind for item in scene.items)
    values = {name: counts[name] for name in names if name in counts}
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER), "additionalProperties": False}
    return _json(rng.choice(EACH).format(it=it) + _stop(rng), (values, schema))


PLAIN: dict[str, tuple[Callable[[random.Random, Scene], Question | None], dict[str, Any], tuple[str, ...]]] = {
    "color": (queries.ask_color, COLOR, ("color",)),
    "kind": (queries.ask_kind, SHAPE, ("shape", "kind")),
    "size": (queries.ask_size, SIZE, ("size",)),
    "count": (queries.ask_count, INTEGER, ("count", "number")),
    "presence": (queries.ask_presence, {"type": "boolean"}, ("present", "found")),
    "text": (queries.ask_written, {"type": "string", "maxLength": MOST_LETTERS}, ("text", "word")),
    "where": (queries.ask_where, PLACE, ("position", "place")),
}


def _ask_value(rng: random.Random, scene: Scene) -> Question | None:
    """A plain question whose answer is to be one value, alone or under a key. What is not there is null."""
    category = rng.choice(tuple(PLAIN))
    asker, schema, keys = PLAIN[category]
    question = asker(rng, scene)
    if question is None or question.category != category:
        return None
    value = plain_value(question)
    if value is None and not question.answer.startswith(("There is no", "no text", "none")):
        return None
    key = rng.choice((*keys, *keys, "answer", "result"))
    draw = rng.random()
    text = question.text.rstrip("?.") + "? Answer as JSON"
    if draw < 0.2 and isinstance(value, str):
        return _json(question.text, (value, schema), keys_given=True)
    nullable = schema if category in ("count", "presence") else {"anyOf": [schema, {"type": "null"}]}
    if draw < 0.45:
        return _json(question.text, _object({key: (value, nullable)}), keys_given=True)
    if draw < 0.7:
        return _json(text + _stop(rng), _object({"answer": (value, nullable)}))
    return _json(text + rng.choice((" with ", " with the key ")) + key + _stop(rng), _object({key: (value, nullable)}))


def plain_value(question: Question) -> Any:
    """The answer as a JSON value; None when it is absent or more than one value."""
    category, answer = question.category, question.answer
    if category == "count":
        return int(answer)
    if category == "presence":
        return answer == "yes"
    if category == "text":
        return None if answer == "no text" else answer
    if category == "where":
        return answer.split(" the ")[1] if answer in POSITIONS.values() else None
    return answer if answer in (*COLORS, *KINDS, *SIZES) else None


def _stop(rng: random.Random) -> str:
    return rng.choice((".", ".", ""))


def _json(text: str, answer: Field, keys_given: bool = False) -> Question:
    value, schema = answer
    question = Question("query", "json", text, compact(value), schema=compact(schema))
    return replace(question, keys_given=True) if keys_given else question
