"""Questions answered in JSON: what the model is taught is what its constraint allows, and true of the scene."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from photon_backend import demo
from photon_backend.config import TINY_CHECKPOINT, Settings
from photon_backend.frontend.session import RawRequest
from photon_backend.grammar.automaton import compile_automaton
from photon_backend.grammar.constraint import TokenAutomaton
from photon_backend.grammar.spelling import read_spelling
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.protocol import GrammarSpec
from photon_backend.tiny.constrained import Service, Tally, evaluate_constrained, leaves
from photon_backend.tiny.evaluate import UNSEEN
from photon_backend.tiny.json_queries import ask_json
from photon_backend.tiny.pictures import DIRECTORY, LAYOUTS
from photon_backend.tiny.question import Question
from photon_backend.tiny.scenes import Scene, make_scene
from photon_backend.tiny.spelling import NONE, Encoder
from photon_backend.tiny.vocabulary import CONFIG
from photon_backend.tiny.words import colors_of, kinds_of

MAX_WORDS = 8 << 20


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TINY_CHECKPOINT / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(tokenizer: TextTokenizer) -> Encoder:
    return Encoder(CONFIG, tokenizer)


@pytest.fixture(scope="module")
def asked() -> list[tuple[Scene, Question]]:
    pairs = []
    for seed in range(7000, 7060):
        scene, rng = make_scene(seed), random.Random(seed)
        questions = (ask_json(rng, scene) for _ in range(4))
        pairs += [(scene, question) for question in questions if question is not None]
    assert len(pairs) > 150
    return pairs


def test_answers_are_what_the_schema_allows(encoder: Encoder, asked: list[tuple[Scene, Question]]) -> None:
    """Token by token, by the device automaton of the schema; at the end eos is legal."""
    spelling = read_spelling(Path(TINY_CHECKPOINT), CONFIG)
    assert spelling is not None
    automata: dict[str, TokenAutomaton] = {}
    for _, question in asked[:80]:
        if question.schema not in automata:
            automata[question.schema] = compile_automaton(
                GrammarSpec("json_schema", question.schema), spelling, MAX_WORDS
            )
        automaton, state = automata[question.schema], 0
        ids = encoder.example(question, random.Random(0)).ids[len(encoder.prompt(question).ids) :]
        assert ids == list(encoder.text(question.answer)), "pieces and whole are spelled alike"
        for token in (*ids, CONFIG.tokenizer.eos_id):
            assert automaton.masks[state][token // 32] >> (token % 32) & 1, (question, token)
            state = int(automaton.next_state[state][automaton.classes[token]])


def test_only_what_no_grammar_gives_is_a_target(
    encoder: Encoder, tokenizer: TextTokenizer, asked: list[tuple[Scene, Question]]
) -> None:
    given = [question for _, question in asked if question.keys_given]
    assert any(question.answer.startswith('"') for question in given)
    for question in given:
        spelling, start = encoder.example(question, random.Random(0)), len(encoder.prompt(question).ids)
        wanted = spelling.tokens[start - 1 :]  # the target at a place is the id that comes next
        ids = [*spelling.ids[start:], CONFIG.tokenizer.eos_id]
        said = tokenizer.decode([token for token in wanted[:-1] if token != NONE])
        assert all(target in (NONE, token) for target, token in zip(wanted, ids, strict=True))
        assert wanted[0] == NONE or question.answer[0].isdigit()
        if question.answer.startswith('"'):
            assert said == question.answer[1:]
            continue
        without_keys = re.sub(r'"[a-z]+":', '"":', question.answer)
        assert said == without_keys.removeprefix('{"'), question
    plain = [question for _, question in asked if not question.keys_given]
    for question in plain:
        spelling, start = encoder.example(question, random.Random(0)), len(encoder.prompt(question).ids)
        assert spelling.tokens[start - 1 :] == [*spelling.ids[start:], CONFIG.tokenizer.eos_id]


def test_values_are_true_of_the_scene(asked: list[tuple[Scene, Question]]) -> None:
    checked = Counter[str]()
    for scene, question in asked:
        value = json.loads(question.answer)
        if not isinstance(value, dict):
            continue
        truth: dict[str, Any] = {
            "background": scene.tone,
            "colors": colors_of(scene.items),
            "shapes": kinds_of(scene.items),
            "objects": [{"color": item.color, "shape": item.kind} for item in scene.items],
        }
        if not {"background", "colors", "shapes", "objects"} & set(value):
            continue
        truth |= dict.fromkeys(("count", "number", "total"), len(scene.items))
        truth |= dict.fromkeys(("text", "word"), scene.printed.text if scene.printed else None)
        assert value == {key: truth[key] for key in value}, question
        checked.update(list(value))
    assert min(checked[key] for key in ("background", "colors", "shapes", "objects", "count", "text")) > 3


def test_leaves_and_their_count() -> None:
    assert dict(leaves({"a": 1, "b": ["x", None]})) == {("a",): 1, ("b", "length"): 2, ("b", 0): "x", ("b", 1): None}
    tally = Tally()
    tally.add({"a": 1, "b": ["x"]}, {"a": 1, "b": ["x", "y"]})
    tally.add({"a": True}, {"a": False})
    assert (tally.asked, tally.right, tally.values, tally.values_right) == (2, 0, 5, 2)


def test_constrained_answers_about_an_unseen_scene() -> None:
    """Far below the real figures (docs/tiny.md), to tell a broken model from a good one. Every JSON answer is whole."""
    tallies = evaluate_constrained(Settings(threads=1), range(UNSEEN + 2, UNSEEN + 3))
    assert sum(tally.broken for tally in tallies.values()) == 0
    plain = [tallies[category] for category in ("choice of colors", "count as integer")]
    asked = sum(tally.asked for tally in plain)
    assert asked >= 2 and sum(tally.right for tally in plain) >= 0.7 * asked
    taught = [tally for category, tally in tallies.items() if category.startswith("json")]
    values = sum(tally.values for tally in taught)
    assert tallies["json"].asked > 1 and values > 10
    assert sum(tally.values_right for tally in taught) >= 0.7 * values


def test_the_demo_describes_every_bundled_picture_in_json() -> None:
    pictures = sorted(DIRECTORY.glob("*.png"))
    options = json.dumps(demo.OPTIONS | {"json_schema": demo.SCHEMA})
    requests = [
        RawRequest(text_input=demo.DESCRIBE, image=path.read_bytes(), sampling_parameters=options) for path in pictures
    ]
    with Service(Settings(threads=1)) as service:
        answers = service.ask(requests)
    assert answers == [demo.read_truth(path).description for path in pictures]
    assert len({*answers}) == len(LAYOUTS)


def test_the_examples_of_the_grammar_page_print_what_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "grammar.md").read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith("    ask ")]
    requests, expected = [], []
    for line in lines:
        _, picture, _, question, _, option = shlex.split(line, comments=True)
        name, _, value = option.partition("=")
        options = {"temperature": 0, name: value if name == "regex" else json.loads(value)}
        image = (DIRECTORY / f"{picture}.png").read_bytes()
        requests.append(RawRequest(text_input=question, image=image, sampling_parameters=json.dumps(options)))
        expected.append(line.rpartition("# ")[2])
    with Service(Settings(threads=1)) as service:
        assert service.ask(requests) == expected
    assert len(lines) >= 14
