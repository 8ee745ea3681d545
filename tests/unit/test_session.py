from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_backend.config import Settings
from photon_backend.frontend.images import decode_image
from photon_backend.frontend.session import FrontEnd, RawRequest, Response, Session
from photon_backend.model.crops import make_crops
from photon_backend.protocol import Done, Failed, PhotonError, Submit, Tokens, Usage, decode_to_engine, encode
from tests.unit.front_end_parts import CONFIG, IDS, SPECIAL, byte_ids, file_bytes, front_end, fuzz, halves, tokenizer

PICTURE = file_bytes(halves((150, 90)))
USAGE = Usage(30, 17, 5, 1.23456, 2.0, 3.0)
USAGE_KEYS = [
    "request_id",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "queue_ms",
    "preprocess_ms",
    "ttft_ms",
    "decode_ms",
]
COORD, SIZE, ANSWER = IDS.coord_id, IDS.size_id, IDS.answer_id


def open_session(task: str = "query", stream: bool = False, **options: Any) -> Session:
    text = None if task == "caption" else "dog"
    raw = RawRequest(task, text, PICTURE, stream, json.dumps(options))
    return front_end().open(raw, "r1")


def tokens(ids: list[int], values: list[float] | None = None) -> Tokens:
    return Tokens("r1", ids, values or [])


def done(reason: Any = "stop", usage: Usage = USAGE) -> Done:
    return Done("r1", reason, usage)


def run(session: Session, *feeds: list[Any]) -> list[Response]:
    responses = [response for events in feeds for response in session.feed(events)]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert session.finished and session.feed([done()]) == []
    return responses


def usage_of(response: Response) -> dict[str, Any]:
    assert response.usage is not None
    return json.loads(response.usage)


# ---- opening


def test_the_submit_carries_what_was_asked() -> None:
    options = {
        "temperature": 0,
        "top_p": 1,
        "top_k": 3,
        "max_tokens": 9,
        "seed": 4,
        "reasoning": True,
        "max_time_ms": 50,
    }
    session = open_session(**options, spatial_refs=[[0.1, 0.2, 0.3, 0.6]])
    submit = session.submit
    assert msgspec.structs.asdict(submit.sampling) == dict(temperature=0, top_p=1, top_k=3, max_tokens=9, seed=4)
    assert (submit.request_id, submit.task, submit.reasoning, submit.max_time_ms) == ("r1", "query", True, 50)
    assert submit.coords == pytest.approx([0.2, 0.4]) and submit.sizes == [pytest.approx((0.2, 0.4))]
    assert submit.digest is not None and len(submit.digest) == 16
    assert decode_to_engine(encode([submit])) == [submit]
    assert open_session("detect", max_objects=3).submit.max_objects == 3


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {open_session().submit.sampling.seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_max_tokens_is_bounded_by_the_context() -> None:
    assert open_session(max_tokens=10**9).submit.sampling.max_tokens == CONFIG.text.max_context


def test_without_a_picture_there_is_no_digest() -> None:
    session = front_end().open(RawRequest("query", "dog"), "r1")
    assert session.submit.digest is None
    with pytest.raises(PhotonError, match=r"\[INTERNAL\]"):
        session.picture()


def test_the_picture_is_made_as_the_model_wants_it() -> None:
    tiling, pixels = open_session("caption").picture()
    expected, expected_tiling = make_crops(decode_image(PICTURE), CONFIG.vision)
    assert tiling == expected_tiling and tiling[0] * tiling[1] > 1
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, expected)


def test_a_picture_that_fails_ends_the_session_like_any_failure() -> None:
    cut = file_bytes(halves())[:-40]
    session = front_end().open(RawRequest("caption", image=cut), "r1")
    with pytest.raises(PhotonError, match="image is damaged or cut off") as caught:
        session.picture()
    (response,) = run(session, [Failed("r1", caught.value.code, caught.value.message)])
    assert response.error is not None and str(response.error) == str(caught.value)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (RawRequest("describe", "x"), "task"),
        (RawRequest("query", ""), "text_input"),
        (RawRequest("query", "x" * 500), "text_input"),
        (RawRequest("caption"), "image"),
        (RawRequest("caption", image=b"nonsense"), "image"),
        (RawRequest("query", "x", sampling_parameters="{"), "sampling_parameters"),
        (RawRequest("query", "x", parameters={"top_p": 7}), "top_p"),
    ],
)
def test_every_kind_of_wrong_request_is_refused_when_it_is_opened(raw: RawRequest, field: str) -> None:
    with pytest.raises(PhotonError) as caught:
        front_end().open(raw, "r1")
    assert str(caught.value).startswith(f"[INVALID_ARG] {field} ") and str(caught.value).isprintable()


def test_a_directory_that_is_no_checkpoint(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError):
        FrontEnd(Settings(checkpoint=str(tmp_path)))


def test_the_front_end_loads_neither_torch_nor_a_client() -> None:
    code = (
        "import sys, photon_backend.frontend.session\n"
        "print([name for name in ('torch', 'tritonclient', 'photon_backend.engine.engine') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- text


def test_without_streaming_there_is_one_response() -> None:
    ids = tokenizer().encode("the red square")
    (response,) = run(open_session(), [tokens(ids[:1])], [], [tokens(ids[1:])], [done("length")])
    assert response.text == "the red square" and response.finish_reason == "length"
    assert response.objects is None and response.points is None and response.error is None
    usage = usage_of(response)
    assert list(usage) == USAGE_KEYS
    assert usage | {"preprocess_ms": 0} == {
        "request_id": "r1",
        "input_tokens": 30,
        "cached_tokens": 17,
        "output_tokens": 5,
        "queue_ms": 1.235,
        "preprocess_ms": 0,
        "ttft_ms": 2.0,
        "decode_ms": 3.0,
    }


def test_preprocessing_is_accounted() -> None:
    session = open_session()
    session.picture()
    (response,) = run(session, [done()])
    assert usage_of(response)["preprocess_ms"] > 0


def test_streaming_gives_one_delta_a_feed_and_the_last_one_is_final() -> None:
    ids = tokenizer().encode("the red square is left")
    feeds = [[tokens(ids[:1]), tokens(ids[1:2])], [tokens([SPECIAL.index("<8>")])], [tokens(ids[2:]), done()]]
    first, last = run(open_session(stream=True), *feeds)
    assert (first.text, first.finish_reason, first.usage) == ("the red", None, None)
    assert (last.text, last.finish_reason) == (" square is left", "stop") and usage_of(last)["output_tokens"] == 5


def test_an_end_without_news_still_has_a_final_response() -> None:
    _, last = run(open_session(stream=True), [tokens(tokenizer().encode("dog"))], [done("cancelled")])
    assert (last.text, last.finish_reason) == ("", "cancelled")


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_an_early_end_gives_what_there_is(reason: str) -> None:
    (response,) = run(open_session(), [tokens(byte_ids("dog€".encode())[:-1])], [done(reason)])
    assert (response.text, response.finish_reason) == ("dog\ufffd", reason)


def test_a_failure_is_the_only_thing_said() -> None:
    events = [tokens(tokenizer().encode("dog")), Failed("r1", "UNAVAILABLE", "the engine is gone")]
    (response,) = run(open_session(stream=True), events)
    assert str(response.error) == "[UNAVAILABLE] the engine is gone"
    assert (response.text, response.usage, response.finish_reason) == (None, None, None)


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in itertools.pairwise(borders)]


@fuzz
@given(
    st.text(st.sampled_from("ab é€😀日e\u0301"), max_size=20),
    st.lists(st.text("ab €", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)
def test_streamed_text_joined_is_the_whole_text_however_events_are_grouped(
    text: str, stops: list[str], cuts: list[int], by_bytes: bool
) -> None:
    ids = byte_ids(text.encode()) if by_bytes else tokenizer().encode(text)
    feeds = [*([tokens(group)] for group in grouped(ids, cuts)), [done()]]
    streamed = run(open_session(stream=True, stop=stops), *feeds)
    (whole,) = run(open_session(stop=stops), *feeds)
    assert "".join(response.text or "" for response in streamed) == whole.text
    assert all("\ufffd" not in (response.text or "") for response in streamed)
    assert whole.text is not None and not any(stop in whole.text for stop in stops) and text.startswith(whole.text)
    if not any(stop in text for stop in stops):
        assert whole.text == text


# ---- stop strings


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_session_at_once(stream: bool) -> None:
    ids = byte_ids(b"the red square")
    session = open_session(stream=stream, stop=["red s"])
    responses = [*session.feed([tokens(ids[:6])]), *session.feed([tokens(ids[6:])])]
    assert "".join(response.text or "" for response in responses) == "the "
    assert session.cancel_wanted and session.finished and responses[-1].final
    assert responses[-1].finish_reason == "stop"
    usage = usage_of(responses[-1])
    assert usage["output_tokens"] == len("the red s")  # one id a byte
    assert usage["input_tokens"] == CONFIG.prefix_len + len(session.submit.prompt_ids)
    assert session.feed([tokens(ids), done("cancelled")]) == []


def test_a_stop_string_wins_over_an_end_in_the_same_feed() -> None:
    session = open_session(stop=["dog"])
    (response,) = run(session, [tokens(tokenizer().encode("a dog")), done("length")])
    assert (response.text, response.finish_reason, session.cancel_wanted) == ("a ", "stop", True)


def test_the_beginning_of_a_stop_string_waits_and_is_given_at_the_end() -> None:
    session = open_session(stream=True, stop=["STOP"])
    responses = run(session, [tokens(byte_ids(b"go ST"))], [tokens(byte_ids(b"O"))], [done()])
    assert [response.text for response in responses] == ["go ", "STO"] and not session.cancel_wanted


def test_cached_tokens_at_a_stop_string_tell_whether_the_picture_was_needed() -> None:
    for asked, cached in ((False, CONFIG.prefix_len), (True, 0)):
        session = open_session(stop=["dog"])
        if asked:
            session.picture()
        (response,) = run(session, [tokens(tokenizer().encode("dog"))])
        assert usage_of(response)["cached_tokens"] == cached


# ---- reasoning


def test_reasoning_goes_to_the_usage_and_the_rest_is_the_answer() -> None:
    ground, end = IDS.start_ground_points_id, IDS.end_ground_id
    encode_text = tokenizer().encode
    ids = [
        *encode_text("I see "),
        ground,
        *encode_text("two"),
        *[COORD] * 5,
        end,
        *encode_text(" and "),
        ground,
        end,
        ANSWER,
    ]
    answer = [*encode_text("the answer"), COORD, ANSWER]  # after the end of reasoning these are ids like any other
    values = [0.1, 0.2, 0.3, 0.4, 0.9]
    expected = {
        "text": "I see two and ",
        "grounding": [{"start_idx": 6, "end_idx": 9, "points": [[0.1, 0.2], [0.3, 0.4]]}],
    }
    for stream in (False, True):
        for size in (1, 3, 100):
            session, events, left = open_session(stream=stream, reasoning=True, stop=["I see"]), [], list(values)
            for start in range(0, len(ids + answer), size):
                part = (ids + answer)[start : start + size]
                count = max(0, min(part.count(COORD), len(left)))
                events.append([tokens(part, left[:count])])
                left = left[count:]
            responses = run(session, *events, [done()])
            assert "".join(response.text or "" for response in responses) == "the answer"
            usage = usage_of(responses[-1])
            assert usage["reasoning"] == expected and list(usage) == [*USAGE_KEYS, "reasoning"]


def test_reasoning_that_is_cut_off_is_given_too() -> None:
    (response,) = run(open_session(reasoning=True), [tokens(tokenizer().encode("I see"))], [done("deadline")])
    assert response.text == "" and usage_of(response)["reasoning"] == {"text": "I see", "grounding": []}


def test_without_reasoning_the_answer_id_is_nothing_special() -> None:
    ids = tokenizer().encode("dog")
    (response,) = run(open_session(), [tokens([ANSWER, *ids])], [done()])
    assert response.text == "dog" and "reasoning" not in usage_of(response)


# ---- detect and point

BOXES = [0.5, 0.5, 0.2, 0.4, 0.1, 0.9, 0.5, 0.5]  # x, y, width, height of two
CORNERS = [[0.4, 0.3, 0.6, 0.7], [0.0, 0.65, 0.35, 1.0]]  # the second one is cut at the border
POINTS = [0.1, 0.2, 0.7, 0.25]


def test_boxes_become_corners_in_the_picture() -> None:
    (response,) = run(open_session("detect"), [tokens([COORD, COORD, SIZE] * 2, BOXES)], [done()])
    assert response.objects is not None and response.objects.dtype == np.float32 and response.points is None
    np.testing.assert_allclose(response.objects, CORNERS, atol=1e-6)
    document = json.loads(response.text or "")
    assert list(document) == ["objects"] and list(document["objects"][0]) == ["x_min", "y_min", "x_max", "y_max"]
    as_rows = np.asarray([list(found.values()) for found in document["objects"]], dtype=np.float32)
    assert np.array_equal(as_rows, response.objects)


def test_points() -> None:
    (response,) = run(open_session("point"), [tokens([COORD] * 4, POINTS)], [done()])
    assert response.points is not None and response.points.tolist() == np.float32(POINTS).reshape(2, 2).tolist()
    assert response.text == '{"points":[{"x":0.1,"y":0.2},{"x":0.7,"y":0.25}]}' and response.objects is None


@pytest.mark.parametrize(("task", "key", "width"), [("detect", "objects", 4), ("point", "points", 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_found_is_an_empty_list(task: str, key: str, width: int, stream: bool) -> None:
    (response,) = run(open_session(task, stream), [done()])
    assert getattr(response, key).shape == (0, width) and getattr(response, key).dtype == np.float32
    assert response.text == ("" if stream else f'{{"{key}":[]}}') and response.finish_reason == "stop"


@pytest.mark.parametrize(("task", "key", "width"), [("detect", "objects", 4), ("point", "points", 2)])
def test_streamed_objects_come_as_soon_as_they_are_complete(task: str, key: str, width: int) -> None:
    values = BOXES if task == "detect" else POINTS
    per_object = [[COORD], [COORD], [SIZE]] if task == "detect" else [[COORD], [COORD]]
    session, left, responses = open_session(task, stream=True), list(values), []
    for ids in per_object * 2:
        count = 2 if ids == [SIZE] else 1
        new = session.feed([tokens(ids, left[:count])])
        left = left[count:]
        complete = (len(values) - len(left)) % width == 0
        assert len(new) == complete and all(getattr(response, key).shape == (1, width) for response in new)
        responses += new
    responses += session.feed([done()])
    (whole,) = run(open_session(task), [tokens([], values), done()])
    assert np.array_equal(np.concatenate([getattr(response, key) for response in responses]), getattr(whole, key))
    lines = "".join(response.text or "" for response in responses).splitlines()
    assert {key: [json.loads(line) for line in lines]} == json.loads(whole.text or "")


def test_objects_of_one_feed_come_together_and_an_incomplete_one_is_dropped() -> None:
    session = open_session("detect", stream=True)
    (response,) = run(session, [tokens([COORD, COORD, SIZE] * 2 + [COORD], [*BOXES, 0.5]), done("cancelled")])
    assert response.objects is not None and response.objects.shape == (2, 4) and response.finish_reason == "cancelled"
    assert response.text is not None and response.text.count("\n") == 2


def test_the_submit_type_is_what_the_engine_reads() -> None:
    assert isinstance(open_session("point").submit, Submit)
