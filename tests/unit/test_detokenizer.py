from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_backend.frontend.detokenizer import Detokenizer, StopFilter
from tests.unit.front_end_parts import CONFIG, SPECIAL, byte_ids, fuzz, tokenizer

any_ids = st.lists(st.integers(0, CONFIG.text.vocab_size + 20), max_size=60)  # special and unknown ids too
texts = st.text(st.sampled_from("ab é€😀👩‍👧🇩🇪日本e\u0301\u0323\n\ufffd"), max_size=40)


def deltas(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer())
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@fuzz
@given(any_ids)
def test_joined_deltas_equal_the_whole_decode_for_any_ids(ids: list[int]) -> None:
    assert "".join(deltas(ids)) == tokenizer().decode(ids)


@fuzz
@given(st.binary(max_size=60))
def test_joined_deltas_equal_the_whole_decode_for_any_bytes(data: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(deltas(ids)) == tokenizer().decode(ids) == data.decode("utf-8", "replace")


@fuzz
@given(texts)
def test_text_comes_in_whole_characters(text: str) -> None:
    for ids in (tokenizer().encode(text), byte_ids(text.encode())):
        parts = deltas(ids)
        assert "".join(parts) == text
        assert "".join(parts).count("\ufffd") == text.count("\ufffd")  # none for a character that is only unfinished


def test_an_unfinished_character_waits_and_the_flush_gives_what_the_whole_decode_gives() -> None:
    ids = byte_ids("a😀".encode())[:-1]
    assert deltas(ids) == ["a", "", "", "", "\ufffd"]
    assert tokenizer().decode(ids) == "a\ufffd"


def test_special_ids_say_nothing_and_do_not_break_a_character() -> None:
    ids = byte_ids("€".encode())
    special = SPECIAL.index("<coord>")
    assert deltas([ids[0], special, ids[1], special, ids[2], special]) == ["", "", "", "", "€", "", ""]


@pytest.mark.parametrize("pattern", [b"\x82\xac\xe2", b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xff\xc3"])
def test_a_long_run_without_a_border_keeps_a_small_window(pattern: bytes) -> None:
    data = b"\xe2" + pattern * 100
    detokenizer, text = Detokenizer(tokenizer()), ""
    for token_id in byte_ids(data):
        text += detokenizer.feed(token_id)
        assert len(detokenizer._window) <= 17
    assert text + detokenizer.flush() == data.decode("utf-8", "replace")


def split(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def filtered(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stop_filter, out = StopFilter(stops), []
    for piece in pieces:
        text, found = stop_filter.feed(piece)
        out.append(text)
        if found:
            return out, True
    return [*out, stop_filter.flush()], False


def cut_one_by_one(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@fuzz
@given(
    st.text("ab😀", max_size=30),
    st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_filter_equals_looking_at_every_character(text: str, stops: list[str], cuts: list[int]) -> None:
    out, found = filtered(split(text, cuts), stops)
    assert ("".join(out), found) == cut_one_by_one(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "out"),
    [
        (["hello wor", "ld!"], ["world"], ["hello ", ""]),
        (["aab", "c"], ["abc"], ["a", ""]),
        (["one STO", "RM"], ["STOP"], ["one ", "STORM", ""]),
        (["end ST"], ["STOP"], ["end ", "ST"]),  # held back, given at the end
        (["xabcx"], ["abcx", "bc"], ["xa"]),  # the one that ends first
        (["xabc"], ["bc", "abc"], ["x"]),  # the longest of those that end together
        (["plain", " text"], [], ["plain", " text", ""]),
    ],
)
def test_stop_filter_examples(pieces: list[str], stops: list[str], out: list[str]) -> None:
    assert filtered(pieces, stops)[0] == out
