"""The client and its command line against the real server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pytest
from doors import idle, settled, wait_until
from photon_client import AsyncClient, Client, InvalidArgument, PhotonTimeout, Stream
from PIL import Image

from photon_backend.serve import Server

GREEDY = {"temperature": 0, "max_tokens": 12}
ENDLESS = {"temperature": 0, "max_tokens": 700}
SOON = 60  # seconds; the promise of one second has its own tests, this bound is for a busy machine
PHOTON = str(Path(sys.executable).parent / "photon")


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "usage"}


def test_text_equals_the_raw_answer(server: Server, client: Client, pictures: list[bytes]) -> None:
    raw = doors.grpc_stream(server, task="query", text_input="What is it?", image=pictures[0], **GREEDY)
    result = client.query(pictures[0], "What is it?", **GREEDY)
    assert raw.text and without_times(result) == {"answer": raw.text, "finish_reason": raw.finish_reason}
    assert result["usage"]["output_tokens"] == raw.usage["output_tokens"]  # type: ignore[index]


def test_places_equal_the_raw_answer(server: Server, client: Client, pictures: list[bytes]) -> None:
    request = {"text_input": "circle", "image": pictures[1], "max_objects": 3}
    objects = client.detect(pictures[1], "circle", max_objects=3)["objects"]
    raw = doors.grpc_stream(server, task="detect", **request).objects
    assert objects and [list(box.values()) for box in objects] == np.reshape(raw, (-1, 4)).tolist()
    assert list(objects[0]) == ["x_min", "y_min", "x_max", "y_max"]
    points = client.point(pictures[1], "circle", max_objects=3)["points"]
    raw = doors.grpc_stream(server, task="point", **request).points
    assert points and [list(point.values()) for point in points] == np.reshape(raw, (-1, 2)).tolist()
    assert list(points[0]) == ["x", "y"]


def test_caption_length_reaches_the_server(client: Client, pictures: list[bytes]) -> None:
    for length in ("short", "normal", "long"):
        assert client.caption(pictures[2], length, **GREEDY)["caption"]
    with pytest.raises(InvalidArgument, match="length must be one of short, normal, long, got 'huge'"):
        client.caption(pictures[2], "huge")


def test_a_question_without_a_picture(client: Client, pictures: list[bytes]) -> None:
    usage = client.query(None, "Who are you?", **GREEDY)["usage"]
    assert 0 < usage["input_tokens"] < client.query(pictures[2], "Who are you?", **GREEDY)["usage"]["input_tokens"]


def test_every_form_of_a_picture(client: Client, pictures: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures[3])
    image = Image.open(io.BytesIO(pictures[3]))
    forms = [pictures[3], path, str(path), image, np.asarray(image)]
    objects = client.detect(pictures[3], "circle", max_objects=3)["objects"]
    assert all(client.detect(form, "circle", max_objects=3)["objects"] == objects for form in forms)
    assert any(client.detect(other, "circle", max_objects=3)["objects"] != objects for other in pictures)


def test_streamed_text_is_the_whole_text(client: Client, pictures: list[bytes]) -> None:
    whole = client.caption(pictures[0], **GREEDY)
    streamed = client.caption(pictures[0], stream=True, **GREEDY)
    assert list(streamed) == ["caption"]
    stream = streamed["caption"]
    assert isinstance(stream, Stream) and stream.finish_reason is None
    first = next(stream)
    assert first + "".join(stream) == whole["caption"]
    assert stream.finish_reason == whole["finish_reason"]
    assert stream.usage is not None and stream.usage["output_tokens"] == whole["usage"]["output_tokens"]
    assert without_times(stream.result()) == without_times(whole)


def test_streamed_objects_are_all_objects(client: Client, pictures: list[bytes]) -> None:
    for ask, key in ((client.detect, "objects"), (client.point, "points")):
        whole = ask(pictures[5], "circle", max_objects=4)
        stream = ask(pictures[5], "circle", stream=True, max_objects=4)[key]
        assert list(stream) == whole[key]
        assert stream.finish_reason == whole["finish_reason"]


def test_reasoning(client: Client, pictures: list[bytes]) -> None:
    result = client.query(pictures[6], "Why?", reasoning=True, **GREEDY)
    assert set(result["reasoning"]) == {"text", "grounding"} and "reasoning" not in result["usage"]
    stream = client.query(pictures[6], "Why?", stream=True, reasoning=True, **GREEDY)["answer"]
    assert "".join(stream) == result["answer"]
    assert stream.reasoning == result["reasoning"]
    assert "reasoning" not in client.query(pictures[6], "Why?", **GREEDY)


def leave_by_break(stream: Stream) -> None:
    for _ in stream:
        break
    assert stream.finish_reason == "cancelled" and list(stream) == []


def leave_by_exception(stream: Stream) -> None:
    with pytest.raises(KeyError):
        for _ in stream:
            raise KeyError


def leave_by_generator(stream: Stream) -> None:
    words = (delta.upper() for delta in stream)
    next(words)
    words.close()


def leave_by_close(stream: Stream) -> None:
    next(stream)
    stream.close()
    stream.close()


def leave_by_forgetting(stream: Stream) -> None:
    next(stream)  # the caller drops its reference


def leave_from_another_thread(stream: Stream) -> None:
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list, stream)
        stream.close()
        rest.result(timeout=SOON)


LEAVES = [
    leave_by_break,
    leave_by_exception,
    leave_by_generator,
    leave_by_close,
    leave_by_forgetting,
    leave_from_another_thread,
]


@pytest.mark.parametrize("leave", LEAVES)
def test_leaving_frees_the_row(
    server: Server, client: Client, pictures: list[bytes], leave: Callable[[Stream], None]
) -> None:
    cancelled = settled(server)["cancelled"]
    other = client.caption(pictures[8], stream=True, **ENDLESS)["caption"]
    streamed = client.caption(pictures[7], stream=True, **ENDLESS)
    wait_until(lambda: client.status()["running"] == 2, SOON, "both running")
    leave(streamed.pop("caption"))
    wait_until(lambda: client.status()["cancelled"] == cancelled + 1, SOON, "one cancelled after it was left")
    assert next(other), "a request beside it goes on"
    other.close()
    wait_until(lambda: idle(server), SOON, "rows free")


@pytest.mark.parametrize("stream", [True, False])
def test_timeout_cancels(server: Server, client: Client, pictures: list[bytes], stream: bool) -> None:
    """On a busy machine a short time is over before the server has begun; then another try is more patient."""
    timeout, cancelled = 0.25, settled(server)["cancelled"]
    while settled(server)["cancelled"] == cancelled:
        timeout *= 2
        with pytest.raises(PhotonTimeout, match=re.escape(f"within {timeout} s")):
            answer = client.caption(pictures[8], stream=stream, timeout=timeout, **ENDLESS)
            list(answer["caption"])
    client.caption(pictures[8], **GREEDY)


def test_threads_share_a_client(server: Server, client: Client, pictures: list[bytes]) -> None:
    def ask(picture: bytes, stream: bool = False) -> list[list[float]]:
        objects = client.detect(picture, "circle", stream=stream, max_objects=3)["objects"]
        return [[round(value, 5) for value in box.values()] for box in objects]

    alone = [ask(picture) for picture in pictures]
    assert len({str(objects) for objects in alone}) > len(alone) // 2, "answers too alike to tell a mix-up"
    with ThreadPoolExecutor(2 * len(pictures)) as threads:
        whole = [threads.submit(ask, picture) for picture in pictures]
        parts = [threads.submit(ask, picture, stream=True) for picture in pictures]
        assert [future.result() for future in whole] == alone
        assert [future.result() for future in parts] == alone
    wait_until(lambda: idle(server), SOON, "rows free")


@pytest.mark.parametrize(
    ("task", "image", "text", "options", "named"),
    [
        ("query", None, "x", {"tempreature": 1}, "tempreature"),
        ("query", None, "x", {"top_p": 2}, "top_p"),
        ("query", None, " ", {}, "text_input"),
        ("detect", None, "cat", {}, "image"),
        ("caption", b"no picture", None, {}, "image"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_wrong_requests_name_the_field(
    client: Client, task: str, image: bytes | None, text: str | None, options: dict[str, Any], named: str, stream: bool
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        answer = client.ask(task, image, text, stream, None, options)
        list(next(iter(answer.values())))
    client.query(None, "And now?", **GREEDY)


def test_status(client: Client) -> None:
    assert {"rows", "running", "waiting", "done", "cancelled"} <= set(client.status())


def test_async_answers_equal_the_sync_ones(server: Server, client: Client, pictures: list[bytes]) -> None:
    async def ask_all() -> None:
        async with AsyncClient(server.grpc_url) as twin:
            captions = await asyncio.gather(*(twin.caption(picture, **GREEDY) for picture in pictures))
            for result, picture in zip(captions, pictures, strict=True):
                assert without_times(result) == without_times(client.caption(picture, **GREEDY))
            for name, key in (("detect", "objects"), ("point", "points")):
                expected = getattr(client, name)(pictures[0], "circle", max_objects=3)
                assert without_times(await getattr(twin, name)(pictures[0], "circle", max_objects=3)) == without_times(
                    expected
                )
                streamed = await getattr(twin, name)(pictures[0], "circle", stream=True, max_objects=3)
                assert [place async for place in streamed[key]] == expected[key]
            stream = (await twin.query(None, "Who?", stream=True, **GREEDY))["answer"]
            assert "".join([delta async for delta in stream]) == client.query(None, "Who?", **GREEDY)["answer"]
            assert stream.finish_reason and stream.usage
            assert (await twin.status()).keys() == client.status().keys()
            with pytest.raises(InvalidArgument, match="top_p"):
                await twin.query(None, "x", top_p=2)

    asyncio.run(ask_all())


def test_async_leaving_frees_the_rows(server: Server, client: Client, pictures: list[bytes]) -> None:
    async def leave(twin: AsyncClient, number: int) -> None:
        if number == 0:
            async for _ in (await twin.caption(pictures[0], stream=True, **ENDLESS))["caption"]:
                break
        elif number == 1:
            stream = (await twin.caption(pictures[1], stream=True, **ENDLESS))["caption"]
            async for _ in stream:
                break
            assert stream.finish_reason == "cancelled" and [delta async for delta in stream] == []
        elif number == 2:
            stream = (await twin.caption(pictures[2], stream=True, **ENDLESS))["caption"]
            await anext(stream)
            stream.close()
        else:
            await anext((await twin.caption(pictures[3], stream=True, **ENDLESS))["caption"])

    async def leave_all(cancelled: int) -> None:
        async with AsyncClient(server.grpc_url) as twin:
            await asyncio.gather(*(leave(twin, number) for number in range(4)))
            # In a thread: the loop has to run for the cancelling to happen.
            done = lambda: idle(server) and client.status()["cancelled"] == cancelled + 4  # noqa: E731
            await asyncio.to_thread(wait_until, done, SOON, "rows free")
            assert (await twin.query(None, "And now?", **GREEDY))["answer"]

    asyncio.run(leave_all(settled(server)["cancelled"]))


def test_async_waiting_that_ends_frees_the_row(server: Server, client: Client, pictures: list[bytes]) -> None:
    """By a time-out, as in the threaded client above, and by the end of the task that waits."""

    async def give_up(cancelled: int) -> None:
        async with AsyncClient(server.grpc_url) as twin:
            timeout = 0.25
            while (await asyncio.to_thread(settled, server))["cancelled"] == cancelled:
                timeout *= 2
                with pytest.raises(PhotonTimeout):
                    await twin.caption(pictures[4], timeout=timeout, **ENDLESS)
            task = asyncio.create_task(twin.caption(pictures[5], **ENDLESS))
            running = lambda: client.status()["running"] == 1  # noqa: E731
            await asyncio.to_thread(wait_until, running, SOON, "running")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            done = lambda: client.status()["cancelled"] == cancelled + 2  # noqa: E731
            await asyncio.to_thread(wait_until, done, SOON, "row free")

    asyncio.run(give_up(settled(server)["cancelled"]))


def photon(server: Server, *words: str, **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    command = [PHOTON, *words, "--url", server.grpc_url]
    return subprocess.run(command, capture_output=True, timeout=120, **kwargs)


def test_cli_prints_one_json_document(server: Server, client: Client, pictures: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures[0])
    words = ["caption", str(path), "--temperature", "0", "--max-tokens", "12", "--json"]
    expected = without_times(client.caption(pictures[0], **GREEDY))
    for extra in ([], ["--stream"]):
        done = photon(server, *words, *extra)
        assert (done.returncode, done.stderr) == (0, b"")
        assert without_times(json.loads(done.stdout)) == expected
    assert json.loads(photon(server, "status", "--json").stdout).keys() == client.status().keys()


def test_cli_prints_any_script(server: Server) -> None:
    """Where the locale knows ASCII only, as in containers and cron jobs."""
    answer = "日本 é 😀"
    words = ["query", "What?", "--option", f"choice={json.dumps([answer])}"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for extra in ([], ["--stream"], ["--json"]):
        done = photon(server, *words, *extra, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode()
        assert (json.loads(text)["answer"] if extra == ["--json"] else text.strip()) == answer


def test_cli_prints_text(server: Server, client: Client, pictures: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures[0])
    answer = client.query(pictures[0], "Why?", **GREEDY)["answer"]
    words = ["query", str(path), "Why?", "--option", "temperature=0", "--option", "max_tokens=12"]
    for extra in ([], ["--stream"]):
        done = photon(server, *words, *extra)
        assert done.returncode == 0
        assert done.stdout.decode() == f"{answer}\n"
    assert b"running" in photon(server, "status").stdout


def test_cli_saves_an_annotated_picture(server: Server, client: Client, pictures: list[bytes], tmp_path: Path) -> None:
    save = tmp_path / "boxes.png"
    words = ["detect", "-", "circle", "--option", "max_objects=2", "--save", str(save)]
    done = photon(server, *words, input=pictures[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"circle") == len(client.detect(pictures[0], "circle", max_objects=2)["objects"]) > 0
    before, after = Image.open(io.BytesIO(pictures[0])), Image.open(save)
    factor = after.width // before.width
    assert after.size == (before.width * factor, before.height * factor)
    assert after.tobytes() != before.resize(after.size, Image.Resampling.NEAREST).tobytes()


def test_cli_exit_codes(server: Server) -> None:
    done = photon(server, "query", "x", "--option", "top_p=2", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "INVALID_ARG"
    assert b"top_p" in done.stderr and b"Traceback" not in done.stderr
    done = photon(server, "query", "x", "--option", "max_tokens=700", "--option", "temperature=0", "--timeout", "0.3")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    wait_until(lambda: idle(server), SOON, "row free after the time-out")


@pytest.mark.parametrize("extra", [[], ["--stream"]])
def test_ctrl_c_cancels_on_the_server(server: Server, pictures: list[bytes], tmp_path: Path, extra: list[str]) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures[9])
    words = [
        PHOTON,
        "caption",
        str(path),
        "--max-tokens",
        "700",
        "--temperature",
        "0",
        "--url",
        server.grpc_url,
        *extra,
    ]

    def hear_ctrl_c() -> None:
        """Tests that run in the background of a script inherit a SIGINT that is ignored."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    settled(server)  # so that what runs is ours
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_ctrl_c) as process:
        wait_until(lambda: doors.status(server)["running"] == 1, SOON, "running")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert errors.decode() == "photon: interrupted; the request is cancelled\n"
    wait_until(lambda: idle(server), SOON, "row free after Ctrl-C")


def test_a_closed_pipe_cancels_on_the_server(server: Server, pictures: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures[10])
    words = [PHOTON, "caption", str(path), "--max-tokens", "700", "--temperature", "0", "--stream"]
    with subprocess.Popen(
        [*words, "--url", server.grpc_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=SOON) == 1
        assert process.stderr.read() == b""
    wait_until(lambda: idle(server), SOON, "row free after the pipe closed")
