from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_backend.frontend.options import MAX_SPATIAL_REFS, RawRequest, Request, parse_request
from photon_backend.protocol import GrammarSpec, PhotonError, Sampling
from tests.unit.front_end_parts import fuzz

IMAGE = b"not looked at here"
EXAMPLES: dict[str, tuple[str, Any]] = {  # option: (a task that takes it, a good value)
    "temperature": ("query", 0.7),
    "top_p": ("query", 0.9),
    "top_k": ("query", 5),
    "max_tokens": ("query", 7),
    "seed": ("query", 2**63 - 1),
    "stop": ("query", ["a", "b"]),
    "max_objects": ("detect", 4),
    "length": ("caption", "short"),
    "reasoning": ("query", True),
    "spatial_refs": ("query", [[0.5, 0.5], [0.1, 0.2, 0.3, 0.4]]),
    "max_time_ms": ("point", 1.5),
}
GRAMMARS: dict[str, tuple[Any, GrammarSpec]] = {
    "json_schema": ({"type": "object", "b": {"a": 1}}, GrammarSpec("json_schema", '{"type":"object","b":{"a":1}}')),
    "regex": ("[0-9]+", GrammarSpec("regex", "[0-9]+")),
    "choice": (["red", "gr\u00fcn"], GrammarSpec("choice", '["red","gr\u00fcn"]')),
    "grammar": ('start: "a"', GrammarSpec("lark", 'start: "a"')),
}
SCALARS = [name for name, (_, value) in EXAMPLES.items() if not isinstance(value, list)]


def parse(task: str | None = "query", options: Any = None, parameters: Any = None, **fields: Any) -> Request:
    raw = RawRequest(
        task=task,
        text_input=fields.pop("text_input", None if task == "caption" else "dog"),
        image=fields.pop("image", IMAGE),
        sampling_parameters=None if options is None else json.dumps(options),
        parameters=parameters or {},
        **fields,
    )
    return parse_request(raw, default_seed=1)


def refusal(*args: Any, **fields: Any) -> str:
    with pytest.raises(PhotonError) as caught:
        parse(*args, **fields)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


def value_of(request: Request, name: str) -> Any:
    return getattr(request.sampling if hasattr(request.sampling, name) else request, name)


def test_defaults() -> None:
    assert parse(None) == Request("query", "dog", IMAGE, False, Sampling(seed=1))
    assert parse("query", image=None).image is None


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_reaches_the_request(name: str) -> None:
    task, value = EXAMPLES[name]
    request = parse(task, {name: value})
    assert value_of(request, name) == value != value_of(parse(task), name)


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_may_be_parameters_and_strings(name: str) -> None:
    task, value = EXAMPLES[name]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    assert parse(task, {name: value}) == parse(task, None, {name: value}) == parse(task, None, {name: text})


def test_one_stop_string_may_stand_alone() -> None:
    assert parse("query", None, {"stop": "END"}).stop == ["END"]


def test_the_same_option_twice_must_agree() -> None:
    assert parse("query", {"seed": 5}, {"seed": "5"}).sampling.seed == 5
    assert "seed is given twice" in refusal("query", {"seed": 5}, {"seed": "6"})
    raw = RawRequest("query", "dog", sampling_parameters='{"top_k": 1, "top_k": 2}')
    with pytest.raises(PhotonError, match="top_k is given twice"):
        parse_request(raw, 1)


def test_null_is_the_same_as_leaving_out() -> None:
    assert parse("query", dict.fromkeys(EXAMPLES)) == parse("query")


def test_a_very_small_temperature_is_greedy() -> None:
    assert parse("query", {"temperature": 1e-9}).sampling.temperature == 0.0


WRONG = [
    ("temperature", [-0.1, 2.1, "hot", True, [], {}, "nan", "inf", 10**400]),
    ("top_p", [0, 1.01, "", False]),
    ("top_k", [-1, 1.5, "1.5", 2**31]),
    ("max_tokens", [0, -1, "many", 2**31]),
    ("seed", [-1, 2**63, 0.5, "x"]),
    ("stop", ["", [""], ["a"] * 9, "x" * 257, 5, [1], {"a": 1}]),
    ("max_objects", [0, 1001, "all"]),
    ("length", ["tiny", 1, ""]),
    ("reasoning", ["yes", 2, []]),
    (
        "spatial_refs",
        [
            [0.5, 0.5],
            [[0.5]],
            [[0.1, 0.2, 0.3]],
            [[0.5, 1.1]],
            [[0.5, 0.5, 0.4, 0.6]],
            [[0.5, 0.5, 0.5, 0.6]],
            "x",
            [["a", 1]],
            [[0.5, 0.5]] * (MAX_SPATIAL_REFS + 1),
        ],
    ),
    ("max_time_ms", [0, -5, "soon", 1e12]),
    ("json_schema", [5, [], "", "{", "[]", "5", {"minimum": float("nan")}, {"const": "\ud800"}]),
    ("regex", ["", 5, [], "\ud800"]),
    ("choice", [5, {}, "a", "{}", [1], [["a"]], ["\ud800"]]),
    ("grammar", ["", {}, "\ud800"]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG for value in values])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    task = EXAMPLES[name][0] if name in EXAMPLES else "query"
    assert refusal(task, {name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        *[("query", name) for name in ("length", "max_objects")],
        *[("caption", name) for name in ("reasoning", "spatial_refs", "max_objects")],
        *[(task, name) for task in ("detect", "point") for name in ("length", "reasoning", "spatial_refs", "stop")],
    ],
)
def test_an_option_of_another_task_is_refused(task: str, name: str) -> None:
    assert refusal(task, {name: EXAMPLES[name][1]}).startswith(f"{name} does not apply to task {task}")


def test_an_option_of_another_task_that_asks_for_nothing_is_accepted() -> None:
    assert parse("detect", {"reasoning": False, "stop": [], "spatial_refs": []}) == parse("detect")


@pytest.mark.parametrize("task", ["detect", "point"])
def test_sampling_options_do_no_harm_to_spatial_tasks(task: str) -> None:
    parse(task, {name: EXAMPLES[name][1] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")})


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_reaches_the_request(name: str) -> None:
    value, spec = GRAMMARS[name]
    text = value if isinstance(value, str) else json.dumps(value)
    assert parse("query", {name: value}).grammar == parse("caption", None, {name: text}).grammar == spec


@pytest.mark.parametrize("task", ["detect", "point"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_of_a_spatial_task_is_refused(task: str, name: str) -> None:
    assert (
        refusal(task, {name: GRAMMARS[name][0]}) == f"{name} does not apply to task {task}, only to query and caption"
    )


def test_two_grammars_are_refused() -> None:
    assert refusal("query", {"regex": "a", "choice": ["a"]}).startswith("regex and choice cannot be combined")


def test_unknown_options_are_named_with_the_closest_known_one() -> None:
    assert refusal("query", {"max_token": 3}) == "'max_token' is not an option; did you mean max_tokens?"
    assert refusal("query", None, {"zzz": 3}).startswith("'zzz' is not an option; known are temperature")


@pytest.mark.parametrize(
    "text", ["[]", "5", "null", "{", "{'a': 1}", '[["seed", 5]]', "[" * 100_000, '{"seed": 1}x', "é"]
)
def test_sampling_parameters_must_be_one_object(text: str) -> None:
    with pytest.raises(PhotonError, match=r"^\[INVALID_ARG\] sampling_parameters must be one JSON object"):
        parse_request(RawRequest("query", "dog", sampling_parameters=text), 1)


def test_sampling_parameters_are_bounded_and_may_be_blank() -> None:
    with pytest.raises(PhotonError, match="at most 1048576 characters"):
        parse_request(RawRequest("query", "dog", sampling_parameters=" " * (1 << 20) + "{}"), 1)
    with pytest.raises(PhotonError, match="at most 64 members, got 1000"):
        parse_request(RawRequest("query", "dog", sampling_parameters="{" + '"seed":1,' * 999 + '"seed":1}'), 1)
    assert parse_request(RawRequest("query", "dog", sampling_parameters=" "), 1).stop == []


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"task": "describe"}, "task must be one of query, caption, detect, point, got 'describe'"),
        ({"task": ""}, "task must be one of"),
        ({"task": "query", "text_input": None}, "text_input is required for task query: the question"),
        ({"task": "query", "text_input": " \n"}, "text_input is required"),
        ({"task": "detect", "text_input": ""}, "text_input is required for task detect: the object to find"),
        ({"task": "point", "text_input": None}, "text_input is required for task point"),
        ({"task": "query", "text_input": "a\ud800"}, "text_input must be valid Unicode"),
        ({"task": "caption", "text_input": "what?"}, "text_input is not used by task caption"),
        ({"task": "caption", "image": None}, "image is required for task caption"),
        ({"task": "detect", "image": None}, "image is required for task detect"),
        ({"task": "point", "image": None}, "image is required for task point"),
        ({"task": "query", "image": None, "options": {"spatial_refs": [[0.5, 0.5]]}}, "spatial_refs needs an image"),
    ],
)
def test_wrong_inputs_are_refused_by_name(fields: dict[str, Any], start: str) -> None:
    assert refusal(**fields).startswith(start)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*EXAMPLES, *GRAMMARS]) | st.text(st.characters(), max_size=12)
scalars = st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)


@fuzz
@given(
    st.sampled_from(["query", "caption", "detect", "point"]),
    st.dictionaries(names, anything, max_size=4).map(json.dumps) | st.text(st.characters(), max_size=40),
    st.dictionaries(names, scalars, max_size=3),
)
def test_any_options_are_accepted_or_refused_with_one_clean_sentence(task: str, options: str, parameters: Any) -> None:
    text = None if task == "caption" else "dog"
    try:
        parse_request(RawRequest(task, text, IMAGE, False, options, parameters), 1)
    except PhotonError as error:
        assert error.code == "INVALID_ARG"
        assert error.message.isprintable() and error.message.isascii() and len(error.message) < 400
