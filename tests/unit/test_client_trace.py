"""`photon trace` without a server: its request, its arguments, its failures."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from photon_client import InvalidArgument
from photon_client.cli import build_parser, main
from photon_client.wire import build_trace_request

NOWHERE = "127.0.0.1:1"  # nobody listens there


def contents(request: object) -> dict[str, bytes]:
    names = [tensor.name for tensor in request.inputs]  # type: ignore[attr-defined]
    return dict(zip(names, request.raw_input_contents, strict=True))  # type: ignore[attr-defined]


def test_the_request() -> None:
    command = struct.pack("<I", 5) + b"trace"
    request = build_trace_request(300, 10.0, None)
    assert request.model_name == "photon_engine"
    assert contents(request) == {"command": command, "ticks": b"\x2c\1\0\0", "seconds": struct.pack("<f", 10)}
    assert contents(build_trace_request(1, 0.5, 3))["engine"] == b"\3\0\0\0"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((1 << 31, 1.0, None), "ticks"),
        ((1, 1e39, None), "seconds"),
        ((1, 1.0, 1 << 31), "engine"),
        ((1.5, 1, 0), "ticks"),
    ],
)
def test_numbers_that_no_tensor_holds(arguments: tuple[int, float, int | None], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: not a number"):
        build_trace_request(*arguments)


def test_arguments(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = build_parser().parse_args(["trace", str(file)])
    assert (arguments.file, arguments.ticks, arguments.seconds, arguments.engine) == (file, 300, 10.0, None)
    words = ["trace", str(file), "--ticks", "5", "--seconds", "2", "--engine", "1"]
    arguments = build_parser().parse_args(words)
    assert (arguments.ticks, arguments.seconds, arguments.engine) == (5, 2.0, 1)


@pytest.mark.parametrize(
    "words", [[], ["no/such/directory/out.json"], ["a.json", "--seconds", "0"], ["a.json", "--ticks", "few"]]
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["trace", *words])
    assert exit_.value.code == 2
    assert "usage: photon trace" in capsys.readouterr().err


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main(["trace", str(file), "--url", NOWHERE]) == 3
    assert NOWHERE in capsys.readouterr().err and not file.exists()
