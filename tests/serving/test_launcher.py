"""What the launcher checks before it starts anything: one sentence each."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from photon_backend import layout
from photon_backend.layout import LaunchError
from photon_backend.serve import Server, _relay, parse_arguments, start_server

FREE = {"HTTP_PORT": 0}


def test_all_is_well(checkpoint: Path) -> None:
    layout.check(checkpoint, "127.0.0.1", FREE, stubs=4)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_checkpoint(checkpoint: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(LaunchError, match=name):
        layout.check(tmp_path / "copy", "127.0.0.1", FREE, stubs=4)


def test_port_in_use_names_the_variable(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"{port}.*GRPC_PORT"):
            layout.check(checkpoint, "127.0.0.1", {"GRPC_PORT": port}, stubs=4)


@pytest.mark.parametrize(
    ("host", "ports", "words"),
    [
        ("127.0.0.1", {"HTTP_PORT": 65536}, "HTTP_PORT.*65535"),
        ("127.0.0.1", {"HTTP_PORT": -1}, "HTTP_PORT.*-1"),
        ("127.0.0.1", {"HTTP_PORT": 10_007, "GRPC_PORT": 10_007}, "HTTP_PORT, GRPC_PORT.*different"),
        ("no-such-host.invalid", {"HTTP_PORT": 0}, "^HOST is no-such-host.invalid"),
    ],
)
def test_addresses_that_cannot_be(checkpoint: Path, host: str, ports: dict[str, int], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        layout.check(checkpoint, host, ports, stubs=4)


@pytest.mark.parametrize("number", [{"front_ends": 0}, {"front_ends": -1}, {"engines": 0}])
def test_a_server_of_nothing(checkpoint: Path, number: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match="FRONT_ENDS and ENGINES"), start_server(checkpoint, **number):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEVICE", "gpu"),
        ("DTYPE", "float64"),
        ("ROWS", "0"),
        ("ROWS", "many"),
        ("PAGES", "-1"),
        ("OVERLAP", "maybe"),
        ("MAX_OPEN_REQUESTS", "-3"),
        ("MAX_IMAGE_BYTES", "0"),
        ("BEAT_MS", "nan"),
        ("KV_FRACTION", "80"),
    ],
)
def test_a_setting_that_cannot_be_starts_nothing(checkpoint: Path, tmp_path: Path, name: str, value: str) -> None:
    log = tmp_path / "log"
    settings = {f"PHOTON_{name}": value}
    with (
        pytest.raises(LaunchError, match=f"PHOTON_{name}='{value}'"),
        start_server(checkpoint, log=log, settings=settings),
    ):
        pass
    assert not log.exists()


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    """Disk full, or its reader has gone: whoever prints must not wait for ever."""
    lines = io.BytesIO(b"a line\n" * 10_000)
    _relay(lines, os.open("/dev/full", os.O_WRONLY))
    assert not lines.read()


def test_a_log_where_there_is_no_directory(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), start_server(checkpoint, log=tmp_path / "none" / "log"):
        pass


def test_free_ports_are_different_ones() -> None:
    assert len(set(layout.free_ports("127.0.0.1", 40))) == 40 and layout.free_ports("127.0.0.1", 0) == []
    with pytest.raises(LaunchError, match=r"is free on 192\.0\.2\.1"):  # no address of any machine
        layout.free_ports("192.0.2.1", 1)


def test_little_shared_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaunchError, match=r"/dev/shm has 64 MiB.*--shm-size"):
        layout.check(checkpoint, "127.0.0.1", FREE, stubs=4)


def test_few_open_files(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda limit: (64, 64))
    with pytest.raises(LaunchError, match=r"Only 64 files may be open.*ulimit -n"):
        layout.check(checkpoint, "127.0.0.1", FREE, stubs=4)


def test_new_numpy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(LaunchError, match=r"numpy 2\.1\.0.*numpy<2"):
        layout.check(checkpoint, "127.0.0.1", FREE, stubs=4)


def test_python_without_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "python_version", lambda: "3.14")
    with pytest.raises(LaunchError, match=r"no stub for Python 3\.14"):
        layout.libpython()


@pytest.mark.parametrize("name", ["x" * 80, "a b", "$HOME", "a;b"])
def test_temporary_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Too long for a socket, or not one word to the shell through which Triton starts its stubs."""
    long = tmp_path / name
    long.mkdir()
    monkeypatch.setattr(layout.tempfile, "tempdir", str(long))
    with pytest.raises(LaunchError, match="TMPDIR"):
        layout.Layout(1, 1)
    assert list(long.iterdir()) == []


def test_a_disk_that_fills_up_at_the_start_keeps_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(layout.tempfile, "tempdir", str(place))
    monkeypatch.setattr(layout.shutil, "copy", full)
    with pytest.raises(OSError, match="No space left"):
        layout.Layout(1, 1)
    assert list(place.iterdir()) == []


def test_triton_gets_a_stub_of_its_own(server: Server) -> None:
    """It takes the right to read it from everybody: the next start of a user who is not root would fail, and the first
    one of a user who does not own the environment."""
    stub = server.layout.backends / "python" / layout.stub_path().name
    assert stub.exists() and not stub.samefile(layout.stub_path())


def test_a_bare_environment(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No PATH, no HOME: Triton starts its stubs through a shell all the same."""
    for name in ("PATH", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with start_server(checkpoint, front_ends=1, settings={"PHOTON_THREADS": "1"}, log=tmp_path / "log") as server:
        assert server.is_ready()


def test_checkpoint_that_cannot_be_loaded_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """Files are there, weights are not: the engine says why, the supervisor gives up at once, nothing is left."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"not tensors")
    log = tmp_path / "log"
    with pytest.raises(LaunchError, match="Engine 0 "), start_server(broken, log=log):
        pass
    assert str(broken) in log.read_text() and "Traceback" not in log.read_text()


def test_command_line_reports_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "photon_backend.serve"],
        env={**os.environ, "CHECKPOINT": str(tmp_path / "nowhere"), "HTTP_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr == f"photon: The checkpoint {tmp_path / 'nowhere'} has no config.json.\n"


def test_variables_that_do_nothing_are_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "photon_backend.serve", "--checkpoint", str(tmp_path)],
        env=os.environ | {"PHOTON_ROW": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, second = done.stderr.splitlines()
    assert first == "photon: PHOTON_ROW is no setting and has no effect; is PHOTON_ROWS meant?"
    assert str(tmp_path) in second and done.returncode == 1


@pytest.mark.parametrize(("variable", "value"), [("LOG_LEVEL", "debug"), ("DTYPE", "float8")])
def test_variable_that_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        parse_arguments([])
    assert f"{variable} must be one of" in capsys.readouterr().err
