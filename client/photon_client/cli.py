"""The command `photon`: one question to a running server, one answer on stdout.

Exit codes: 0 answered, 1 the server failed or the time ran out, 2 wrong arguments, 3 server not reachable or not ready,
130 interrupted (the request is cancelled on the server).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from photon_client.client import DEFAULT_URL, Client
from photon_client.draw import annotate
from photon_client.errors import InvalidArgument, PhotonError, Unavailable
from photon_client.progress import Progress
from photon_client.wire import KEYS

EXAMPLES = """examples:
  photon query photo.jpg "What is on the table?"
  photon query "What can you do?"                      without a picture
  photon caption photo.jpg --length short --stream
  photon detect photo.jpg "red circle" --save boxes.png
  photon point - "cat" --json < photo.jpg              the picture from standard input
  photon query photo.jpg "How many?" --option temperature=0 --option 'stop=["."]'
  photon status
  photon trace out.json                                what the engine does, for https://ui.perfetto.dev

exit code: 0 answered, 1 failed or out of time, 2 wrong arguments, 3 server not reachable or not ready, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # answers are in any script, whatever the locale can show
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        _run(arguments)
        sys.stdout.flush()
        return 0
    except PhotonError as error:
        exit_code = 2 if isinstance(error, InvalidArgument) else 3 if isinstance(error, Unavailable) else 1
        return _fail(arguments, error.code, error.message, exit_code)
    except KeyboardInterrupt:
        return _fail(arguments, "CANCELLED", "interrupted; the request is cancelled", 130)
    except BrokenPipeError:  # the reader of stdout has left; nothing may write to it again when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(arguments, "INVALID_ARG", f"{where}{error.strerror or error}", 2)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="photon",
        description="Ask a running Photon server about pictures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    query = _add_task(commands, "query", "Answer a question, about a picture or without one.")
    query.usage = "photon query [PICTURE] QUESTION [options]"  # argparse cannot say that the first of two is optional
    query.add_argument("words", nargs="+", metavar="[PICTURE] QUESTION", help="picture file (- is stdin) and question")
    query.add_argument("--reasoning", action="store_true", default=None, help="think first, and show the thoughts")
    _add_text_options(query)
    caption = _add_task(commands, "caption", "Describe a picture.")
    caption.add_argument("picture", metavar="PICTURE", help="picture file; - is standard input")
    caption.add_argument("--length", choices=("short", "normal", "long"))
    _add_text_options(caption)
    for name, verb in (("detect", "Put a box around"), ("point", "Point at")):
        task = _add_task(commands, name, f"{verb} every object of a kind in a picture.")
        task.add_argument("picture", metavar="PICTURE", help="picture file; - is standard input")
        task.add_argument("object", metavar="OBJECT", help='what to find, such as "red circle"')
        task.add_argument(
            "--save", metavar="FILE", type=_picture_file, help="write the picture with what was found on it"
        )
    status = commands.add_parser(
        "status", help="Show what the engine is doing.", description="Show the engine's counters."
    )
    _add_common(status)
    summary = "Record what the engine does in its next ticks."
    trace = commands.add_parser("trace", help=summary, description=f"{summary} The file is for Perfetto or Chrome.")
    trace.add_argument("file", metavar="FILE", type=_new_file, help="where to write the trace, such as out.json")
    trace.add_argument("--ticks", type=int, default=300, metavar="N", help="turns of its loop (default %(default)s)")
    limit = "end it after this time, as when the engine idles (default %(default)s)"
    trace.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help=limit)
    trace.add_argument("--engine", type=int, metavar="I", help="which one, where there are several")
    _add_common(trace)
    return parser


def _add_task(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    task = commands.add_parser(name, help=summary, description=summary)
    task.add_argument("--stream", action="store_true", help="print each part as soon as it is there")
    task.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=_option,
        help="any option of the server, such as seed=1; may be given several times",
    )
    _add_common(task)
    return task


def _add_text_options(task: argparse.ArgumentParser) -> None:
    task.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    task.add_argument("--temperature", type=float, metavar="T", help="0 always gives the likeliest words")


def _add_common(task: argparse.ArgumentParser) -> None:
    task.add_argument("--json", action="store_true", help="print exactly one JSON document, also when it fails")
    task.add_argument("--url", default=DEFAULT_URL, metavar="HOST:PORT", help="gRPC door (default %(default)s)")
    task.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up and cancel after this time")


def _option(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value read as JSON where it is JSON, else as a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a time above 0, got {text!r}")
    return value


def _picture_file(text: str) -> Path:
    """Where --save writes to, refused before the question is asked rather than after it is answered."""
    path = Path(text)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise argparse.ArgumentTypeError(f"expected the name of a picture, such as boxes.png, got {text!r}")
    return _new_file(text)


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {str(path.parent)!r}")
    return path


def _run(arguments: argparse.Namespace) -> None:
    with Client(arguments.url) as client:
        if arguments.command == "status":
            _print_status(client.status(arguments.timeout), arguments.json)
        elif arguments.command == "trace":
            _trace(client, arguments)
        else:
            _ask(client, arguments)


def _trace(client: Client, arguments: argparse.Namespace) -> None:
    with Progress("recording"):
        trace = client.trace(arguments.ticks, arguments.seconds, arguments.engine, arguments.timeout)
    arguments.file.write_text(json.dumps(trace))
    numbers = [event["args"] for event in trace["traceEvents"] if event["ph"] == "X"]
    counts = {f"{kind}s": len({number[kind] for number in numbers if kind in number}) for kind in ("tick", "step")}
    if arguments.json:
        print(json.dumps({"file": str(arguments.file), **counts}))
    else:
        print(f"{arguments.file}: {counts['ticks']} ticks, {counts['steps']} steps; open it in https://ui.perfetto.dev")


def _ask(client: Client, arguments: argparse.Namespace) -> None:
    task, key, shown = arguments.command, KEYS[arguments.command], arguments.stream and not arguments.json
    picture, text = _subject(arguments)
    image = None if picture is None else sys.stdin.buffer.read() if picture == "-" else Path(picture).read_bytes()
    with Progress("waiting for the answer") as progress:
        result = client.ask(task, image, text, shown, arguments.timeout, _options(arguments))
        if shown:
            stream = result[key]
            for number, part in enumerate(stream, 1):
                progress.stop()
                _print_part(part, text, number)
            result = stream.result()
    if image is not None and getattr(arguments, "save", None):
        drawn = annotate(image, result.get("objects", ()), result.get("points", ()), label=text or "")
        drawn.save(arguments.save)
    _print_result(result, key, text, arguments.json, shown)


def _subject(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """(picture, text) of the command line."""
    if arguments.command != "query":
        return arguments.picture, getattr(arguments, "object", None)
    words = arguments.words
    if len(words) > 2:
        raise InvalidArgument("query takes a picture and a question; put the question in quotes")
    if len(words) == 1 and (words[0] == "-" or Path(words[0]).is_file()):
        raise InvalidArgument(f"the question about {words[0]} is missing")
    return (words[0], words[1]) if len(words) == 2 else (None, words[0])


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = {name: getattr(arguments, name, None) for name in ("length", "reasoning", "max_tokens", "temperature")}
    return {**flags, **dict(arguments.option)}


def _print_part(part: str | dict[str, float], text: str | None, number: int) -> None:
    print(part if isinstance(part, str) else _line(part, text, number), end="" if isinstance(part, str) else "\n")
    sys.stdout.flush()


def _line(place: dict[str, float], text: str | None, number: int) -> str:
    if "x" in place:
        return f"{text} {number}: x {place['x']:.3f}, y {place['y']:.3f}"
    x, y = (f"{place[f'{axis}_min']:.3f} to {place[f'{axis}_max']:.3f}" for axis in "xy")
    return f"{text} {number}: x {x}, y {y}"


def _print_result(result: dict[str, Any], key: str, text: str | None, as_json: bool, shown: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    answer = result[key]
    if isinstance(answer, str):
        print("" if shown else answer)
    elif not answer:
        print(f"no {text} found")
    elif not shown:
        print("\n".join(_line(place, text, number) for number, place in enumerate(answer, 1)))
    if "reasoning" in result:
        print(f"\nreasoning: {result['reasoning']['text']}")
    if result["finish_reason"] != "stop":
        print(f"photon: the answer ended early: {result['finish_reason']}", file=sys.stderr)


def _print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status))
        return
    width = max(map(len, status), default=0)
    for name, value in status.items():
        print(f"{name:<{width}}  {value if isinstance(value, str) else json.dumps(value)}")


def _fail(arguments: argparse.Namespace, code: str, message: str, exit_code: int) -> int:
    if arguments.json:
        print(json.dumps({"error": {"code": code, "message": message}}, ensure_ascii=False), flush=True)
    print(f"photon: {message}", file=sys.stderr)
    return exit_code
