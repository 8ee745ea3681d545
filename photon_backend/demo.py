"""`make demo`: a real Triton server, the bundled model, one picture, questions through gRPC and HTTP.

Everything asked has a known answer, and the exit code says whether all of them were right. A picture lies beside a JSON
file of the same name with what is true of it, as `tiny/pictures.py` writes it; read here are `background` (tone),
`objects` (kind, color, box), `text` (or null) and `queries` (question, answer).
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photon_client import Client, PhotonError, annotate
from PIL import Image

from photon_backend.layout import LaunchError
from photon_backend.serve import Server, start_server
from photon_backend.tiny.pictures import DIRECTORY
from photon_backend.tiny.scenes import COLORS, KINDS, TONES, Box, iou

OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 128}  # greedy: the same answer every time


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


DESCRIBE = "Describe the picture as JSON."
SCHEMA = _object(
    background={"enum": [*TONES]},
    objects={"type": "array", "maxItems": 12, "items": _object(color={"enum": [*COLORS]}, shape={"enum": [*KINDS]})},
    text={"type": ["string", "null"], "maxLength": 8},
)


@dataclass(frozen=True)
class Truth:
    """What is in the picture. `name` is what most of its objects are called, `boxes` are theirs. `description` is the
    JSON text that SCHEMA allows."""

    name: str
    boxes: list[Box]
    questions: list[tuple[str, str]]  # with the right answer; the last one is for HTTP
    description: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m photon_backend.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--picture", type=Path, help="a PNG with its JSON [the richest of the bundled ones]")
    parser.add_argument("--save", type=Path, default=Path("out/demo.png"), help="annotated picture [%(default)s]")
    options = parser.parse_args(arguments)
    try:
        picture = options.picture or richest_picture()
        truth = read_truth(picture)
        print("Starting Triton with the bundled model on the CPU ...", flush=True)
        begun = time.monotonic()
        with start_server() as server:
            print(f"Ready after {time.monotonic() - begun:.0f} s: gRPC {server.grpc_url}, HTTP {server.http_url}\n")
            wrong = Demo(server, picture, truth).run(options.save)
    except (LaunchError, PhotonError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"Server stopped. {f'{wrong} answers were wrong.' if wrong else 'All answers were right.'}")
    return 1 if wrong else 0


def richest_picture() -> Path:
    """The bundled picture with a printed text, if any has one, and the most objects. Raises FileNotFoundError."""

    def riches(picture: Path) -> tuple[bool, int]:
        document = json.loads(picture.with_suffix(".json").read_text())
        return document["text"] is not None, len(document["objects"])

    pictures = sorted(DIRECTORY.glob("*.png"))
    if not pictures:
        raise FileNotFoundError(f"no pictures in {DIRECTORY}")
    return max(pictures, key=riches)


def read_truth(picture: Path) -> Truth:
    """Questions with answers, the kind of object that is there most often, and a description, from the JSON file beside
    a picture.

    Raises OSError.
    """
    document = json.loads(picture.with_suffix(".json").read_text())
    objects = document["objects"]
    (name, _), *_ = Counter(thing["kind"] for thing in objects).most_common(1)
    boxes = [tuple(thing["box"]) for thing in objects if thing["kind"] == name]
    questions = [(query["question"], query["answer"]) for query in document["queries"]]
    return Truth(name, boxes, questions, _description(document))


def _description(document: dict[str, Any]) -> str:
    """As a constraint spells it: no white space, keys in the order of the schema."""
    value = {
        "background": document["background"]["tone"],
        "objects": [{"color": thing["color"], "shape": thing["kind"]} for thing in document["objects"]],
        "text": document["text"] and document["text"]["text"],
    }
    return json.dumps(value, separators=(",", ":"))


class Demo:
    """Asks a running server about one picture, prints the answers and counts the wrong ones."""

    def __init__(self, server: Server, picture: Path, truth: Truth) -> None:
        self.server = server
        self.picture = picture
        self.truth = truth
        self.wrong = 0

    def run(self, save: Path) -> int:
        """The number of wrong answers."""
        with Image.open(self.picture) as image:
            print(f"Picture: {self.picture} ({image.width} x {image.height})\n")
        with Client(self.server.grpc_url) as client:
            print("Over gRPC, streamed:")
            for question, answer in self.truth.questions[:-1]:
                stream = client.query(self.picture, question, stream=True, timeout=60, **OPTIONS)["answer"]
                self._show("query", question, "".join(stream), answer)
            answer = client.query(self.picture, DESCRIBE, json_schema=SCHEMA, timeout=60, **OPTIONS)["answer"]
            self._show("query", DESCRIBE, answer, self.truth.description)
            self._caption(client)
            objects = list(client.detect(self.picture, self.truth.name, stream=True, timeout=60)["objects"])
            self._places("detect", len(objects), _right_boxes(objects, self.truth.boxes))
            points = list(client.point(self.picture, self.truth.name, stream=True, timeout=60)["points"])
            self._places("point", len(points), _right_points(points, self.truth.boxes))
        print("\nOver HTTP, as curl would:")
        question, answer = self.truth.questions[-1]
        self._show("query", question, self._generate(task="query", text_input=question), answer)
        save.parent.mkdir(parents=True, exist_ok=True)
        annotate(annotate(self.picture, objects, label=self.truth.name), points=points).save(save)
        print(f"\nBoxes and points are drawn in {save}")
        return self.wrong

    def _show(self, task: str, question: str, answer: str, expected: str) -> None:
        right = answer.strip().rstrip(".").lower() == expected.lower()
        self.wrong += not right
        print(f"  {task:8} {question:42} {answer}{'' if right else f'   (wrong: {expected})'}", flush=True)

    def _caption(self, client: Client) -> None:
        """Printed as it comes, word by word. There is more than one good caption, so only an empty one is wrong."""
        print(f"  {'caption':8} ", end="")
        stream = client.caption(self.picture, stream=True, timeout=60, **OPTIONS)["caption"]
        parts = 0
        for parts, delta in enumerate(stream, 1):  # noqa: B007
            print(delta, end="", flush=True)
        print(f"   ({parts} parts)")
        self.wrong += parts == 0

    def _places(self, task: str, found: int, right: bool) -> None:
        self.wrong += not right
        expected = "" if right else f"   (wrong: {len(self.truth.boxes)}, or not where they are)"
        print(f"  {task:8} {self.truth.name:42} {found} found{expected}", flush=True)

    def _generate(self, **request: Any) -> str:
        """POST to Triton's generate endpoint; the picture as base64, options as request parameters."""
        request |= {"image": base64.b64encode(self.picture.read_bytes()).decode(), **OPTIONS}
        url = f"{self.server.http_url}/v2/models/photon/generate"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy: it is local
        with opener.open(urllib.request.Request(url, json.dumps(request).encode()), timeout=60) as reply:
            return str(json.load(reply)["text_output"])


def _right_boxes(objects: list[dict[str, float]], truth: list[Box]) -> bool:
    """As many as there are, and one on each: intersection over union at least 0.5."""
    found = [(box["x_min"], box["y_min"], box["x_max"], box["y_max"]) for box in objects]
    return len(found) == len(truth) and all(any(iou(box, other) >= 0.5 for other in found) for box in truth)


def _right_points(points: list[dict[str, float]], truth: list[Box]) -> bool:
    """As many as there are, and one in each box."""
    return len(points) == len(truth) and all(
        any(box[0] <= point["x"] <= box[2] and box[1] <= point["y"] <= box[3] for point in points) for box in truth
    )


if __name__ == "__main__":
    sys.exit(main())
