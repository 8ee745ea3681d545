"""`python -m photon_backend run` on the seeded checkpoint of the golden tests: the reference's answers, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from photon_backend import __main__, run
from photon_backend.config import Settings
from photon_backend.frontend.session import FrontEnd, RawRequest
from photon_backend.model.tokenizer import TextTokenizer
from tests.model.cases import MAX_TOKENS, Case, cases
from tests.model.tiny_checkpoint import CONFIG, GOLDEN, TOKENIZER, picture, write_checkpoint
from tests.unit.front_end_parts import file_bytes

GOLDEN_CASES: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())["cases"]
NAMES = ("caption/long", "query/refs", "query/reasoning", "detect/two", "point")
ENGINE_CASES = [case for case in cases() if case.name in ("none/query", *(f"tiles/{name}" for name in NAMES))]
BIN = 1 / CONFIG.region.coord_out_dim


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "tiles.png"
    path.write_bytes(png("tiles"))
    return path


def png(name: str) -> bytes:
    from PIL import Image

    return file_bytes(Image.fromarray(picture(name)))


def raw_request(case: Case) -> RawRequest:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    if case.task == "caption":
        options["length"] = case.text
    elif case.task == "query":
        options |= {"reasoning": case.reasoning, "spatial_refs": case.refs}
    else:
        options["max_objects"] = case.max_objects
    text = None if case.task == "caption" else case.text
    image = png(case.picture) if case.picture else None
    return RawRequest(case.task, text, image, sampling_parameters=json.dumps(options))


def test_prompts_equal_those_of_the_reference(checkpoint: Path) -> None:
    front_end = FrontEnd(Settings(checkpoint=str(checkpoint)))
    for case in cases():
        assert front_end.open(raw_request(case), "r").submit.prompt_ids == GOLDEN_CASES[case.name]["prompt"], case.name


def in_characters(golden: dict[str, Any]) -> list[dict[str, Any]]:
    """The golden grounding, whose indices count ids (make_golden spells an id as one character), over the text."""

    def characters(number: int) -> int:
        return len(TextTokenizer(TOKENIZER).decode(golden["reasoning_ids"][:number]))

    return [
        g | {"start_idx": characters(g["start_idx"]), "end_idx": characters(g["end_idx"])} for g in golden["grounding"]
    ]


@pytest.mark.parametrize("case", ENGINE_CASES, ids=lambda case: case.name)
def test_answers_equal_those_of_the_reference(checkpoint: Path, case: Case) -> None:
    document = run.answer(Settings(checkpoint=str(checkpoint), threads=1), raw_request(case))
    golden = GOLDEN_CASES[case.name]
    if case.task in ("detect", "point"):
        found, expected = document["objects"] or document["points"], golden["objects"]
        assert [list(one) for one in found] == [list(one) for one in expected]
        rows, expected_rows = ([list(one.values()) for one in ones] for ones in (found, expected))
        np.testing.assert_allclose(rows, np.clip(expected_rows, 0, 1), atol=BIN)
    else:
        expected_ids = golden["ids"]
        if case.reasoning:
            expected_ids = [*golden["reasoning_ids"], CONFIG.tokenizer.answer_id, *expected_ids]
            assert document["usage"]["reasoning"]["grounding"] == in_characters(golden)
        assert document["token_ids"] == expected_ids
    assert document["usage"]["output_tokens"] == len(document["token_ids"])


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "photon_backend", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["photon_backend", "run", *map(str, arguments)])
    return __main__.main()


def test_the_command_prints_one_document(checkpoint: Path, image_file: Path) -> None:
    arguments = ["--device", "cpu", "--dtype", "float32", "--task", "query", "--text", "what colour is the star?"]
    limits = ["--max-tokens", "24", "--temperature", "0", "--option", "seed=1", "--no-overlap", "--json"]
    result = command("--checkpoint", checkpoint, "--image", image_file, *arguments, *limits)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert {"token_ids", "text", "objects", "points", "finish_reason", "usage"} <= set(document)
    assert document["token_ids"] == GOLDEN_CASES["tiles/query"]["ids"] and document["points"] == []


def test_a_stop_string_ends_the_tokens_too(
    checkpoint: Path, image_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", checkpoint, "--image", image_file, "--task", "caption", "--temperature", "0", "--json"]
    assert main(monkeypatch, *arguments, "--max-tokens", "5") == 0
    whole = json.loads(capsys.readouterr().out)
    stop = whole["text"][-1]
    assert main(monkeypatch, *arguments, "--max-tokens", "5", "--option", f"stop={json.dumps(stop)}") == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["text"] == whole["text"].split(stop)[0] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert cut["usage"]["output_tokens"] == len(cut["token_ids"])


@pytest.mark.parametrize("task", ["caption", "query"])
def test_a_stop_string_gives_the_same_blocking_and_overlapped(checkpoint: Path, task: str) -> None:
    """The engine is a token or two further when the front end sees it; nothing of that is told."""
    options: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 16}

    def ask(overlap: bool, **more: Any) -> dict[str, Any]:
        text = "what colour?" if task == "query" else None
        raw = RawRequest(task, text, png("tiny"), sampling_parameters=json.dumps(options | more))
        document = run.answer(Settings(checkpoint=str(checkpoint), threads=1, overlap=overlap), raw)
        return {key: document[key] for key in ("text", "token_ids", "finish_reason")}

    whole = ask(True)
    stop = whole["text"][1:3]
    cut = ask(True, stop=stop)
    assert cut == ask(False, stop=stop) and whole == ask(False)
    assert cut["text"] == whole["text"].split(stop)[0] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])] != whole["token_ids"]


def test_without_json_the_answer_alone_is_printed(
    checkpoint: Path, image_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", "detect", "--text", "star", "--option", "max_objects=2"]
    assert main(monkeypatch, "--checkpoint", checkpoint, "--image", image_file, *arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["objects"]) == 2


def test_an_answer_in_any_script_is_printed() -> None:
    """By the bundled model, whose vocabulary can spell it, where the locale knows ASCII only."""
    command = [sys.executable, "-m", "photon_backend", "run", "--text", "What?"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PHOTON_THREADS": "1"}
    done = subprocess.run(
        [*command, "--option", 'choice=["\\u65e5"]'], env=environment, capture_output=True, timeout=250
    )
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "日\n", b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "describe"], "task must be one of"),
        (["--task", "caption"], "image is required for task caption"),
        (["--text", "x", "--image", "/nowhere.png"], "image /nowhere.png cannot be read"),
        (["--text", "x", "--image", __file__], "image is no picture"),
        (["--text", "x", "--option", "sed=1"], "'sed' is not an option; did you mean seed?"),
        (["--text", "x", "--option", "seed"], "option must be given as key=value, got 'seed'"),
        (["--text", "x", "--option", "length=tiny"], "length must be one of"),
        (["--text", "x", "--temperature", "1", "--option", "temperature=0"], "temperature is given twice"),
        (["--text", "x", "--option", "seed=1", "--option", "seed=2"], "seed is given twice"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_status_2(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(monkeypatch, "--checkpoint", checkpoint, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"[INVALID_ARG] {message}") and captured.err.count("\n") == 1


def test_a_checkpoint_that_cannot_be_loaded_is_one_sentence_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in ("no config.json", "a config.json that is none"):
        assert main(monkeypatch, "--checkpoint", tmp_path, "--text", "x") == 1
        error = capsys.readouterr().err
        assert error.startswith("[INTERNAL] ") and str(tmp_path) in error and error.count("\n") == 1
        (tmp_path / "config.json").write_text("{")
