from __future__ import annotations

from typing import Any

import msgspec
import pytest

from photon_backend.frontend.options import Request
from photon_backend.frontend.prompts import Prompt, build_prompt
from photon_backend.model.config import CaptionTemplate, Templates
from photon_backend.protocol import TASKS, PhotonError, Sampling
from tests.unit.front_end_parts import CONFIG, IDS, SPECIAL, tokenizer

IMAGE = b"not looked at here"


def build(task: Any, text: str = "", image: bytes | None = IMAGE, config: Any = CONFIG, **fields: Any) -> Prompt:
    return build_prompt(Request(task, text, image, False, Sampling(), **fields), config, tokenizer())


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text)


@pytest.mark.parametrize(("length", "ids"), [("short", [1, 20, 3]), ("normal", [1, 21, 3]), ("long", [1, 22, 3])])
def test_caption(length: Any, ids: list[int]) -> None:
    assert build("caption", length=length) == Prompt(ids, [], [])


def test_query_repeats_its_suffix() -> None:
    assert build("query", "what?").ids == [1, 30, 2, *encoded("what?"), 3, 3]


def test_query_without_a_picture_starts_at_bos() -> None:
    assert build("query", "what?", image=None).ids == [IDS.bos_id, 1, 30, 2, *encoded("what?"), 3, 3]


def test_reasoning_opens_with_the_thinking_id() -> None:
    assert build("query", "what?", reasoning=True).ids == [1, 30, 2, *encoded("what?"), 3, IDS.thinking_id]


def test_the_text_is_not_changed() -> None:
    assert build("query", " what?\n").ids == [1, 30, 2, *encoded(" what?\n"), 3, 3]


@pytest.mark.parametrize(("task", "prefix"), [("detect", [1, 31, 2]), ("point", [1, 32, 2])])
def test_spatial_tasks_put_a_blank_before_the_object(task: str, prefix: list[int]) -> None:
    assert build(task, "red circle").ids == [*prefix, *encoded(" red circle"), 3]


def test_spatial_references_stand_before_the_question() -> None:
    prompt = build("query", "what?", spatial_refs=[[0.25, 0.75], [0.25, 0.5, 0.5, 1.0], [1.0, 0.0]])
    coord, size = IDS.coord_id, IDS.size_id
    refs = [coord, coord, coord, coord, size, coord, coord]
    assert prompt.ids == [1, 30, 2, *refs, *encoded("what?"), 3, 3]
    assert prompt.coords == [0.25, 0.75, 0.375, 0.75, 1.0, 0.0]
    assert prompt.sizes == [(0.25, 0.5)]


@pytest.mark.parametrize("task", ["query", "detect", "point"])
def test_a_text_cannot_spell_a_control_id(task: str) -> None:
    text = "".join(SPECIAL)
    inner = build(task, text).ids[3 : -2 if task == "query" else -1]
    assert not set(inner) & set(range(len(SPECIAL))) and text in tokenizer().decode(inner)


def test_a_length_without_a_template_is_refused() -> None:
    """Moondream 2's own config has no long caption."""
    caption = CaptionTemplate(short=[1, 20, 3], normal=[1, 21, 3])
    known = msgspec.structs.replace(IDS, templates=Templates(caption=caption))
    config = msgspec.structs.replace(CONFIG, tokenizer=known)
    assert build("caption", length="short", config=config).ids == [1, 20, 3]
    with pytest.raises(PhotonError, match="length long is not known"):
        build("caption", length="long", config=config)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_without_a_template_is_refused(task: str) -> None:
    templates = msgspec.structs.replace(IDS.templates, **{task: None})
    assert isinstance(templates, Templates)
    config = msgspec.structs.replace(CONFIG, tokenizer=msgspec.structs.replace(IDS, templates=templates))
    with pytest.raises(PhotonError, match=rf"^\[INVALID_ARG\] task {task} is not known to this model$"):
        build(task, "x", config=config)


@pytest.mark.parametrize(
    ("image", "room", "where"), [(IMAGE, 128 - 17 - 1, "room beside the image"), (None, 127, "room")]
)
def test_the_longest_prompt_and_one_token_more(image: bytes | None, room: int, where: str) -> None:
    text = "z" * room  # one id each: the corpus has no such letter twice
    while len(build("query", text[:10], image).ids) + len(text) - 10 > room:
        text = text[1:]
    assert len(build("query", text, image).ids) == room
    with pytest.raises(PhotonError) as caught:
        build("query", text + "z", image)
    assert caught.value.code == "INVALID_ARG"
    assert (
        caught.value.message
        == f"text_input is too long: the prompt takes {room + 1} tokens, there is {where} for {room}"
    )


def test_a_huge_text_is_refused_before_it_is_encoded() -> None:
    with pytest.raises(PhotonError, match="text_input has 10000000 characters; at most 8192 are accepted"):
        build("query", "a" * 10_000_000)
