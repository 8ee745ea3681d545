"""The demo pictures and their truth: `python -m photon_backend.tiny.pictures` writes `pictures/*.png` and `*.json`.

They are laid out by hand, from the same shapes as the training scenes; the model was not trained on them.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from photon_backend.tiny import paint
from photon_backend.tiny.captions import LENGTHS, caption
from photon_backend.tiny.scenes import TEXT_OWNER, WIDTHS, Box, Item, Printed, Scene

DIRECTORY = Path(__file__).parent / "pictures"


@dataclass(frozen=True)
class Layout:
    """`items`: (kind, color, width in pixels, x and y of the middle), later ones in front; `text`: (text, x, y)."""

    name: str
    size: tuple[int, int]
    background: tuple[str, str]  # tone and style
    items: tuple[tuple[str, str, int, int, int], ...]
    text: tuple[str, int, int] | None
    queries: tuple[tuple[str, str], ...]


LAYOUTS = (
    Layout(
        "shapes",
        (256, 192),
        ("white", "plain"),
        (
            ("circle", "red", 92, 66, 84),
            ("square", "blue", 56, 166, 58),
            ("triangle", "green", 32, 226, 40),
            ("star", "yellow", 58, 206, 140),
        ),
        None,
        (
            ("What color is the circle?", "red"),
            ("How many objects are there?", "4"),
            ("What shape is the blue object?", "square"),
            ("Is there a heart?", "no"),
            ("What is left of the blue square?", "a red circle"),
            ("What is written?", "no text"),
        ),
    ),
    Layout(
        "sign",
        (256, 192),
        ("gray", "gradient"),
        (("heart", "red", 54, 54, 124), ("heart", "pink", 54, 128, 130), ("square", "orange", 34, 210, 112)),
        ("OPEN", 128, 36),
        (
            ("What is written in the picture?", "OPEN"),
            ("How many hearts are there?", "2"),
            ("What color is the square?", "orange"),
            ("Is the red heart left of the pink heart?", "yes"),
            ("Where is the text?", "at the top"),
        ),
    ),
    Layout(
        "number",
        (192, 256),
        ("black", "striped"),
        (("star", "pink", 88, 76, 84), ("cross", "green", 52, 140, 164)),
        ("42", 70, 224),
        (
            ("What number do you see?", "42"),
            ("What is below the star?", "a green cross and the number 42"),
            ("Is the star green?", "no"),
            ("What color is the background?", "black"),
        ),
    ),
    Layout(
        "crowd",
        (256, 256),
        ("white", "noisy"),
        (
            ("circle", "red", 46, 44, 58),
            ("circle", "red", 44, 128, 72),
            ("circle", "red", 46, 210, 48),
            ("triangle", "blue", 70, 70, 180),
            ("triangle", "blue", 44, 150, 200),
            ("diamond", "purple", 70, 206, 138),
        ),
        None,
        (
            ("How many circles are there?", "3"),
            ("How many blue triangles do you see?", "2"),
            ("Is there a purple diamond?", "yes"),
            ("How many red squares are in the picture?", "0"),
            ("Are there more circles than triangles?", "yes"),
        ),
    ),
    Layout(
        "overlap",
        (256, 192),
        ("gray", "plain"),
        (
            ("diamond", "pink", 96, 172, 104),
            ("cross", "green", 34, 206, 84),
            ("star", "yellow", 60, 60, 132),
            ("circle", "orange", 56, 72, 52),
        ),
        None,
        (
            ("What color is the diamond?", "pink"),
            ("What is the smallest object?", "a green cross"),
            ("How many shapes are there?", "4"),
            ("What shape is the leftmost object?", "star"),
        ),
    ),
)


def build(layout: Layout) -> Scene:
    """The rendered scene; its seed is 0, for there is none."""
    width, height = layout.size
    tone, style = layout.background
    rng = random.Random(layout.name)
    canvas = paint.background(rng, width, height, tone, style)
    owner = np.zeros((height, width), np.int8)
    placed: list[tuple[Item, int]] = []
    for kind, color, item_width, x, y in layout.items:
        mask = paint.shape_mask(kind, item_width)
        box = _paint(canvas, owner, mask, (x, y), paint.ANCHORS[color][0], len(placed) + 1)
        share = item_width / min(layout.size)
        size = next(name for name, (low, high) in WIDTHS.items() if low - 0.02 <= share <= high + 0.02)
        placed.append((Item(kind, color, size, box), len(placed) + 1))
    placed.sort(key=lambda pair: pair[0].center)
    scene = Scene(0, tone, style, [item for item, _ in placed])
    if layout.text:
        text, x, y = layout.text
        mask = paint.text_mask(text, 40)
        scene.printed = Printed(text, _paint(canvas, owner, mask, (x, y), paint.ink(rng, tone), TEXT_OWNER))
        owner[y - mask.shape[0] // 2 :, x - mask.shape[1] // 2 :][: mask.shape[0], : mask.shape[1]] = TEXT_OWNER
    names = np.arange(128, dtype=np.int8)
    names[[number for _, number in placed]] = range(1, len(placed) + 1)
    scene.pixels, scene.owner = canvas, names[owner]
    return scene


def _paint(
    canvas: np.ndarray,
    owner: np.ndarray,
    mask: np.ndarray,
    middle: tuple[int, int],
    color: tuple[int, int, int],
    number: int,
) -> Box:
    """Paints a mask around a point and returns its box."""
    height, width = owner.shape
    x, y = middle[0] - mask.shape[1] // 2, middle[1] - mask.shape[0] // 2
    paint.blend(canvas, mask, x, y, color)
    owner[y : y + mask.shape[0], x : x + mask.shape[1]][mask > 127] = number
    return x / width, y / height, (x + mask.shape[1]) / width, (y + mask.shape[0]) / height


def truth(layout: Layout, scene: Scene) -> dict[str, object]:
    """What is written beside the picture: objects from left to right, text, captions, and questions with answers."""
    return {
        "background": {"tone": scene.tone, "style": scene.style},
        "objects": [asdict(item) for item in scene.items],
        "text": asdict(scene.printed) if scene.printed else None,
        "captions": {length: caption(scene, length) for length in LENGTHS},
        "queries": [{"question": question, "answer": answer} for question, answer in layout.queries],
    }


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for layout in LAYOUTS:
        scene = build(layout)
        Image.fromarray(scene.pixels).save(DIRECTORY / f"{layout.name}.png", optimize=True)
        document = json.dumps(truth(layout, scene), indent=2)
        (DIRECTORY / f"{layout.name}.json").write_text(document + "\n")


if __name__ == "__main__":
    main()
