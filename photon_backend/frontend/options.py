"""What a client sends, checked: `RawRequest` in, `Request` out, or a PhotonError INVALID_ARG that names the field.

Options come from two places, which may be mixed: the JSON object in `sampling_parameters`, and request parameters
(scalars, and strings that spell a number or a boolean). An option given in both must have the same value in both.
A null in the JSON object is the same as leaving the option out.

Which task takes which option:

    every task       max_time_ms; temperature, top_p, top_k, max_tokens and seed too, so that one set of options can
                     serve all tasks, but detect and point are always greedy and bounded by max_objects: no effect there
    query, caption   stop; one of json_schema, regex, choice, grammar
    query            reasoning, spatial_refs
    caption          length
    detect, point    max_objects

An option of another task is refused, unless its value asks for nothing (`reasoning: false`, `stop: []`). Whether a
grammar can be kept is not looked at here, see grammar/check.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from photon_backend.protocol import TASKS, GrammarSpec, PhotonError, Sampling, Task

Length = Literal["short", "normal", "long"]
Scalar = str | int | float | bool

MAX_JSON_CHARS = 1 << 20  # of sampling_parameters
MAX_MEMBERS = 64  # of the object in it: each costs the front end's only thread some time, even one that is repeated
MAX_SPATIAL_REFS = 64
GREEDY_BELOW = 1e-3  # a lower temperature means greedy: dividing logits by it would only overflow


class RawRequest(msgspec.Struct):
    """The inputs of one request as they came, decoded from tensors but not checked."""

    task: str | None = None
    text_input: str | None = None
    image: bytes | None = None
    stream: bool = False
    sampling_parameters: str | None = None
    parameters: dict[str, Scalar] = {}
    name: str = ""  # the client's own id of the request; empty: it gave none


class Request(msgspec.Struct, frozen=True):
    task: Task
    text: str  # the question, or the object to find; empty for caption
    image: bytes | None  # as it came: file bytes, base64 or data URL
    stream: bool
    sampling: Sampling
    stop: list[str] = []
    max_objects: int = 50
    length: Length = "normal"
    reasoning: bool = False
    spatial_refs: list[list[float]] = []  # [x, y] or [x_min, y_min, x_max, y_max], 0..1
    max_time_ms: float = 0.0  # 0: no deadline
    grammar: GrammarSpec | None = None


class _Option(msgspec.Struct, frozen=True):
    type: Any
    expected: str  # completes "NAME must be ..."
    tasks: tuple[Task, ...] = TASKS


_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_GrammarText = Annotated[str, Meta(min_length=1)]
_TEXT_TASKS: tuple[Task, ...] = ("query", "caption")
_OPTIONS: dict[str, _Option] = {
    "temperature": _Option(Annotated[float, Meta(ge=0, le=2)], "a number from 0 (greedy) to 2"),
    "top_p": _Option(Annotated[float, Meta(gt=0, le=1)], "a number above 0, at most 1"),
    "top_k": _Option(Annotated[int, Meta(ge=0, lt=2**31)], "an integer, 0 (off) or more"),
    "max_tokens": _Option(Annotated[int, Meta(ge=1, lt=2**31)], "an integer, 1 or more"),
    "seed": _Option(Annotated[int, Meta(ge=0, le=2**63 - 1)], "an integer from 0 to 2**63 - 1"),
    "stop": _Option(
        _StopString | Annotated[list[_StopString], Meta(max_length=8)],
        "a string or a list of at most 8 strings, each of 1 to 256 characters",
        _TEXT_TASKS,
    ),
    "max_objects": _Option(Annotated[int, Meta(ge=1, le=1000)], "an integer from 1 to 1000", ("detect", "point")),
    "length": _Option(Length, "one of short, normal, long", ("caption",)),
    "reasoning": _Option(bool, "true or false", ("query",)),
    "spatial_refs": _Option(
        Annotated[list[list[float]], Meta(max_length=MAX_SPATIAL_REFS)],
        f"a list of at most {MAX_SPATIAL_REFS} points [x, y] or boxes [x_min, y_min, x_max, y_max], "
        "with values from 0 to 1 and min below max",
        ("query",),
    ),
    "max_time_ms": _Option(
        Annotated[float, Meta(gt=0, le=86_400_000)], "milliseconds, a number above 0, at most a day"
    ),
    "json_schema": _Option(dict[str, Any] | bool | str, "a JSON schema, as an object or as JSON text", _TEXT_TASKS),
    "regex": _Option(_GrammarText, "a regular expression", _TEXT_TASKS),
    "choice": _Option(list[str] | str, "a list of strings, or its JSON text", _TEXT_TASKS),
    "grammar": _Option(_GrammarText, "a grammar in llguidance's Lark dialect", _TEXT_TASKS),
}
_GRAMMARS = ("json_schema", "regex", "choice", "grammar")
_SAMPLING = tuple(field.name for field in msgspec.structs.fields(Sampling))


def parse_request(raw: RawRequest, default_seed: int) -> Request:
    """Checks everything but the picture's bytes and the length of the prompt. Raises PhotonError INVALID_ARG."""
    task = _task(raw.task)
    options = _options(raw)
    for name, value in options.items():
        tasks = _OPTIONS[name].tasks
        if (value or name in _GRAMMARS) and task not in tasks:
            raise invalid(f"{name} does not apply to task {task}, only to {' and '.join(tasks)}")
    if raw.image is None and task != "query":
        raise invalid(f"image is required for task {task}")
    if raw.image is None and options.get("spatial_refs"):
        raise invalid("spatial_refs needs an image to refer to")
    sampling = {"seed": default_seed, **{name: options.pop(name) for name in _SAMPLING if name in options}}
    if sampling.get("temperature", 1.0) < GREEDY_BELOW:
        sampling["temperature"] = 0.0
    grammar = _grammar(options)
    return Request(
        task=task,
        text=_text(raw.text_input, task),
        image=raw.image,
        stream=raw.stream,
        sampling=Sampling(**sampling),
        grammar=grammar,
        **options,
    )


def _grammar(options: dict[str, Any]) -> GrammarSpec | None:
    """Takes the grammar out of the options."""
    given = [name for name in _GRAMMARS if name in options]
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)} cannot be combined; give one of them")
    if not given:
        return None
    (name,) = given
    value = options.pop(name)
    if name == "grammar":
        return GrammarSpec("lark", value)
    text = value if name == "regex" else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return GrammarSpec(name, text)  # type: ignore[arg-type]


def invalid(message: str) -> PhotonError:
    return PhotonError("INVALID_ARG", message)


def short_repr(value: object, limit: int = 60) -> str:
    """A value for an error message: printable, valid UTF-8 and short."""
    text = ascii(value) if isinstance(value, str | bytes) else repr(value).encode("ascii", "replace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _task(task: str | None) -> Task:
    if task is None:
        return "query"
    if task not in TASKS:
        raise invalid(f"task must be one of {', '.join(TASKS)}, got {short_repr(task)}")
    return task


def _text(text: str | None, task: Task) -> str:
    blank = text is None or not text.strip()
    if task == "caption":
        if not blank:
            raise invalid("text_input is not used by task caption; leave it out, or ask a question with task query")
        return ""
    if text is None or blank:
        wanted = "the question" if task == "query" else "the object to find"
        raise invalid(f"text_input is required for task {task}: {wanted}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid("text_input must be valid Unicode text, got a lone surrogate") from None
    return text


def _options(raw: RawRequest) -> dict[str, Any]:
    """Converted options of both sources by name; options left out, or null, are not in it."""
    options: dict[str, Any] = {}
    for name, value in [*_json_options(raw.sampling_parameters), *raw.parameters.items()]:
        if value is None and name in _OPTIONS:
            continue
        converted = _convert(name, value)
        if name in options and options[name] != converted:
            raise invalid(f"{name} is given twice, as {short_repr(options[name])} and as {short_repr(converted)}")
        options[name] = converted
    return options


def _json_options(text: str | None) -> Iterable[tuple[str, Any]]:
    """The members of the object in order, repeated names included."""
    if text is None or not text.strip():
        return []
    wanted = "sampling_parameters must be one JSON object"
    if len(text) > MAX_JSON_CHARS:
        raise invalid(f"{wanted} of at most {MAX_JSON_CHARS} characters, got {len(text)}")
    try:
        # _Members tells an object from an array; msgspec and a plain dict would hide a repeated name
        members = json.loads(text, object_pairs_hook=_Members)
    except (ValueError, RecursionError):
        raise invalid(f"{wanted}, got {short_repr(text)}") from None
    if not isinstance(members, _Members):
        raise invalid(f"{wanted}, got {short_repr(text)}")
    if len(members) > MAX_MEMBERS:
        raise invalid(f"{wanted} of at most {MAX_MEMBERS} members, got {len(members)}")
    return [(name, _plain(value)) for name, value in members]


class _Members(list[tuple[str, Any]]):
    pass


def _plain(value: Any) -> Any:
    """The value with dictionaries for objects; the parser's own limit bounds the recursion."""
    if isinstance(value, _Members):
        return {name: _plain(inner) for name, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _convert(name: str, value: Any) -> Any:
    option = _OPTIONS.get(name)
    if option is None:
        close = difflib.get_close_matches(name[:100], _OPTIONS, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_OPTIONS)}"
        raise invalid(f"{short_repr(name)} is not an option; {hint}")
    try:
        converted = msgspec.convert(value, option.type, strict=False)
    except (msgspec.ValidationError, RecursionError):
        converted = None
    if name == "stop" and isinstance(converted, str):
        converted = [converted]
    if name in ("json_schema", "choice") and isinstance(converted, str):
        converted = _json_value(converted, dict | bool if name == "json_schema" else list)
    if converted is None or not _is_sound(name, converted):
        raise invalid(f"{name} must be {option.expected}, got {short_repr(value)}")
    return converted


def _json_value(text: str, types: Any) -> Any:
    """None when it is not the JSON text of such a value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, types) else None


def _is_sound(name: str, value: Any) -> bool:
    """What a type cannot say. A grammar goes to a parser that takes valid Unicode only."""
    if name == "spatial_refs":
        return all(map(_is_spatial_ref, value))
    if name in _GRAMMARS:
        if name == "choice" and not all(isinstance(choice, str) for choice in value):
            return False
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)).encode()
        except (ValueError, RecursionError):  # a lone surrogate, a number that JSON has not
            return False
    return True


def _is_spatial_ref(ref: list[float]) -> bool:
    if len(ref) not in (2, 4) or not all(0.0 <= value <= 1.0 for value in ref):
        return False
    return len(ref) == 2 or (ref[0] < ref[2] and ref[1] < ref[3])
