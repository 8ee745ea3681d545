"""`python -m photon_backend run`: one request through a front end and an engine in this process, without Triton."""

from __future__ import annotations

import argparse
import io
import json
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from photon_backend.config import Settings, read_settings
from photon_backend.frontend.options import Scalar, invalid, short_repr
from photon_backend.frontend.session import FrontEnd, RawRequest, Response, Session, check_grammar
from photon_backend.protocol import TASKS, Done, Failed, FromEngine, NeedPicture, PhotonError, Picture, Tokens, unpacked

if TYPE_CHECKING:
    from photon_backend.engine.engine import Engine

CLIENT = b"run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = read_settings()
    parser.add_argument("--checkpoint", default=defaults.checkpoint, metavar="DIR", help="default: the bundled model")
    parser.add_argument("--device", default=defaults.device, help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default=defaults.dtype, choices=("float32", "bfloat16"))
    parser.add_argument("--task", default="query", metavar="|".join(TASKS))
    parser.add_argument("--image", type=Path, metavar="FILE")
    parser.add_argument("--text", help="the question, or the object to find")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="F", help="0 is greedy")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other option, such as length=short; repeat",
    )
    parser.add_argument("--no-overlap", action="store_true", help="commit every step at once: the blocking mode")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the answer alone")


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0, 2 when the request is at fault, 1 for anything else; the reason is one sentence on stderr."""
    try:
        document = answer(_settings(arguments), _raw_request(arguments))
    except PhotonError as error:
        print(error, file=sys.stderr)
        return 2 if error.code == "INVALID_ARG" else 1
    except OSError as error:
        print(f"[INTERNAL] {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError, AssertionError) as error:  # checkpoint, device, memory
        print(f"[INTERNAL] {next(iter(str(error).splitlines()), type(error).__name__)}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # answers are in any script, whatever the locale can show
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    print(json.dumps(document) if arguments.json else document["text"])
    return 0


def answer(settings: Settings, raw: RawRequest) -> dict[str, Any]:
    """Runs one request that does not stream.

    Returns token_ids, values (of the coord and size ids), text, objects, points, finish_reason and usage. Raises
    PhotonError; OSError, ValueError or RuntimeError when the checkpoint or the device cannot be used.
    """
    session = FrontEnd(settings).open(raw, "run-1")  # before torch is loaded: a wrong request is refused quickly
    if session.submit.grammar is not None:
        check_grammar(session.submit.grammar)
    from photon_backend.engine.engine import Engine

    inbox: queue.SimpleQueue[list[FromEngine]] = queue.SimpleQueue()
    engine = Engine(settings, lambda client, messages: inbox.put(messages))
    engine.start()
    try:
        return _converse(session, engine, inbox)
    finally:
        engine.stop()


def _converse(session: Session, engine: Engine, inbox: queue.SimpleQueue[list[FromEngine]]) -> dict[str, Any]:
    token_ids: list[int] = []
    values: list[float] = []
    responses: list[Response] = []
    engine.post(CLIENT, session.submit)
    while not session.finished:
        for message in unpacked(inbox.get()):
            match message:
                case NeedPicture():
                    tiling, pixels = session.picture()
                    engine.post(CLIENT, Picture(session.submit.request_id, tiling), pixels)
                case Tokens() | Done() | Failed():
                    if isinstance(message, Tokens):
                        token_ids += message.ids
                        values += message.values
                    responses += session.feed([message])
    (response,) = responses
    if response.error is not None:
        raise response.error
    assert response.text is not None and response.usage is not None
    usage = msgspec.json.decode(response.usage)
    if session.cancel_wanted:  # a stop string: the engine may have been a few tokens ahead
        token_ids = token_ids[: usage["output_tokens"]]
    found = {} if session.submit.task in ("query", "caption") else msgspec.json.decode(response.text)
    return {
        "task": session.submit.task,
        "token_ids": token_ids,
        "values": values,
        "text": response.text,
        "objects": found.get("objects", []),
        "points": found.get("points", []),
        "finish_reason": response.finish_reason,
        "usage": usage,
    }


def _settings(arguments: argparse.Namespace) -> Settings:
    settings = msgspec.structs.replace(
        read_settings(), checkpoint=arguments.checkpoint, device=arguments.device, dtype=arguments.dtype
    )
    return msgspec.structs.replace(settings, overlap=False) if arguments.no_overlap else settings


def _raw_request(arguments: argparse.Namespace) -> RawRequest:
    """--max-tokens and --temperature travel as request parameters, so giving one by --option too is noticed."""
    given: dict[str, Scalar | None] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    try:
        image = arguments.image.read_bytes() if arguments.image else None
    except OSError as error:
        raise invalid(f"image {arguments.image} cannot be read: {error.strerror}") from None
    return RawRequest(
        task=arguments.task,
        text_input=arguments.text,
        image=image,
        sampling_parameters="{" + ",".join(map(_json_member, arguments.option)) + "}",
        parameters={name: value for name, value in given.items() if value is not None},
    )


def _json_member(option: str) -> str:
    """`key=value` as a member of a JSON object; the value is JSON when it parses, otherwise a string."""
    key, equals, value = option.partition("=")
    if not equals:
        raise invalid(f"option must be given as key=value, got {short_repr(option)}")
    try:
        json.loads(value)
    except ValueError:
        value = json.dumps(value)
    return f"{json.dumps(key)}:{value}"
