"""Text in and out: any text survives, and no text becomes a control token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from photon_backend.model.tokenizer import TextTokenizer
from tests.model.tiny_checkpoint import CONFIG, TOKENIZER

BY_NO_CLOCK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOKENIZER_UNDER_TEST = TextTokenizer(TOKENIZER)
SPEC = json.loads(TOKENIZER.read_text())
ADDED = {token["content"]: token["id"] for token in SPEC["added_tokens"]}
TEXTS = [
    "",
    " ",
    "a red circle",
    "  two  spaces \n\n and lines\t",
    "Grüße, naïve café — “quoted”",
    "汉字とかな 한국어",
    "😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b\u00a0",
    "\x00\x01\x7f",
    "مرحبا हिन्दी",
]


def test_the_file_has_special_and_ordinary_added_tokens() -> None:
    assert {token["special"] for token in SPEC["added_tokens"]} == {True, False}
    plain = Tokenizer.from_file(str(TOKENIZER)).encode("<|eos|>wow").ids
    assert plain == [ADDED["<|eos|>"], ADDED["wow"]]  # what must not happen to a user's text


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(text: str) -> None:
    assert TOKENIZER_UNDER_TEST.decode(TOKENIZER_UNDER_TEST.encode(text)) == text


@BY_NO_CLOCK
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER_UNDER_TEST.encode(text)
    assert TOKENIZER_UNDER_TEST.decode(ids) == text
    assert not set(ids) & set(ADDED.values())


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("around", ["{}", " {} ", "a{}b", "{}{}", "is {}? yes{}"])
def test_spelling_an_added_token_gives_ordinary_ids(name: str, around: str) -> None:
    text = around.replace("{}", name)
    ids = TOKENIZER_UNDER_TEST.encode(text)
    assert not set(ids) & set(ADDED.values())
    assert TOKENIZER_UNDER_TEST.decode(ids) == text


@BY_NO_CLOCK
@given(st.lists(st.sampled_from([*ADDED, "<|", "|>", "eos", " ", "\n", "w", "ow", "é"]), max_size=8))
def test_no_mixture_of_added_tokens_gets_through(parts: list[str]) -> None:
    text = "".join(parts)
    ids = TOKENIZER_UNDER_TEST.encode(text)
    assert not set(ids) & set(ADDED.values())
    assert TOKENIZER_UNDER_TEST.decode(ids) == text


def test_a_merge_that_builds_an_added_token_is_not_used(tmp_path: Path) -> None:
    """A vocabulary may hold an added token as an ordinary piece with its own merges."""
    spec = json.loads(TOKENIZER.read_text())
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    piece = next(left + right for left, right in reversed(merges) if left + right in vocab)
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": vocab[piece], "content": piece})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    tokenizer = TextTokenizer(path)
    text = piece.replace("Ġ", " ")
    assert vocab[piece] in TOKENIZER_UNDER_TEST.encode(text)
    assert vocab[piece] not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_are_left_out_of_text() -> None:
    ids = TOKENIZER_UNDER_TEST.encode("hello")
    special = CONFIG.tokenizer
    assert TOKENIZER_UNDER_TEST.decode([special.bos_id, *ids, special.coord_id, special.eos_id]) == "hello"


def test_long_text_is_not_truncated_or_padded(tmp_path: Path) -> None:
    plain = Tokenizer.from_file(str(TOKENIZER))
    plain.enable_truncation(4)
    plain.enable_padding(length=64)
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json")
    text = "a small red circle on the left " * 20
    assert tokenizer.encode(text) == TOKENIZER_UNDER_TEST.encode(text)
    assert tokenizer.encode("x") == TOKENIZER_UNDER_TEST.encode("x")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match="not a tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError):
        TextTokenizer(tmp_path / "none.json")
