"""The world of the bundled model: pictures of a few coloured shapes, sometimes with a short printed word or number.

`make_scene(seed)` gives a picture and what is true of it; the same seed always gives the same scene. Sizes are relative
to the shorter side of the picture, because the model sees every picture resized to its crops. Objects are sorted by the
x of their centre, the order in which the model lists them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from photon_backend.tiny import paint

KINDS = ("circle", "square", "triangle", "diamond", "star", "cross", "heart")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SIZES = ("small", "medium", "large")
TONES = ("white", "gray", "black")
STYLES = ("plain", "gradient", "striped", "noisy")

WIDTHS = {"small": (0.15, 0.19), "medium": (0.26, 0.33), "large": (0.45, 0.55)}  # of the shorter side
_WORDS = (
    "STOP OPEN CAFE HELLO EXIT TAXI BUS SALE NEW HOT ICE TEA MILK BOOK GAME ZOO PARK HOME SHOP FISH STAR LOVE FREE "
    "FOOD BANK CITY EAST WEST NORTH SOUTH NO YES OK GO UP DOWN LEFT RIGHT RED BLUE GREEN BIG TOP WAX JAZZ QUIZ FOX "
    "DOG CAT SUN MOON RAIN SNOW WIND FIRE KEY CAR TRAIN PLANE BOAT LAMP DESK WATER BREAD APPLE PIZZA JUICE VIDEO"
)
WORDS = tuple(_WORDS.split())
COUNT_WEIGHTS = (4, 14, 20, 21, 18, 13, 10)  # of scenes with 0, 1, ... 6 objects
MIN_VISIBLE = 0.7  # share of an object that others may not cover
TEXT_OWNER = 100  # of the printed text in `Scene.owner`
Box = tuple[float, float, float, float]  # x_min, y_min, x_max, y_max in 0..1 of the picture


@dataclass(frozen=True)
class Item:
    """One shape; `box` has its hidden parts too."""

    kind: str
    color: str
    size: str
    box: Box

    @property
    def center(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class Printed:
    """The printed text, capital letters or digits, and the box of its ink."""

    text: str
    box: Box

    @property
    def center(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def is_number(self) -> bool:
        return self.text.isdigit()


@dataclass
class Scene:
    """A picture and its truth. `pixels` uint8 [h, w, 3]; `owner` int8 [h, w]: 1 + index of the visible item, or 0."""

    seed: int
    tone: str
    style: str
    items: list[Item] = field(default_factory=list)
    printed: Printed | None = None
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 3), np.uint8), repr=False)
    owner: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int8), repr=False)


def make_scene(seed: int) -> Scene:
    """The scene of that seed, rendered. Takes a few milliseconds."""
    rng = random.Random(seed)
    width, height = _picture_size(rng)
    scene = Scene(seed, rng.choice(TONES), rng.choices(STYLES, (4, 2, 2, 2))[0])
    canvas = paint.background(rng, width, height, scene.tone, scene.style)
    owner = np.zeros((height, width), np.int8)
    if rng.random() < 0.4:
        scene.printed = _print_text(rng, canvas, owner, scene.tone)
    placed = _place_items(rng, canvas, owner)
    _sort_by_x(scene, placed, owner)
    scene.pixels = paint.finish(rng, canvas)
    return scene


def _picture_size(rng: random.Random) -> tuple[int, int]:
    """Width and height: 96 to 256 pixels a side, at most 2:1."""
    shorter = rng.randint(96, 180)
    longer = min(256, int(shorter * rng.choice((1.0, 4 / 3, rng.uniform(1.0, 2.0)))))
    return (longer, shorter) if rng.random() < 0.6 else (shorter, longer)


def random_text(rng: random.Random) -> str:
    """A word, a random string of letters, or a number, so that reading cannot be guessing."""
    draw = rng.random()
    if draw < 0.4:
        return "".join(rng.choice("0123456789") for _ in range(rng.choices((1, 2, 3, 4), (1, 4, 3, 2))[0]))
    if draw < 0.7:
        return rng.choice(WORDS)
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))


def _print_text(rng: random.Random, canvas: np.ndarray, owner: np.ndarray, tone: str) -> Printed | None:
    height, width = owner.shape
    text = random_text(rng)
    font_size = max(15, round(rng.uniform(0.16, 0.26) * min(width, height)))
    mask = paint.text_mask(text, font_size)
    while mask.shape[1] > width - 4 and font_size > 15:
        font_size -= 1
        mask = paint.text_mask(text, font_size)
    if mask.shape[1] > width - 4:
        return None
    x, y = rng.randint(2, width - mask.shape[1] - 2), rng.randint(2, height - mask.shape[0] - 2)
    paint.blend(canvas, mask, x, y, paint.ink(rng, tone))
    owner[y : y + mask.shape[0], x : x + mask.shape[1]] = TEXT_OWNER
    return Printed(text, _box(x, y, mask, owner))


def _place_items(rng: random.Random, canvas: np.ndarray, owner: np.ndarray) -> list[Item]:
    """Paints items one over the other, in the order of the list it returns (owner holds 1 + that index)."""
    count = rng.choices(range(len(COUNT_WEIGHTS)), COUNT_WEIGHTS)[0]
    kinds = rng.sample(KINDS, rng.choice((1, 2, 3, 4, 7)))  # few kinds and colours, so that counts above one are common
    colors = rng.sample(COLORS, rng.choice((1, 2, 3, 4, 7)))
    sizes = SIZES if rng.random() < 0.7 else (rng.choice(SIZES[:2]),)
    overlap = rng.random() < 0.4
    placed: list[Item] = []
    areas: list[int] = []
    while len(placed) < count:
        kind, color = rng.choice(kinds), rng.choice(colors)
        item = _place(rng, canvas, owner, placed, areas, (kind, color, sizes, overlap))
        if item is None:
            break
        placed.append(item)
    return placed


def _place(
    rng: random.Random,
    canvas: np.ndarray,
    owner: np.ndarray,
    placed: list[Item],
    areas: list[int],
    wanted: tuple[str, str, tuple[str, ...], bool],
) -> Item | None:
    """Finds a place for one item and paints it there; None when thirty tries found none."""
    kind, color, sizes, overlap = wanted
    height, width = owner.shape
    for _ in range(30):
        size = rng.choice(sizes)
        mask = paint.shape_mask(kind, round(rng.uniform(*WIDTHS[size]) * min(width, height)))
        rows, columns = mask.shape
        x, y = rng.randint(1, width - columns - 1), rng.randint(1, height - rows - 1)
        if not _fits(owner, mask, x, y, placed, areas, color, overlap):
            continue
        window = owner[y : y + rows, x : x + columns]
        window[mask > 127] = len(placed) + 1
        areas.append(int((mask > 127).sum()))
        paint.blend(canvas, mask, x, y, paint.paint_color(rng, color))
        return Item(kind, color, size, _box(x, y, mask, owner))
    return None


def _fits(
    owner: np.ndarray,
    mask: np.ndarray,
    x: int,
    y: int,
    placed: list[Item],
    areas: list[int],
    color: str,
    overlap: bool,
) -> bool:
    """True when the item hides no text, too little of any other item and no centre, and touches none of its colour."""
    rows, columns = mask.shape
    around = owner[max(0, y - 3) : y + rows + 3, max(0, x - 3) : x + columns + 3]
    if not around.any():
        return True
    touched = [int(i) for i in np.flatnonzero(np.bincount(around.ravel())) if i > 0]
    if not overlap or TEXT_OWNER in touched or any(placed[i - 1].color == color for i in touched):
        return False
    left = owner.copy()
    left[y : y + rows, x : x + columns][mask > 127] = 0
    height, width = owner.shape
    for i in touched:
        center_x, center_y = placed[i - 1].center
        row, column = int(center_y * height), int(center_x * width)
        near = left[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3]
        if (left == i).sum() < MIN_VISIBLE * areas[i - 1] or (near != i).any():
            return False
    return True


def _sort_by_x(scene: Scene, placed: list[Item], owner: np.ndarray) -> None:
    order = sorted(range(len(placed)), key=lambda i: placed[i].center)
    scene.items = [placed[i] for i in order]
    names = np.zeros(128, np.int8)
    names[TEXT_OWNER] = TEXT_OWNER
    for new, old in enumerate(order):
        names[old + 1] = new + 1
    scene.owner = names[owner]


def _box(x: int, y: int, mask: np.ndarray, owner: np.ndarray) -> Box:
    height, width = owner.shape
    return x / width, y / height, (x + mask.shape[1]) / width, (y + mask.shape[0]) / height


def iou(one: Box, two: Box) -> float:
    """Intersection over union."""
    width = min(one[2], two[2]) - max(one[0], two[0])
    height = min(one[3], two[3]) - max(one[1], two[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, two))
    return shared / (areas - shared)
