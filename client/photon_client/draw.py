"""Boxes and points drawn on a picture, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from PIL import Image, ImageDraw, ImageFont

from photon_client.images import ImageLike, displayed_image

# Told apart by most colour-blind viewers too (Okabe and Ito), the darkest ones first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
MIN_SIDE = 480  # px; a smaller picture is enlarged by a whole factor, or its labels could not be read

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels
Objects = Sequence[Mapping[str, float]]


def annotate(image: ImageLike, objects: Objects = (), points: Objects = (), label: str = "") -> Image.Image:
    """A copy of the displayed picture (RGB, upright) with boxes and points on it, each with its label.

    `objects` are dicts with x_min, y_min, x_max, y_max, `points` dicts with x, y, all in 0..1 of the displayed picture.
    Where there are several, labels are numbered from 1. A picture whose longer side is below 480 px is
    enlarged by a whole factor without smoothing.
    """
    picture = displayed_image(image)
    factor = -(-MIN_SIDE // max(picture.size)) if max(picture.size) < MIN_SIDE else 1
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    pen = _Pen(picture)
    boxes = [pen.box(box, colour) for box, colour in zip(objects, cycle(COLOURS), strict=False)]
    dots = [pen.point(point, colour) for point, colour in zip(points, cycle(COLOURS), strict=False)]
    for anchors in (boxes, dots):  # after all lines, so that none crosses a label
        for number, anchor in enumerate(anchors, 1):
            pen.label(f"{label} {number}" if len(anchors) > 1 else label, *anchor)
    return picture


Anchor = tuple[float, float, float, str]  # x, y of a thing, the distance its label keeps (all in pixels), its colour


class _Pen:
    """Draws on one picture, with sizes that fit it."""

    def __init__(self, picture: Image.Image) -> None:
        self.size = picture.size
        self.draw = ImageDraw.Draw(picture)
        self.labels: list[Box] = []  # drawn so far
        side = max(picture.size)
        self.line = max(2, round(side / 250))
        self.font = ImageFont.load_default(max(13, round(side / 45)))

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        width, height = self.size
        return min(max(x, 0.0), 1.0) * (width - 1), min(max(y, 0.0), 1.0) * (height - 1)

    def box(self, box: Mapping[str, float], colour: str) -> Anchor:
        corners = [self.pixel(box["x_min"], box["y_min"]), self.pixel(box["x_max"], box["y_max"])]
        self.draw.rectangle(corners, outline="white", width=self.line + 2)
        self.draw.rectangle(corners, outline=colour, width=self.line)
        return (*corners[0], 0.0, colour)

    def point(self, point: Mapping[str, float], colour: str) -> Anchor:
        centre, radius = self.pixel(point["x"], point["y"]), self.line * 2.5
        self.draw.circle(centre, radius, fill=colour, outline="white", width=max(1, self.line // 2))
        return (*centre, radius + 2, colour)

    def label(self, text: str, x: float, y: float, gap: float, colour: str) -> None:
        """Text on a filled box, above its anchor where there is room, else below, and lower where another label is."""
        text = " ".join(text.split())
        if not text:
            return
        left, top, right, bottom = self.draw.textbbox((0, 0), text, font=self.font)
        width, height = right - left + 6, bottom - top + 6
        x = max(0.0, min(x, self.size[0] - width))
        y = y - height - gap if y >= height + gap else y + gap
        while y + height < self.size[1] and any(
            _overlap((x, y, x + width, y + height), other) for other in self.labels
        ):
            y += height
        y = max(0.0, min(y, self.size[1] - height))
        self.labels.append((x, y, x + width, y + height))
        self.draw.rectangle(self.labels[-1], fill=colour)
        self.draw.text((x + 3 - left, y + 3 - top), text, font=self.font, fill=_ink(colour))


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
