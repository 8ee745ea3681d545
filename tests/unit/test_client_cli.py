"""The command line up to the request, and from the result to the text."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path

import pytest
from photon_client import cli
from photon_client.cli import build_parser, main
from photon_client.progress import Progress

NOWHERE = "127.0.0.1:1"  # nobody listens there


def parse(*words: str) -> tuple[tuple[str | None, str | None], dict[str, object]]:
    """((picture, text), options that are set)"""
    arguments = build_parser().parse_args(words)
    options = {name: value for name, value in cli._options(arguments).items() if value is not None}
    return cli._subject(arguments), options


def test_subjects() -> None:
    assert parse("query", "photo.jpg", "What is this?") == (("photo.jpg", "What is this?"), {})
    assert parse("query", "What can you do?") == ((None, "What can you do?"), {})
    assert parse("query", "-", "What is this?") == (("-", "What is this?"), {})
    assert parse("caption", "photo.jpg") == (("photo.jpg", None), {})
    assert parse("detect", "photo.jpg", "red circle") == (("photo.jpg", "red circle"), {})


def test_options() -> None:
    words = ["--max-tokens", "5", "--temperature", "0", "--reasoning"]
    assert parse("query", "x", *words)[1] == {"max_tokens": 5, "temperature": 0.0, "reasoning": True}
    assert parse("caption", "x", "--length", "short")[1] == {"length": "short"}
    given = ['stop=["."]', "seed=1", "length=long", "json_schema=", "reasoning=false", "regex=a=b"]
    words = [word for option in given for word in ("--option", option)]
    assert parse("query", "x", *words)[1] == {
        "stop": ["."],
        "seed": 1,
        "length": "long",
        "json_schema": "",
        "reasoning": False,
        "regex": "a=b",
    }


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["query"],
        ["caption"],
        ["detect", "photo.jpg"],
        ["caption", "photo.jpg", "--length", "huge"],
        ["query", "x", "--option", "seed"],
        ["query", "x", "--option", "=1"],
        ["query", "x", "--timeout", "0"],
        ["query", "x", "--timeout", "soon"],
        ["detect", "photo.jpg", "cat", "--save", "boxes.nothing"],
        ["detect", "photo.jpg", "cat", "--save", "no/such/directory/boxes.png"],
        ["trace"],
    ],
)
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "usage: photon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["query", "one", "two", "three"], 2, "put the question in quotes"),
        (["query", __file__], 2, "is missing"),
        (["query", "-"], 2, "is missing"),
        (["caption", "no-such-file.png"], 2, "no-such-file.png: No such file"),
        (["caption", "."], 2, "Is a directory"),
        (["status", "--url", "http://127.0.0.1:8000"], 2, "host:port"),
        (["status", "--url", NOWHERE], 3, NOWHERE),
        (["query", "x", "--url", NOWHERE], 3, NOWHERE),
        (["query", "x", "--url", NOWHERE, "--stream"], 3, NOWHERE),
    ],
)
def test_failures(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err and output.err.count("\n") == 1, "one sentence, no traceback"
    assert main([*words, "--json"]) == code
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert main(["status"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(f"photon {command}" in text for command in ("query", "caption", "detect", "point", "status"))


END = {"finish_reason": "stop", "usage": {}}
BOX = {"x_min": 0.1, "y_min": 0.2, "x_max": 0.25, "y_max": 1.0}


def printed(result: dict[str, object], key: str, capsys: pytest.CaptureFixture[str], shown: bool = False) -> str:
    cli._print_result({**END, **result}, key, "red circle", False, shown)
    return capsys.readouterr().out


def test_results_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed({"answer": "yes"}, "answer", capsys) == "yes\n"
    assert printed({"objects": []}, "objects", capsys) == "no red circle found\n"
    assert printed({"objects": [BOX]}, "objects", capsys) == "red circle 1: x 0.100 to 0.250, y 0.200 to 1.000\n"
    assert (
        printed({"points": [{"x": 0.5, "y": 0}] * 2}, "points", capsys).splitlines()[1]
        == "red circle 2: x 0.500, y 0.000"
    )
    assert printed({"answer": "yes", "reasoning": {"text": "look"}}, "answer", capsys) == "yes\n\nreasoning: look\n"


def test_what_was_streamed_is_not_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed({"answer": "yes"}, "answer", capsys, shown=True) == "\n"
    assert printed({"objects": [BOX]}, "objects", capsys, shown=True) == ""
    assert printed({"objects": []}, "objects", capsys, shown=True) == "no red circle found\n"


def test_an_answer_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_result({"answer": "yes", "finish_reason": "length", "usage": {}}, "answer", None, False, False)
    assert "length" in capsys.readouterr().err


def test_save_accepts_a_picture_name(tmp_path: Path) -> None:
    path = tmp_path / "boxes.JPG"
    assert build_parser().parse_args(["detect", "a.png", "cat", "--save", str(path)]).save == path


class Terminal(io.StringIO):
    """A stderr that tells when something was written to it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def flush(self) -> None:
        self.written.set()


def test_progress_on_a_terminal_is_shown_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("waiting") as progress:
        assert terminal.written.wait(60)
        assert terminal.getvalue().startswith("\rwaiting (")
        progress.stop()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_no_progress_but_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("waiting"):
        assert not terminal.written.wait(1.5)
